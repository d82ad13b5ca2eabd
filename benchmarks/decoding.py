"""Tokens a second of SmolLM2-135M, one text at a time, in engines on a CPU.

    python -m benchmarks.decoding FOLDER
    python -m benchmarks.decoding FOLDER --engines posenc,llama.cpp --dtypes bfloat16

``FOLDER`` is ``build/real/smollm2`` of ``make real``, or another model of the same kind. Each
engine runs in a process of its own: 64 tokens are read, then 64 written, and a time is the median
of a step. A step reads all weights once, so their bytes over the memory's bandwidth, measured too,
bound it. Prints a table and writes ``benchmarks/results/decoding.json``.

ONNX Runtime is onnxruntime-genai with its own exporter, OpenVINO is openvino-genai, which reads
16-bit GGUF files; llama.cpp is xllamacpp. ``--gguf`` is a folder with ``f32.gguf``,
``f16.gguf`` and ``bf16.gguf`` that llama.cpp's ``convert_hf_to_gguf.py`` wrote. An engine that is
not installed is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.measuring import table, write_results
from torch import Tensor

READ, WRITTEN = 64, 64
"""Tokens of the prompt, and tokens after it."""

GGUF = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def prompt() -> Tensor:
    return torch.arange(1000, 1000 + READ)[None]


def in_pytorch(folder: Path, dtype: str, *, accelerated: bool) -> Iterator[None]:
    """Steps of a model of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if accelerated:
        from posenc.transformers import accelerate

        accelerate(model, check=False)
    with torch.inference_mode():
        output = model(prompt(), use_cache=True)
        while True:
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            yield


def by_onnxruntime(options: Any) -> Iterator[None]:
    import onnxruntime_genai as engine

    made = options.work / "onnxruntime"
    if not made.exists():
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32"]
        given = ["-m", str(options.folder), "-i", str(options.folder), "-o", str(made), "-e", "cpu"]
        subprocess.run([*builder, *given], check=True, capture_output=True)
    config = engine.Config(str(made))
    session = {"session_options": {"intra_op_num_threads": options.threads}}
    config.overlay(json.dumps({"model": {"decoder": session}}))
    model = engine.Model(config)
    settings = engine.GeneratorParams(model)
    settings.set_search_options(max_length=READ + WRITTEN + 8, do_sample=False)
    generator = engine.Generator(model, settings)
    generator.append_tokens(prompt()[0].tolist())
    while True:
        generator.generate_next_token()
        yield


def llama_step(dtype: str, options: Any) -> float:
    """Seconds of a step, as llama.cpp says it."""
    import xllamacpp as engine

    settings = engine.CommonParams()
    settings.model.path = str(options.gguf / f"{GGUF[dtype]}.gguf")
    settings.n_ctx, settings.n_parallel = 256, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = options.threads
    asked = {"prompt": "word " * READ, "n_predict": WRITTEN, "ignore_eos": True, "temperature": 0}
    answer = engine.Server(settings).handle_completions(asked)
    return float(answer["timings"]["predicted_per_token_ms"]) / 1e3


def openvino_step(options: Any) -> float:
    """Seconds of a step, as OpenVINO says it."""
    import openvino_genai as engine

    given = {"INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": "f32"}
    pipeline = engine.LLMPipeline(str(options.gguf / "f16.gguf"), "CPU", **given)
    settings = engine.GenerationConfig()
    settings.max_new_tokens, settings.ignore_eos, settings.do_sample = WRITTEN, True, False
    result = pipeline.generate(["word " * READ], settings)
    return float(result.perf_metrics.get_tpot().mean) / 1e3


def bandwidth() -> float:
    """Bytes a second that all threads read together: the best of sums over 512 MiB."""
    large = torch.ones(2**27)
    shortest = min(timed(large.sum) for _ in range(7))
    return 4 * 2**27 / shortest


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(engine: str, dtype: str, options: Any) -> float:
    """Seconds of a step."""
    torch.set_num_threads(options.threads)
    if engine == "bandwidth":
        return bandwidth()
    if engine == "openvino":
        return openvino_step(options)
    if engine == "llama.cpp":
        return llama_step(dtype, options)
    if engine == "onnxruntime":
        steps = by_onnxruntime(options)
    else:
        steps = in_pytorch(options.folder, dtype, accelerated=engine == "posenc")
    return median(timed(lambda: next(steps)) for _ in range(WRITTEN))


def shown(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    """Milliseconds a token, and the share of the memory's bandwidth that reading weights takes."""
    lines = []
    for engine, dtype in dict.fromkeys((row["engine"], row["dtype"]) for row in rows):
        found = [row for row in rows if (row["engine"], row["dtype"]) == (engine, dtype)]
        times = [row["seconds"] for row in found if "seconds" in row]
        if not times:
            lines.append((engine, dtype, found[0]["failed"], "–"))
            continue
        # The folder holds 2 bytes a weight, and so does what OpenVINO reads.
        half = dtype != "float32" or engine == "openvino"
        read = settings["weights"] * (1 if half else 2)
        share = read / median(times) / settings["bandwidth"]
        lines.append((engine, dtype, f"{1e3 * median(times):.0f}", f"{share:.0%}"))
    return table(("engine", "computed in", "ms a token", "of the memory's bandwidth"), lines)


ENGINES = {
    "transformers": ("float32", "bfloat16"),
    "posenc": ("float32", "bfloat16"),
    "onnxruntime": ("float32",),
    "openvino": ("float32",),
    "llama.cpp": ("float32", "bfloat16"),
}
"""Engines and the dtypes that each is measured in. OpenVINO keeps weights of 16 bits."""


def in_process(engine: str, dtype: str, options: Any) -> dict[str, Any]:
    """A row, measured in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.decoding", *sys.argv[1:]]
    run = subprocess.run(
        [*command, "--task", engine, dtype],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(options.threads)},
    )
    if run.returncode:
        return {"failed": (run.stderr.strip().splitlines() or ["killed"])[-1][:120]}
    return {"seconds": float(run.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--gguf", type=Path, default=Path("build/real/gguf"))
    parser.add_argument("--work", type=Path, default=Path("build/real"), help="for exported models")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="processes for each time (3)")
    parser.add_argument("--task", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        print(measure(*options.task, options), flush=True)
        os._exit(0)  # servers of engines leave threads behind
    weights = sum(file.stat().st_size for file in options.folder.glob("*.safetensors"))
    rows: list[dict[str, Any]] = []
    speeds = []
    for _ in range(options.rounds):
        speeds.append(in_process("bandwidth", "float32", options)["seconds"])
        for engine in options.engines.split(","):
            for dtype in set(ENGINES[engine]) & set(options.dtypes.split(",")):
                found = in_process(engine, dtype, options)
                rows.append({"engine": engine, "dtype": dtype} | found)
    settings = {"bandwidth": max(speeds), "weights": weights, "threads": options.threads}
    write_results("decoding", rows, **settings)
    print(shown(rows, settings))


if __name__ == "__main__":
    main()
