"""What joined caches lose on a model with pretrained weights, and the time that moving keys takes.

    python -m benchmarks.joined_caches [--what joined_caches]

Of each piece of a text, 256 tokens are followed by 256 others. Behind them come the next 64 of the
text, or 64 of either half again. Measured is their loss in bits a token behind caches of the
halves: read at once; read alone and joined; joined, with the first tokens of the second half read
again behind the first half; and the second half alone.
Times are those of moving all keys of a cache, divided by those of copying them in the same round.
The model is that of ``benchmarks.real_models``, downloaded on the first run.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from pydoc_data import topics
from statistics import mean, median, stdev

import torch
from benchmarks.measuring import write_results
from benchmarks.real_models import MODELS, WORK
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from posenc.transformers import joined, moved

HALF, LAST = 256, 64
AGAIN = (4, 16, 64)
"""Tokens of the second half that are read again."""

LAYERS, HEADS, TOKENS, WIDTH = 28, 8, 4096, 128
"""Of the cache whose keys are moved."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--what", nargs="+", choices=MEASURED, default=[*MEASURED])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for what in options.what:
        rows = list(MEASURED[what](options))
        for row in rows:
            print(row, flush=True)
        print(write_results(what, rows, texts=options.texts, rounds=options.rounds))


def all_times(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Times by dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        yield {"dtype": str(dtype).removeprefix("torch.")} | times(dtype, options.rounds)


def all_losses(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Mean losses by text and cache, and how much more they are than behind texts read at once."""
    by_name: dict[tuple[str, str], list[float]] = {}
    model, pieces = read(options.texts)
    for piece in pieces:
        for name, bits in losses(model, piece):
            by_name.setdefault(name, []).append(bits)
    for (behind, name), bits in by_name.items():
        off = [one - best for one, best in zip(bits, by_name[behind, "at once"], strict=True)]
        row = {"text": behind, "cache": name, "bits": mean(bits), "more": mean(off)}
        yield row | {"error": stdev(off) / len(off) ** 0.5}


MEASURED = {"moved_caches": all_times, "joined_caches": all_losses}
"""Measurements, by the names of their results."""


def read(count: int) -> tuple[PreTrainedModel, list[Tensor]]:
    """A model, and pieces of a text for it."""
    WORK.mkdir(parents=True, exist_ok=True)
    folder = MODELS["smollm2"].folder("smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "\n".join(topics.topics.values())
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    size = 2 * HALF + LAST
    return model, [ids[:, k * size : (k + 1) * size] for k in range(count)]


@torch.inference_mode()
def losses(model: PreTrainedModel, ids: Tensor) -> Iterator[tuple[tuple[str, str], float]]:
    """Bits a token of each text behind each cache."""
    first, second, after = ids.split((HALF, HALF, LAST), 1)
    halves = [filled(model, half) for half in (first, second)]
    caches = {
        "at once": filled(model, ids[:, : 2 * HALF]),
        "joined": joined(model, halves),
        **{f"joined, {n} read again": read_again(model, halves, second, n) for n in AGAIN},
        "second half alone": moved(model, halves[1], by=HALF),
    }
    middle = slice((HALF - LAST) // 2, (HALF + LAST) // 2)
    texts = {
        "the next": after,
        "of the first": first[:, middle],
        "of the second": second[:, middle],
    }
    for behind, text in texts.items():
        for name, cache in caches.items():
            yield (behind, name), bits(model, copy.deepcopy(cache), text)


def filled(model: PreTrainedModel, ids: Tensor) -> Cache:
    """The cache of a text at positions from 0 on."""
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def read_again(model: PreTrainedModel, halves: list[Cache], second: Tensor, count: int) -> Cache:
    """Both halves, of which the first tokens of the second are read behind the first half."""
    cache, rest = moved(model, halves[0], by=0), moved(model, halves[1], by=HALF)
    model(second[:, :count], past_key_values=cache, logits_to_keep=1)
    for number, layer in enumerate(rest.layers):
        cache.update(layer.keys[:, :, count:], layer.values[:, :, count:], number)
    return cache


def bits(model: PreTrainedModel, cache: Cache, ids: Tensor) -> float:
    """Bits a token but the first, at the positions that follow both halves."""
    places = torch.arange(2 * HALF, 2 * HALF + LAST).unsqueeze(0)
    logits = model(ids, past_key_values=cache, position_ids=places).logits[0, :-1]
    nats = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    return float(nats / torch.log(torch.tensor(2.0)))


def times(dtype: torch.dtype, rounds: int) -> dict[str, object]:
    """Time of moved keys, as a multiple of that of a copy: median of rounds."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HEADS * WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        head_dim=WIDTH,
    )
    model, cache = LlamaForCausalLM(config).eval(), DynamicCache(config=config)
    for number in range(LAYERS):
        keys = torch.randn(1, HEADS, TOKENS, WIDTH).to(dtype)
        cache.update(keys, keys, number)
    move = partial(moved, model, cache, by=77)
    move()  # reads the model's rotations
    ratios: dict[str, list[float]] = {"moved": [], "in place": []}
    for _ in range(rounds):
        copied = seconds(lambda: [layer.keys.clone() for layer in cache.layers])
        ratios["moved"].append(seconds(move) / copied)
        ratios["in place"].append(seconds(partial(move, in_place=True)) / copied)
    return {name: median(ratio) for name, ratio in ratios.items()}


def seconds(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
