"""A causal model reads contexts once: the bits of every token, and answers from what is cached."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.errors import ArgumentError
from posenc.lab.experiments.sequences import stacked
from posenc.lab.experiments.text_loss import at_device, losses
from posenc.transformers.live import LiveDecoder

STEP = 512
"""Tokens of all rows that are read at a time; their logits are what takes memory."""

TRIED, ALIKE = 96, 0.1
"""Tokens of the trial of a cache, and bits by which they may cost more or less with it, as a mean
over tokens: what half precision rounds is less."""

TIMED, ROUNDED = 512, 0.02
"""Tokens of the trial of a dtype, and bits a token by which the mean loss may differ in it."""


@dataclass(frozen=True)
class Ask:
    """A question in token ids, one a row.

    Args:
        prompts: what a row's question consists of.
        answers: the right continuations.
    """

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]

    @property
    def size(self) -> int:
        """Tokens of the longest question with its answer."""
        pairs = zip(self.prompts, self.answers, strict=True)
        return max(len(prompt) + len(answer) for prompt, answer in pairs)


@dataclass(frozen=True)
class Read:
    """Bits and answers of a model on some contexts.

    Args:
        bits: ``[B, L]`` of each token given those before it; NaN where that was not measured.
        right: length → 1 or 0 for each row and question.
    """

    bits: Float[Tensor, "B L"]
    right: dict[int, Float[Tensor, "B D"]] = field(default_factory=dict)


def has_cache(model: nn.Module, tokens: Int[Tensor, " T"]) -> bool:
    """True for a model that reads on from a cache as it reads a text whole.

    Some models keep more than keys and values, or nothing; a short text tells.

    Args:
        model: any causal model.
        tokens: of any text.
    """
    if not isinstance(model, LiveDecoder):
        return False
    size = min(TRIED, model.most or TRIED)
    row = tokens[: size + 1].long().unsqueeze(0)
    whole = losses(at_device(model), row, last=row.shape[1] - 1)
    with suppress(Exception):  # of any model type
        return bool((read(model, row, step=max(1, size // 3)).bits - whole).abs().mean() < ALIKE)
    return False


@torch.inference_mode()
def read(
    model: LiveDecoder,
    rows: Int[Tensor, "B L1"],
    asks: Mapping[int, Sequence[Ask]] | None = None,
    *,
    step: int | None = None,
    seen: Callable[[int], None] = lambda tokens: None,
) -> Read:
    """Read contexts from their first token to their last, once.

    Args:
        model: with a cache; see ``has_cache``.
        rows: contexts and one token more.
        asks: questions by the number of tokens before them; what they add is forgotten.
        step: tokens of a row that are read at a time.
        seen: called with the number of tokens of a row that were read.
    """
    asks = asks or {}
    count, length = rows.shape[0], rows.shape[1] - 1
    step = min(step or max(1, STEP // count), (model.window or length) // 2)
    cache = model.cache(length + _most(asks), step)
    bits = torch.empty(count, length)
    right: dict[int, Tensor] = {}
    begin = 0
    for end in sorted({*range(step, length, step), *asks, length}):
        logits = model(rows[:, begin:end].to(model.model.device), cache=cache)
        bits[:, begin:end] = _bits(logits, rows[:, begin + 1 : end + 1])
        if end in asks:
            right[end] = _answered(model, cache, asks[end])
        begin = end
        seen(end)
    return Read(bits, right)


@torch.inference_mode()
def read_each(
    model: LiveDecoder,
    rows: Int[Tensor, "B L1"],
    asks: Mapping[int, Sequence[Ask]],
    firsts: Mapping[int, int],
) -> Read:
    """``read`` of a model whose rotation depends on the length: each length by a pass of its own.

    As generation does, a question is read on from what the pass left in the cache.

    Args:
        firsts: length → the first token whose bits are wanted there.
    """
    bits = torch.full((rows.shape[0], rows.shape[1] - 1), torch.nan)
    right: dict[int, Tensor] = {}
    for length, first in firsts.items():
        cache = model.cache(length + _most(asks), length)
        logits = model(rows[:, :length].to(model.model.device), cache=cache, last=length - first)
        bits[:, first:length] = _bits(logits[:, first - length :], rows[:, first + 1 : length + 1])
        if length in asks:
            right[length] = _answered(model, cache, asks[length])
    return Read(bits, right)


def _most(asks: Mapping[int, Sequence[Ask]]) -> int:
    return max((ask.size for several in asks.values() for ask in several), default=0)


def _bits(logits: Float[Tensor, "B n V"], wanted: Int[Tensor, "B n"]) -> Float[Tensor, "B n"]:
    """Bits of tokens by the logits before them, a row at a time."""
    rows = zip(logits, wanted.to(logits.device), strict=True)
    nats = [F.cross_entropy(row.float(), targets, reduction="none") for row, targets in rows]
    return torch.stack(nats).cpu() / math.log(2)


def _answered(model: LiveDecoder, cache: Any, asks: Sequence[Ask]) -> Float[Tensor, "B D"]:
    """1 for each answer that greedy decoding would give; the cache is as before then."""
    columns = []
    for ask in asks:
        pairs = list(zip(ask.prompts, ask.answers, strict=True))
        tokens = stacked([[*prompt, *answer[:-1]] for prompt, answer in pairs], 0)
        first = min(len(prompt) for prompt, _ in pairs) - 1
        last = tokens.shape[1] - first
        logits = model(tokens.to(model.model.device), cache=cache, last=last)[:, -last:]
        guessed = logits.argmax(-1).cpu()
        cache.crop(-tokens.shape[1])
        columns.append(
            [
                guessed[row, len(prompt) - 1 - first :][: len(answer)].tolist() == list(answer)
                for row, (prompt, answer) in enumerate(pairs)
            ]
        )
    return torch.tensor(columns).T.double()


@torch.inference_mode()
def in_fastest_dtype(model: LiveDecoder, stored: torch.dtype, tokens: Int[Tensor, " T"]) -> None:
    """Compute in the dtype of the stored weights where that is faster here and reads as well.

    A model in float32 reads a short text in both dtypes. Buffers stay as they are: frequencies in
    half precision would be others.

    Args:
        model: in float32; none of its weights has more digits than ``stored``.
        stored: a dtype of half precision.
        tokens: of any text.
    """
    row, run = tokens[: TIMED + 1].long().unsqueeze(0), at_device(model)

    def timed() -> tuple[float, float]:
        losses(run, row[:, :TRIED], last=1)
        begin = time.perf_counter()
        mean = float(losses(run, row, last=row.shape[1] - 1).mean())
        return time.perf_counter() - begin, mean

    def cast(dtype: torch.dtype) -> None:
        for weight in model.parameters():
            weight.data = weight.data.to(dtype)

    seconds, exact = timed()
    cast(stored)
    faster, rounded = timed()
    if faster > seconds or abs(rounded - exact) > ROUNDED:
        cast(torch.float32)


@contextmanager
def accelerated(model: nn.Module) -> Iterator[None]:
    """A context in which posenc computes the attention of a model of transformers, if it can."""
    from posenc.transformers.acceleration.api import ALREADY, accelerate, restore

    if not isinstance(model, LiveDecoder):
        yield
        return
    ours = False
    with suppress(ArgumentError):
        ours = accelerate(model.model).note != ALREADY
    try:
        yield
    finally:
        if ours:
            restore(model.model)
