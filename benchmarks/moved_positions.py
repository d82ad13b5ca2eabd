"""Prefill and decoding steps of a Llama whose positions a method moves, against the model as it is.

    python -m benchmarks.moved_positions [--lengths 1024 4096] [--rounds 5] [--threads 2]

For each method and length, the median over rounds of the time of a prefill, and of one more token
after it, divided by that of the unchanged model in the same round. The trained length is half of
the shortest length, so that every method moves most pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from benchmarks.measuring import write_results
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from posenc.transformers import stretch

METHODS = ("rerope", "leaky_rerope", "self_extend", "dual_chunk", "yarn+log_n")
STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = {name: llama(min(options.lengths) // 2) for name in ("unchanged", *options.methods)}
    for name, model in models.items():
        if name != "unchanged":
            stretch(model, name, factor=16)
    rows: list[dict[str, object]] = []
    for length in options.lengths:
        print(f"{length} tokens: prefill and step, as multiples of the unchanged model's")
        times = {name: ([], []) for name in models}
        ids = torch.randint(256, (1, length))
        for _ in range(options.rounds):
            for name, model in models.items():
                for held, seconds in zip(times[name], measured(model, ids), strict=True):
                    held.append(seconds)
        prefill, step = times.pop("unchanged")
        for name, (prefills, steps) in times.items():
            ratios = ratio(prefills, prefill), ratio(steps, step)
            print(f"  {name:14} {ratios[0]:5.2f} {ratios[1]:5.2f}", flush=True)
            rows.append({"method": name, "length": length, "prefill": ratios[0], "step": ratios[1]})
    path = write_results("moved_positions", rows, rounds=options.rounds)
    print(f"Written to {path}.")


def llama(trained: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=trained,
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def measured(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds of a prefill, and of one more token; the median of a few."""
    cache = DynamicCache()
    prefill = seconds(lambda: model(ids, past_key_values=cache, logits_to_keep=1))
    token = ids[:, :1]
    steps = [seconds(lambda: model(token, past_key_values=cache)) for _ in range(STEPS)]
    return prefill, statistics.median(steps)


def seconds(compute: Callable[[], object]) -> float:
    start = time.perf_counter()
    compute()
    return time.perf_counter() - start


def ratio(of: list[float], to: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


if __name__ == "__main__":
    main()
