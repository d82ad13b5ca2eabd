"""Models of transformers in engines: as they are, with posenc, compiled, and exported.

    python -m benchmarks.engines                                        base encoders, three layers
    python -m benchmarks.engines --models xlnet,bloom --sizes 512,16x128 --passes forward,both
    python -m benchmarks.engines --engines posenc,ctranslate2 --models t5_scoring --sizes 512

Each engine runs in processes of its own, with nothing beside it: threads of some that wait would
slow others. A time is the median of all passes of all rounds, memory what the process came to hold.
Prints what posenc takes as a multiple of the best other, and how much of it is products of linear
layers, which bound it; writes ``benchmarks/results/engines.json``, or that of the name.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.engine_models import MODELS, Model, save_tokenizer
from benchmarks.measuring import CLOCKS, table, write_results
from torch import Tensor
from transformers import PreTrainedModel

from posenc.transformers.acceleration import accelerate

Pass = Callable[[], Any]

MEMORY = 15 << 30
"""Bytes that a process may take; more counts as out of memory."""

SECONDS = 420
"""Time that a process may take."""

PASS_SECONDS = 4
"""Time after which a process begins no further pass, but for the second."""


def forward(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(**inputs)[0]
    return output


def both(model: torch.nn.Module, inputs: dict[str, Tensor]) -> None:
    model(**inputs)[0].square().mean().backward()
    model.zero_grad()


def made(name: str, layers: int, size: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A model with random weights and its inputs, the same in every process."""
    torch.manual_seed(0)
    entry = MODELS[name]
    batch, tokens = parsed_size(size)
    return entry.make(layers).eval(), rows_of(entry, batch, tokens)


def parsed_size(text: str) -> tuple[int, int]:
    """Batch and size of ``16x128``, or of ``128`` in a batch of one."""
    *batch, size = map(int, text.split("x"))
    return (batch[0] if batch else 1), size


def rows_of(entry: Model, batch: int, size: int) -> dict[str, Tensor]:
    """Inputs of a batch, each row with numbers of its own."""
    rows = [entry.inputs(size) for _ in range(batch)]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def prepare(name: str, layers: int, size: str, folder: Path) -> None:
    """Write inputs, outputs and the exported model of a row into a folder."""
    model, inputs = made(name, layers, size)
    expected = forward(model, inputs)
    if name == "t5_scoring":
        expected = target_scores(model, inputs, expected)
        save_tokenizer(folder / "model", model.config.vocab_size)
        model.save_pretrained(folder / "model")
    torch.save((inputs, expected), folder / "expected.pt")
    with torch.no_grad():
        torch.onnx.export(
            model,
            tuple(inputs.values()),
            folder / "model.onnx",
            input_names=list(inputs),
            dynamo=True,
            verbose=False,
        )


def target_scores(model: PreTrainedModel, inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
    """Log-probabilities of the target's tokens and of the end, as CTranslate2 gives them."""
    end = torch.tensor([model.config.eos_token_id])
    following = torch.cat([inputs["decoder_input_ids"][0, 1:], end])
    return logits[0].log_softmax(-1).gather(-1, following.unsqueeze(-1))[:, 0]


def in_pytorch(engine: str, name: str, layers: int, size: str, direction: str) -> Pass:
    model, inputs = made(name, layers, size)
    called: torch.nn.Module = model
    if engine == "posenc":
        accelerate(model, check=False)
    elif engine == "compile":
        if direction == "forward":
            torch._inductor.config.freezing = True
        called = torch.compile(model)
    return partial(forward if direction == "forward" else both, called, inputs)


def onnxruntime(folder: Path, inputs: dict[str, Tensor], *, int8: bool = False) -> Pass:
    """After ONNX Runtime's optimizer for transformers."""
    import onnxruntime as runtime
    from onnx import load
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    path = folder / "optimized.onnx"
    if not path.exists():
        fusions = FusionOptions("bert")
        fusions.enable_embed_layer_norm = False  # quantize_dynamic makes wrong embeddings of it
        # The fusion fails for norms without a bias, as ModernBERT's.
        nodes = load(folder / "model.onnx", load_external_data=False).graph.node
        norms = [node for node in nodes if node.op_type == "LayerNormalization"]
        fusions.enable_skip_layer_norm = all(len(node.input) == 3 for node in norms)
        given = {"model_type": "bert", "num_heads": 12, "hidden_size": 768, "opt_level": 0}
        optimized = optimize_model(
            str(folder / "model.onnx"), optimization_options=fusions, **given
        )  # level 0: the session optimizes when it loads
        optimized.save_model_to_file(str(path), use_external_data_format=True)
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


def openvino(folder: Path, inputs: dict[str, Tensor]) -> Pass:
    import openvino as engine

    core = engine.Core()
    core.set_property("CPU", {"INFERENCE_NUM_THREADS": torch.get_num_threads()})
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(folder / "model.onnx", "CPU", settings)
    names = {name for given in compiled.inputs for name in given.names}
    arrays = {name: value.numpy() for name, value in inputs.items() if name in names}
    return lambda: torch.from_numpy(compiled(arrays)[0])


def ctranslate2(folder: Path, inputs: dict[str, Tensor], *, int8: bool = False) -> Pass:
    """Log-probabilities of a target by CTranslate2, which has T5 with its decoder only."""
    import ctranslate2 as engine

    kind = "int8" if int8 else "float32"
    converter = engine.converters.TransformersConverter(str(folder / "model"))
    converted = converter.convert(str(folder / kind), quantization=kind)
    translator = engine.Translator(
        converted, intra_threads=torch.get_num_threads(), inter_threads=1, compute_type=kind
    )
    source = [f"t{number}" for number in inputs["input_ids"][0].tolist()]
    target = [f"t{number}" for number in inputs["decoder_input_ids"][0, 1:].tolist()]

    def run() -> Tensor:
        (scores,) = translator.score_batch([source], [target], max_input_length=0)
        return torch.tensor(scores.log_probs)

    return run


PYTORCH = ("transformers", "posenc", "compile")

EXPORTED: dict[str, Callable[[Path, dict[str, Tensor]], Pass]] = {
    "onnxruntime": onnxruntime,
    "onnxruntime_int8": partial(onnxruntime, int8=True),
    "openvino": openvino,
    "ctranslate2": ctranslate2,
    "ctranslate2_int8": partial(ctranslate2, int8=True),
}


def measure(
    engine: str, name: str, layers: int, size: str, direction: str, folder: Path, clock: str
) -> dict[str, Any]:
    """Seconds of each pass, memory, and the largest difference from transformers."""
    inputs, expected = torch.load(folder / "expected.pt")
    begin = resident()
    if engine in PYTORCH:
        run = in_pytorch(engine, name, layers, size, direction)
    else:
        run = EXPORTED[engine](folder, inputs)
    output, now = run(), CLOCKS[clock]
    seconds: list[float] = []
    while len(seconds) < 2 or (sum(seconds) < PASS_SECONDS and len(seconds) < 15):
        start = now()
        run()
        seconds.append(now() - start)
    row = {"seconds": seconds, "MiB": resident() - begin}
    if engine == "posenc":
        row["products"] = products(run, now)
    if output is not None:
        row["difference"] = float((output - expected).abs().max() / expected.abs().max())
    return row


def products(run: Pass, now: Callable[[], float]) -> float:
    """Seconds that linear layers take in a pass: what is left to gain lies in the rest."""
    begun, taken = [0.0], [0.0]

    def begin(layer: torch.nn.Module, inputs: Any) -> None:
        begun[0] = now()

    def end(layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        taken[0] += now() - begun[0]

    registered = torch.nn.modules.module
    hooks = [
        registered.register_module_forward_pre_hook(only_linear(begin)),
        registered.register_module_forward_hook(only_linear(end)),
    ]
    times = []
    for _ in range(5):
        taken[0] = 0.0
        run()
        times.append(taken[0])
    for hook in hooks:
        hook.remove()
    return median(times)


def only_linear(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook of all modules that is called for linear layers alone."""

    def called(module: torch.nn.Module, *values: Any) -> None:
        if isinstance(module, torch.nn.Linear):
            hook(module, *values)

    return called


def resident() -> float:
    """The most memory that the process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


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


def measured(
    engines: Sequence[str], name: str, layers: int, size: str, direction: str, options: Any
) -> list[dict[str, Any]]:
    """Rows of a model at a size, one an engine, measured in turns."""
    batch, tokens = parsed_size(size)
    place = {"model": name, "layers": layers, "batch": batch, "size": tokens, "pass": direction}
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        shared = (options.threads, folder, options.clock)
        exported = in_process("prepare", "", name, layers, size, direction, *shared)
        for _ in range(options.rounds):
            for engine in engines:
                if engine not in PYTORCH and direction == "both":
                    continue
                row = rows.setdefault(engine, {**place, "engine": engine, "seconds": []})
                if "failed" in row:
                    continue
                job = (engine, name, layers, size, direction, *shared)
                found = exported if "failed" in exported else in_process("measure", *job)
                row |= found | {"seconds": row["seconds"] + found.get("seconds", [])}
    for row in rows.values():
        row["seconds"] = None if "failed" in row else median(row["seconds"])
    return [*rows.values()]


def shown(rows: Sequence[dict[str, Any]], engines: Sequence[str]) -> str:
    """Milliseconds and memory by engine, and posenc's as a multiple of the best other's."""
    by_place: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        place = (row["model"], f"{row['batch']} × {row['size']}", row["pass"])
        by_place.setdefault(place, {})[row["engine"]] = row
    lines = []
    for place, found in by_place.items():
        cells = [cell(found[engine]) if engine in found else "–" for engine in engines]
        times = {engine: row["seconds"] for engine, row in found.items() if row["seconds"]}
        posenc, others = times.pop("posenc", None), [*times.values()]
        ratio = f"{posenc / min(others):.2f}" if posenc and others else "–"
        lines.append((*place, *cells, ratio))
    return table(("model", "size", "pass", *engines, "posenc × the best other"), lines)


def cell(row: dict[str, Any]) -> str:
    """Time, its part in products, memory, the difference if more than rounding; or what failed."""
    if "failed" in row:
        return str(row["failed"])
    far = row.get("difference", 0) > 1e-4
    difference = f", off {row['difference']:.0e}" if far else ""
    of = f", of which products {1e3 * row['products']:,.0f}" if "products" in row else ""
    return f"{1e3 * row['seconds']:,.0f} ms{of}, {row['MiB']:,.0f} MiB{difference}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="deberta_v2,t5,modernbert,bert")
    parser.add_argument(
        "--engines", default="transformers,compile,onnxruntime,openvino,posenc", help="with commas"
    )
    parser.add_argument(
        "--sizes", default="512,16x128,2048", help="tokens or pixels, 16x128 for a batch of 16"
    )
    parser.add_argument("--layers", type=int, default=3, help="of each model (3)")
    parser.add_argument("--passes", default="forward", help="forward, both, or both with a comma")
    parser.add_argument("--threads", type=int, default=2, help="of every engine (2)")
    parser.add_argument("--rounds", type=int, default=2, help="processes for each time (2)")
    parser.add_argument(
        "--clock",
        default="wall",
        choices=list(CLOCKS),
        help="processor time is that of the process: for one thread on a machine that others share",
    )
    parser.add_argument("--name", default="engines", help="of the file in results")
    parser.add_argument("--task", nargs=9, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task, engine, name, layers, size, direction, threads, folder, clock = options.task
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        torch.set_num_threads(int(threads))
        if task == "prepare":
            prepare(name, int(layers), size, Path(folder))
            print("{}")
        else:
            job = (engine, name, int(layers), size, direction, Path(folder), clock)
            print(json.dumps(measure(*job)))
        return
    rows: list[dict[str, Any]] = []
    engines, kept = options.engines.split(","), ("layers", "threads", "rounds", "clock")
    for name in options.models.split(","):
        for size in options.sizes.split(","):
            for direction in options.passes.split(","):
                rows += measured(engines, name, options.layers, size, direction, options)
                # After every row, as the next may take minutes.
                write_results(options.name, rows, **{key: getattr(options, key) for key in kept})
                print(shown(rows, engines).splitlines()[-1], flush=True)
    print(shown(rows, engines))


if __name__ == "__main__":
    main()
