"""Models of transformers as they are, with posenc's attention, and in other engines.

    python -m benchmarks.engines                                  every model, batches of 1
    python -m benchmarks.engines --engines posenc --layers 12 --name transformers_whole \\
        --models deberta_v2,mpnet,t5 --sizes 16x128,1x512,64x64   whole models, BATCHxSIZE

Each pair of engines is timed in a process of its own, by turns; times are medians. Writes
``benchmarks/results/transformers.json``, or that of the name.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.engine_models import MODELS, Model, save_tokenizer
from benchmarks.measuring import CLOCKS, table, write_results
from torch import Tensor
from transformers import PreTrainedModel

from posenc.lab.training.machine import PeakMemory
from posenc.transformers.acceleration import accelerate, register, restore

Pass = Callable[[], Any]

ENGINES = (
    "posenc",
    "interface",
    "onnxruntime",
    "onnxruntime_int8",
    "openvino",
    "ctranslate2",
    "ctranslate2_int8",
)
INTERFACE = ("bert", "llama")
"""Models whose attention has no bias: they take ``attn_implementation="posenc"``."""

MEMORY = 15 << 30
"""Bytes that a process may take; more counts as out of memory."""

MEMORY_FROM = 2048
"""Size from which on memory is measured, in both directions."""

SECONDS = 420
"""Time that a process may take."""


def forward(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(**inputs)[0]
    return output


def both(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    model(**inputs)[0].square().mean().backward()
    model.zero_grad()


def exported(model: PreTrainedModel, inputs: dict[str, Tensor], folder: Path) -> Path:
    """The model as an ONNX file, after ONNX Runtime's optimizer for transformers."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    path = folder / "model.onnx"
    arguments = tuple(inputs.values())
    with torch.no_grad():
        torch.onnx.export(
            model, arguments, path, input_names=list(inputs), dynamo=True, verbose=False
        )
    fusions = FusionOptions("bert")
    fusions.enable_embed_layer_norm = False  # quantize_dynamic makes wrong embeddings of its result
    sizes = {"num_heads": 12, "hidden_size": 768}
    optimized = optimize_model(
        str(path), model_type="bert", optimization_options=fusions, opt_level=0, **sizes
    )  # level 0: the session optimizes when it loads
    optimized.save_model_to_file(str(path), use_external_data_format=True)
    return path


def onnxruntime(
    model: PreTrainedModel, inputs: dict[str, Tensor], folder: Path, *, int8: bool = False
) -> Pass:
    import onnxruntime as runtime

    path = exported(model, inputs, folder)
    if int8:
        from onnxruntime.quantization import quantize_dynamic

        quantize_dynamic(path, folder / "int8.onnx")
        path = folder / "int8.onnx"
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = {given.name for given in session.get_inputs()}
    arrays = {name: value.numpy() for name, value in inputs.items() if name in names}
    return lambda: torch.from_numpy(session.run(None, arrays)[0])


def openvino(model: PreTrainedModel, inputs: dict[str, Tensor], folder: Path) -> Pass:
    import openvino as engine

    core = engine.Core()
    core.set_property("CPU", {"INFERENCE_NUM_THREADS": torch.get_num_threads()})
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(exported(model, inputs, folder), "CPU", settings)
    names = {name for given in compiled.inputs for name in given.names}
    arrays = {name: value.numpy() for name, value in inputs.items() if name in names}
    return lambda: torch.from_numpy(compiled(arrays)[0])


def ctranslate2(
    model: PreTrainedModel, inputs: dict[str, Tensor], folder: Path, *, int8: bool = False
) -> Pass:
    """Log-probabilities of a target by CTranslate2, which has T5 with its decoder only."""
    import ctranslate2 as engine

    save_tokenizer(folder, model.config.vocab_size)
    model.save_pretrained(folder)
    converted = engine.converters.TransformersConverter(str(folder)).convert(
        str(folder / "converted"), quantization="int8" if int8 else None
    )
    kind = "int8" if int8 else "float32"
    translator = engine.Translator(
        converted, intra_threads=torch.get_num_threads(), inter_threads=1, compute_type=kind
    )
    source = [f"t{number}" for number in inputs["input_ids"][0].tolist()]
    target = [f"t{number}" for number in inputs["decoder_input_ids"][0, 1:].tolist()]

    def run() -> Tensor:
        (scores,) = translator.score_batch([source], [target], max_input_length=0)
        return torch.tensor(scores.log_probs)

    return run


def target_scores(model: PreTrainedModel, inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
    """Log-probabilities of the target's tokens and of the end, as CTranslate2 gives them."""
    end = torch.tensor([model.config.eos_token_id])
    following = torch.cat([inputs["decoder_input_ids"][0, 1:], end])
    return logits[0].log_softmax(-1).gather(-1, following.unsqueeze(-1))[:, 0]


def by_turns(
    own: Pass,
    other: Pass,
    before: Pass,
    after: Pass,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Median seconds of two passes that take turns; the first round is not counted."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for seconds, run, prepare, finish in (
            (times[0], own, None, None),
            (times[1], other, before, after),
        ):
            if prepare is not None:
                prepare()
            start = clock()
            run()
            if turn:
                seconds.append(clock() - start)
            if finish is not None:
                finish()
    return statistics.median(times[0]), statistics.median(times[1])


def switches(model: PreTrainedModel, engine: str) -> tuple[Pass, Pass]:
    """Functions that put posenc's attention under a model and take it away again."""
    if engine == "posenc":
        return lambda: accelerate(model, check=False), lambda: restore(model)
    register()
    own = model.config._attn_implementation
    return (
        lambda: model.set_attn_implementation("posenc"),
        lambda: model.set_attn_implementation(own),
    )


def parsed_size(text: str) -> tuple[int, int]:
    """Batch and size of ``16x128``, or of ``128`` in a batch of one."""
    *batch, size = map(int, text.split("x"))
    return (batch[0] if batch else 1), size


def rows_of(entry: Model, batch: int, size: int) -> dict[str, Tensor]:
    """Inputs of a batch, each row with numbers of its own."""
    rows = [entry.inputs(size) for _ in range(batch)]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def measure(
    name: str, engine: str, given: str, layers: int, direction: str, clock: Callable[[], float]
) -> dict[str, Any]:
    """One row: seconds of transformers and of the other engine, and the largest difference."""
    torch.manual_seed(0)
    entry = MODELS[name]
    batch, size = parsed_size(given)
    model, inputs = entry.make(layers).eval(), rows_of(entry, batch, size)
    run = forward if direction == "forward" else both
    expected = forward(model, inputs)
    tokens = batch * size
    rounds = 9 if tokens <= 512 else 5 if tokens <= 2048 else 2
    with tempfile.TemporaryDirectory() as folder:
        if engine in ("posenc", "interface"):
            before, after = switches(model, engine)
            before()
            found = forward(model, inputs)
            after()
            seconds = by_turns(
                lambda: run(model, inputs), lambda: run(model, inputs), before, after, rounds, clock
            )
        else:
            path = Path(folder)
            other: Pass = {
                "onnxruntime": lambda: onnxruntime(model, inputs, path),
                "onnxruntime_int8": lambda: onnxruntime(model, inputs, path, int8=True),
                "openvino": lambda: openvino(model, inputs, path),
                "ctranslate2": lambda: ctranslate2(model, inputs, path),
                "ctranslate2_int8": lambda: ctranslate2(model, inputs, path, int8=True),
            }[engine]()
            found = other()
            if engine.startswith("ctranslate2"):
                expected = target_scores(model, inputs, expected)
            nothing: Pass = lambda: None  # noqa: E731
            seconds = by_turns(lambda: run(model, inputs), other, nothing, nothing, rounds, clock)
    off = float((found - expected).abs().max() / expected.abs().max())
    return {"transformers_s": seconds[0], "engine_s": seconds[1], "difference": off}


def memory(name: str, engine: str, given: str, layers: int, direction: str) -> dict[str, Any]:
    """Peak memory of one pass above that of the model, in MiB."""
    torch.manual_seed(0)
    entry = MODELS[name]
    model = entry.make(layers).eval()
    if engine != "transformers":
        switches(model, engine)[0]()
    run = forward if direction == "forward" else both
    inputs = rows_of(entry, *parsed_size(given))
    run(model, entry.inputs(entry.sizes[0]))
    peak = PeakMemory(torch.device("cpu"))
    run(model, inputs)
    return {"peak_MiB": peak.used() / 2**20}


def in_process(task: str, *arguments: object) -> dict[str, Any]:
    """The result of a task in a process of its own, or the reason why there is none."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.engines", "--task", task]
    try:
        run = subprocess.run(
            [*command, *map(str, arguments)], capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"longer than {SECONDS} s"}
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["killed"])[-1]
        return {"failed": "out of memory" if "alloc" in run.stderr else last[:160]}
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a table."""
    lines = []
    for row in rows:
        size = f"{row['batch']} x {row['size']}" if row.get("batch", 1) > 1 else str(row["size"])
        key = (row["model"], size, row["pass"], row["engine"])
        if "failed" in row:
            lines.append((*key, row["failed"]))
            continue
        own, other = 1e3 * row["transformers_s"], 1e3 * row["engine_s"]
        peaks = " → ".join(
            "?" if peak is None else f"{peak:,.0f}" for peak in row.get("peaks_MiB", ())
        )
        times = (f"{own:,.1f}", f"{other:,.1f}", f"{own / other:.2f} ×")
        lines.append((*key, *times, peaks, f"{row['difference']:.0e}"))
    head = ("model", "size", "pass", "engine", "transformers ms", "ms", "faster", "peak MiB", "off")
    return table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas")
    parser.add_argument("--engines", default=",".join(ENGINES), help="names, with commas")
    parser.add_argument(
        "--sizes", help="tokens or pixels, or 16x128 for a batch of 16; of each model"
    )
    parser.add_argument("--layers", type=int, default=1, help="of each model (1)")
    parser.add_argument("--passes", default="forward,both", help="directions, with commas")
    parser.add_argument("--threads", type=int, default=2, help="of every engine (2)")
    parser.add_argument(
        "--clock",
        default="wall",
        choices=list(CLOCKS),
        help="processor time is that of the process: for one thread on a machine that others share",
    )
    parser.add_argument("--name", default="transformers", help="of the file in results")
    parser.add_argument("--task", nargs=8, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task, name, engine, size, layers, direction, threads, clock = options.task
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        torch.set_num_threads(int(threads))
        job = (name, engine, size, int(layers), direction)
        found = measure(*job, CLOCKS[clock]) if task == "measure" else memory(*job)
        print(json.dumps(found))
        return
    rows = []
    for name in options.models.split(","):
        sizes = options.sizes.split(",") if options.sizes else map(str, MODELS[name].sizes)
        for given in sizes:
            batch, size = parsed_size(given)
            for direction in options.passes.split(","):
                for engine in options.engines.split(","):
                    by_posenc = engine in ("posenc", "interface")
                    if by_posenc and (engine == "interface") != (name in INTERFACE):
                        continue
                    if not by_posenc and direction == "both":
                        continue
                    if engine.startswith("ctranslate2") and name != "t5_scoring":
                        continue
                    job = (name, engine, given, options.layers, direction, options.threads)
                    job += (options.clock,)
                    row = {"model": name, "size": size, "pass": direction, "engine": engine}
                    row |= {"batch": batch} if batch > 1 else {}
                    row |= in_process("measure", *job)
                    if by_posenc and direction == "both" and size >= MEMORY_FROM:
                        own = ("memory", name, "transformers", *job[2:])
                        peaks = [in_process(*own), in_process("memory", *job)]
                        row["peaks_MiB"] = [peak.get("peak_MiB") for peak in peaks]
                    rows.append(row)
                    print(shown([row]).splitlines()[-1], flush=True)
                    # After every row, as the next may take minutes.
                    write_results(
                        options.name,
                        rows,
                        layers=options.layers,
                        threads=options.threads,
                        clock=options.clock,
                    )


if __name__ == "__main__":
    main()
