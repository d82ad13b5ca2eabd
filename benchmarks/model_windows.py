"""One layer of transformers' models with windows, sinks and caps, before and after ``accelerate``.

Both are timed by turns in one process, with transformers' default attention against posenc's, the
mask's making included; times are medians. Writes ``benchmarks/results/model_windows.json``:

    python -m benchmarks.model_windows
    python -m benchmarks.model_windows --only modernbert gpt_oss --sizes 1024
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.engines import by_turns
from benchmarks.measuring import CLOCKS, write_results
from torch import Tensor
from transformers import AutoConfig, AutoModel, DynamicCache, PreTrainedModel

from posenc.integrations.transformers.accelerate import accelerate, restore
from posenc.training.machine import PeakMemory

SLIDING, FULL = "sliding_attention", "full_attention"

DECODED = 32768
"""Tokens in the cache of the rows that decode."""

MEMORY = 8192
"""Tokens of the rows that measure memory, with 4 layers."""


@dataclass(frozen=True)
class Subject:
    """A model of one layer, or of one of each kind.

    Args:
        kind: its type in transformers.
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
        count = times * max(1, len(self.layers))
        sizes = {"vocab_size": 128, "num_hidden_layers": count, "max_position_embeddings": 2**17}
        sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | dict(self.sizes)
        if self.layers:
            sizes["layer_types"] = list(self.layers) * times
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModel.from_config(AutoConfig.for_model(self.kind, **sizes))
        return model.eval()


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
    "gemma2": Subject(  # next to no MLP: attention alone
        "gemma2", (SLIDING, FULL), heads(2304, 8, 4, 256, 16) | {"sliding_window": 4096}
    ),
    "mistral": Subject("mistral", (), heads(1024, 16, 4, 64, 2816) | {"sliding_window": 4096}),
    "llama": Subject("llama", (), heads(1024, 16, 4, 64, 2816)),
    "qwen2": Subject("qwen2", (), heads(1024, 16, 2, 64, 2816)),
}


def measure(
    name: str, size: int, direction: str, rounds: int, clock: str = "wall"
) -> dict[str, Any]:
    """Seconds of transformers and of posenc, and the largest difference of their states."""
    subject = SUBJECTS[name]
    model, cache = subject.make(), None
    tokens = torch.randint(3, 128, (1, 1 if direction == "decode" else size))
    if direction == "decode":
        cache = DynamicCache(config=model.config)
        filled(model, cache, size)

    def run() -> Tensor:
        if direction == "both":
            output: Tensor = model(tokens, **uncached(subject))[0]
            output.sin().sum().backward()
            model.zero_grad()
            return output.detach()
        options = uncached(subject) if cache is None else {"past_key_values": cache}
        with torch.no_grad():
            return model(tokens, **options)[0]  # type: ignore[no-any-return]

    kept = deepcopy(cache)
    expected = run()
    accelerate(model, check=False)
    cache = kept  # of as many tokens
    off = float((run() - expected).abs().max() / expected.abs().max())
    restore(model)
    own, other = by_turns(
        *(run, run, lambda: accelerate(model, check=False), lambda: restore(model), rounds),
        CLOCKS[clock],
    )
    row = {"model": name, "tokens": size, "direction": direction, "difference": off}
    return row | {"transformers": own, "posenc": other, "times faster": own / other}


def uncached(subject: Subject) -> dict[str, Any]:
    """Options of a call that keeps no keys."""
    return {"use_cache": False} if subject.causal else {}


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
        model(torch.zeros(1, 300, dtype=torch.long), **uncached(subject))
        peak = PeakMemory(torch.device("cpu"))
        model(torch.zeros(1, MEMORY, dtype=torch.long), **uncached(subject))
    print(peak.used())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--sizes", nargs="*", type=int, default=[1024, 4096, 8192])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for name in arguments.only:
        cases = [(size, d) for size in arguments.sizes for d in ("forward", "both")]
        cases += [(DECODED, "decode")] if SUBJECTS[name].causal else []
        for size, direction in cases:
            rows.append(measure(name, size, direction, arguments.rounds, arguments.clock))
            print(json.dumps(rows[-1]), flush=True)
        bytes_of = {engine: peak(name, engine) for engine in ("transformers", "posenc")}
        rows.append({"model": name, "tokens": MEMORY, "direction": "memory of 4 layers"} | bytes_of)
        print(json.dumps(rows[-1]), flush=True)
    write_results(
        "model_windows",
        rows,
        threads=arguments.threads,
        rounds=arguments.rounds,
        clock=arguments.clock,
    )


if __name__ == "__main__":
    main()
