"""One layer of transformers' models with windows, sinks and caps, before and after ``accelerate``.

Both are timed by turns in one process, with transformers' default attention against posenc's, the
mask's making included; times are medians. Writes ``benchmarks/results/model_windows.json``:

    python -m benchmarks.model_windows
    python -m benchmarks.model_windows --only modernbert gpt_oss --sizes 1024 --join

ModernBERT and Gemma 3 are layers of ModernBERT-base and of the model of 270M. ``gpt_oss`` has a
quarter of the heads of gpt-oss-20b, and as many multiplications in experts to those in attention as
that at a quarter of its width; ``gpt_oss_narrow`` is half as wide in all, so its experts cost half
as much beside attention. ``gemma2`` has next to no width outside of attention, so that attention
alone is timed; Inkling's modules have their projections, as wide as BERT-base's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.engine_models import MODELS
from benchmarks.measuring import CLOCKS, RESULTS, write_results
from torch import Tensor
from transformers import AutoConfig, AutoModel, DynamicCache, PreTrainedModel

from posenc.lab.training.machine import PeakMemory
from posenc.transformers import accelerate, restore

SLIDING, FULL = "sliding_attention", "full_attention"

NAME = "model_windows"
DIRECTIONS = ("forward", "both", "decode", "memory")

DECODED = 32768
"""Tokens in the cache of the rows that decode."""

STEPS = 8
"""Tokens decoded in a turn."""

MEMORY = 8192
"""Tokens of the rows that measure memory, with 4 layers."""

SECONDS = 20.0
"""Time that a row may take about; no fewer than 2 rounds."""


@dataclass(frozen=True)
class Subject:
    """A model of one layer, or of one of each kind.

    Args:
        kind: its type in transformers, or a name in ``benchmarks.transformers_models``.
        layers: kinds of its layers; () where all are one kind.
        sizes: options of its config.
        causal: it can decode.
    """

    kind: str
    layers: tuple[str, ...]
    sizes: Mapping[str, Any]
    causal: bool = True

    def make(self, times: int = 1) -> PreTrainedModel:
        """The model in transformers' default attention, random weights."""
        torch.manual_seed(0)
        if self.kind in MODELS:
            return MODELS[self.kind].make(times).eval()
        count = times * max(1, len(self.layers))
        sizes = {"vocab_size": 128, "num_hidden_layers": count, "max_position_embeddings": 2**17}
        sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | dict(self.sizes)
        if self.layers:
            sizes["layer_types"] = list(self.layers) * times
        model: PreTrainedModel = AutoModel.from_config(AutoConfig.for_model(self.kind, **sizes))
        return model.eval()

    def inputs(self, size: int) -> dict[str, Any]:
        """Arguments of a call that keeps no keys."""
        if self.kind in MODELS:
            return dict(MODELS[self.kind].inputs(size))
        tokens = {"input_ids": torch.randint(3, 128, (1, size))}
        return tokens | ({"use_cache": False} if self.causal else {})


def heads(width: int, count: int, groups: int, head: int, mlp: int) -> dict[str, int]:
    """Sizes by their names in configs."""
    return {
        "hidden_size": width,
        "num_attention_heads": count,
        "num_key_value_heads": groups,
        "head_dim": head,
        "intermediate_size": mlp,
    }


SUBJECTS = {
    "modernbert": Subject(
        "modernbert",
        (SLIDING,),
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 1152}
        | {"local_attention": 128, "cls_token_id": 1, "sep_token_id": 2},
        causal=False,
    ),
    "gemma3": Subject(
        "gemma3_text", (SLIDING,), heads(640, 4, 1, 256, 2048) | {"sliding_window": 512}
    ),
    "gpt_oss": Subject(
        "gpt_oss",
        (SLIDING, FULL),
        heads(1024, 16, 2, 64, 1024)
        | {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_oss_narrow": Subject(
        "gpt_oss",
        (SLIDING, FULL),
        heads(512, 8, 1, 64, 512)
        | {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma2": Subject(
        "gemma2", (SLIDING, FULL), heads(16, 8, 4, 256, 16) | {"sliding_window": 4096}
    ),
    "inkling": Subject("inkling", (), {}, causal=False),
    "inkling_sliding": Subject("inkling_sliding", (), {}, causal=False),
    "mistral": Subject("mistral", (), heads(1024, 16, 4, 64, 2816) | {"sliding_window": 4096}),
    "llama": Subject("llama", (), heads(1024, 16, 4, 64, 2816)),
    "qwen2": Subject("qwen2", (), heads(1024, 16, 2, 64, 2816)),
}


def measure(name: str, size: int, direction: str, rounds: int, clock: str) -> dict[str, Any]:
    """Seconds of transformers and of posenc, and the largest difference of their states."""
    subject = SUBJECTS[name]
    model = subject.make()
    inputs, cache, kept = subject.inputs(size), None, None
    if direction == "decode":
        inputs = {"input_ids": torch.randint(3, 128, (1, 1))}
        cache = DynamicCache(config=model.config)
        filled(model, cache, size)
        kept = deepcopy(cache)

    def run(cache: DynamicCache | None = cache) -> Tensor:
        if direction == "both":
            output: Tensor = model(**inputs)[0]
            output.sin().sum().backward()
            model.zero_grad()
            return output.detach()
        with torch.no_grad():
            for _ in range(1 if cache is None else STEPS):
                output = model(**inputs, **({} if cache is None else {"past_key_values": cache}))[0]
        return output

    begun = time.perf_counter()
    expected = run()
    rounds = max(2, min(rounds, round(SECONDS / 2 / (time.perf_counter() - begun))))
    accelerate(model, check=False)
    off = float((run(kept) - expected).abs().max() / expected.abs().max())
    restore(model)
    changes = lambda: accelerate(model, check=False), lambda: restore(model)
    own, other = by_turns(run, lambda: run(kept), *changes, rounds, CLOCKS[clock])
    steps = STEPS if direction == "decode" else 1
    row = {"model": name, "tokens": size, "direction": direction, "rounds": rounds}
    row |= {"difference": off, "transformers": own / steps, "posenc": other / steps}
    return row | {"times faster": own / other}


def by_turns(
    own: Callable[[], Any],
    other: Callable[[], Any],
    before: Callable[[], Any],
    after: Callable[[], Any],
    rounds: int,
    clock: Callable[[], float],
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


@torch.no_grad()
def filled(model: PreTrainedModel, cache: DynamicCache, size: int) -> None:
    """Put random keys and values of so many tokens into a cache."""
    config = model.config
    groups, head = config.num_key_value_heads, config.head_dim or config.hidden_size // 16
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(1, groups, size, head) for _ in range(2)), layer)


def peak(name: str, implementation: str) -> int:
    """Bytes that a forward pass of four layers adds to what the process had."""
    code = "from benchmarks.model_windows import print_peak; print_peak"
    command = [sys.executable, "-c", f"{code}({name!r}, {implementation!r})"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(name: str, implementation: str) -> None:
    """In a process of its own, which has taken no more memory before."""
    subject = SUBJECTS[name]
    model = subject.make(4 // max(1, len(subject.layers)) or 1)
    if implementation == "posenc":
        accelerate(model, check=False)
    with torch.no_grad():
        model(**subject.inputs(300))
        peak = PeakMemory(torch.device("cpu"))
        model(**subject.inputs(MEMORY))
    print(peak.used())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--sizes", nargs="*", type=int, default=[1024, 4096, 8192])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="at most; long rows have fewer")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--directions", nargs="*", default=list(DIRECTIONS), choices=DIRECTIONS)
    parser.add_argument("--join", action="store_true", help="keep the other rows of the file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for name in arguments.only:
        timed = [d for d in ("forward", "both") if d in arguments.directions]
        cases = [(size, d) for size in arguments.sizes for d in timed]
        if SUBJECTS[name].causal and "decode" in arguments.directions:
            cases.append((DECODED, "decode"))
        for size, direction in cases:
            rows.append(measure(name, size, direction, arguments.rounds, arguments.clock))
            print(json.dumps(rows[-1]), flush=True)
        if "memory" in arguments.directions:
            bytes_of = {engine: peak(name, engine) for engine in ("transformers", "posenc")}
            rows.append({"model": name, "tokens": MEMORY, "direction": "memory"} | bytes_of)
            print(json.dumps(rows[-1]), flush=True)
    path = RESULTS / f"{NAME}.json"
    if arguments.join and path.exists():
        measured = {key(row) for row in rows}
        kept = json.loads(path.read_text())["rows"]
        rows = [row for row in kept if key(row) not in measured] + rows
    options = {"threads": arguments.threads, "clock": arguments.clock, "joined": arguments.join}
    write_results(NAME, rows, **options)


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Model, length and direction of a row."""
    return row["model"], row["tokens"], row["direction"]


if __name__ == "__main__":
    main()
