"""Measurements of a model of tokens from contexts that it reads once: loss and recall by length."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from posenc.lab.evaluation.questions.question import digits, name, names
from posenc.lab.evaluation.results import StudyReading
from posenc.lab.evaluation.suites.needles import DEPTHS, Encode, KeyNeedles
from posenc.lab.evaluation.suites.next_token import POSITION, require_text, rounded, spread, words
from posenc.lab.evaluation.suites.reading import Ask, Read, accelerated, has_cache, read, read_each
from posenc.lab.evaluation.texts import Text
from posenc.lab.experiments.corpus import Pieces
from posenc.lab.experiments.text_loss import (
    Targets,
    at_device,
    losses,
    rows_a_call,
    unigram_entropy,
)
from posenc.lab.training.machine import PeakMemory
from posenc.transformers.live import LiveDecoder

FEWEST, MOST, BUDGET = 8, 64, 1 << 18
"""Contexts that are read where time allows: tokens in them, but no fewer and no more contexts."""

LEVELS = 16
"""Places of the text whose mean cost to the original is the level that losses are shown at."""

LAST = 4
"""The loss at a length n is that of the last n / 4 tokens before n."""

PARTS = 4
"""Parts of these, each a piece of text."""

BINS = 16
"""Bins of the loss by position."""

STEPS = range(-6, 3)
"""Powers of the root of two: the lengths beside the trained one that ``evaluate`` measures."""

NEAR = 128
"""Tokens before a token from which on the original predicts it as a level to compare with."""

KEY, SPARSE = 5, 8
"""Digits of a key, and how many times a key with its question the shortest length asked at is."""


@dataclass(frozen=True)
class HiddenKeys:
    """A stretch of text with pass keys hidden in it.

    Args:
        tokens: ``[L + 1]`` ids.
        plain: ``[L + 1]``, True for the text's own.
        asks: length → place in the text up to which it is read before a key is asked for, and
            question and answer for each of ``DEPTHS``; without lengths too short for a key.
    """

    tokens: Int[Tensor, " L1"]
    plain: Bool[Tensor, " L1"]
    asks: dict[int, tuple[int, list[tuple[list[int], list[int]]]]]


def hidden_in(
    text: Sequence[int], lengths: Sequence[int], encode: Encode, draw: random.Random
) -> HiddenKeys:
    """A context of a text, with keys at every depth of every length.

    Each key has a name, so that a context holds many; one that lies near the place of another
    length's serves it too.

    Args:
        text: ids, at least as many as the longest length and one.
        lengths: that are asked at.
        encode: text to ids.
        draw: of names and keys.
    """
    count = len(DEPTHS) * len(lengths)
    needles = [_needle(encode, key, digits(draw, KEY)) for key in names(draw, count)]
    size = max(len(ids) for ids, *_ in needles)
    asked = max(len(question) + len(answer) for _, question, answer in needles)
    wanted = {
        (length, depth): round(DEPTHS[depth] * (length - asked - size))
        for length in lengths
        if length >= SPARSE * (asked + size)
        for depth in range(len(DEPTHS))
    }
    tokens: list[int] = []
    plain: list[bool] = []
    places: dict[tuple[int, int], int] = {}
    begin, taken, rest = -size, 0, iter(text)
    longest = lengths[-1] + 1
    for key, place in sorted(wanted.items(), key=lambda item: item[1]):
        if place >= begin + size or not taken:
            begin, missing = place, place - len(tokens)
            own = [token for token, _ in zip(rest, range(missing), strict=False)]
            ids = needles[taken][0]
            tokens += [*own, *ids]
            plain += [True] * len(own) + [False] * len(ids)
            taken += 1
        places[key] = taken - 1
    own = [token for token, _ in zip(rest, range(longest - len(tokens)), strict=False)]
    tokens, plain = [*tokens, *own], plain + [True] * len(own)
    asks = {
        length: (
            length - asked,
            [needles[places[length, depth]][1:] for depth in range(len(DEPTHS))],
        )
        for length in lengths
        if (length, 0) in places
    }
    return HiddenKeys(torch.tensor(tokens), torch.tensor(plain), asks)


def shortest_context(encode: Encode) -> int:
    """Tokens of the shortest context that keys are hidden in."""
    sentence, question, answer = _needle(encode, name(0), "0" * KEY)
    return SPARSE * (len(sentence) + len(question) + len(answer))


def _needle(encode: Encode, named: str, key: str) -> tuple[list[int], list[int], list[int]]:
    """A sentence with a key, a question for it and the answer, as ids."""
    said = f"\nThe pass key of {named} is"
    question, answered = list(encode(said)), list(encode(f"{said} {key}"))
    same = [one == other for one, other in zip(question, answered, strict=False)]
    common = same.index(False) if False in same else len(same)
    sentence = list(encode(f"{said} {key}. Remember it.\n"))
    return sentence, answered[:common], answered[common:]


@dataclass(frozen=True)
class MeasuredContext:
    """Measurements on one context, by length.

    Args:
        loss: differences from the bits near tokens cost the original, a piece each.
        places: the same, by position.
        right: 1 or 0 for each depth.
        seconds: of reading it, answers included.
        peak_memory_bytes: meanwhile, beyond the process before.
    """

    loss: Mapping[int, tuple[float, ...]]
    places: Mapping[int, float]
    right: Mapping[int, tuple[float, ...]]
    seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True, eq=False)
class ContextSuite:
    """Measurements of causal models of tokens, which read the same contexts once.

    The loss at a length is that of the last tokens of so long a context. These are others at every
    length; so each is held to what it costs the original with few tokens before it, and the mean of
    that is added again.

    Args:
        original: the model that is compared with.
        text: ``[T]`` ids.
        pieces: that they consist of.
        lengths: of contexts.
        encode: text to ids.
        seed: of the keys.
        count: contexts, where time allows.
    """

    original: nn.Module
    text: Int[Tensor, " T"]
    pieces: Pieces
    lengths: tuple[int, ...]
    encode: Encode
    seed: int
    count: int
    _levels: dict[int, Float[Tensor, " L"]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, model: nn.Module, text: Text, lengths: tuple[int, ...], *, seed: int
    ) -> ContextSuite | None:
        """The suite of a text; None for models and lengths that it does not serve.

        Raises:
            DataError: if the text is too short.
        """
        needles, longest = text.needles, lengths[-1]
        if not isinstance(needles, KeyNeedles) or lengths[0] < shortest_context(needles.encode):
            return None
        if not has_cache(model, text.measured):
            return None
        require_text(len(text.measured), longest, text.unit)
        count = min(MOST, max(FEWEST, BUDGET // longest), len(text.measured) // (longest + 1))
        ids, pieces = text.measured, text.measured_pieces
        return cls(model, ids, pieces, lengths, needles.encode, seed, count)

    @property
    def rows(self) -> int:
        """Contexts that are read together."""
        return max(1, rows_a_call(self.lengths[-1]))

    def measure(self, model: nn.Module, *, limit: int | None = None) -> StudyReading:
        """See ``Suite``; ``limit`` is ignored, as causal models read texts of any length."""
        cached, measured = has_cache(model, self.text), []
        for begin in range(0, self.count, self.rows):
            numbers = range(begin, min(self.count, begin + self.rows))
            measured += self.contexts(model, numbers, cached=cached)
        return self.reading(measured)

    def contexts(
        self,
        model: nn.Module,
        numbers: Sequence[int],
        *,
        cached: bool,
        seen: Callable[[int], None] = lambda tokens: None,
    ) -> list[MeasuredContext]:
        """Measurements of a model on some contexts, which are read together.

        Args:
            model: to measure.
            numbers: of the contexts, below ``count``.
            cached: what ``has_cache`` answers of it.
            seen: called with the number of tokens of a context that were read.
        """
        contexts = [self._context(number) for number in numbers]
        levels = [self._level(*pair) for pair in zip(numbers, contexts, strict=True)]
        rows = torch.stack([context.tokens for context in contexts])
        asks = {
            length: (place, [Ask(*zip(*pairs, strict=True)) for pairs in zip(*asked, strict=True)])
            for length, (place, asked) in _joined(context.asks for context in contexts).items()
        }
        memory, begin = PeakMemory(next(model.parameters()).device), time.perf_counter()
        with accelerated(model):
            done = self._read(model, rows, asks, seen, cached=cached)
        seconds, used = (time.perf_counter() - begin) / len(contexts), memory.used()
        right = {length: done.right[place] for length, (place, _) in asks.items()}
        measured = []
        for row, (context, level) in enumerate(zip(contexts, levels, strict=True)):
            more = done.bits[row] - level
            more[~context.plain[1:]] = torch.nan
            places = {
                place: _mean(values, more)
                for place, values in self._binned(more)
                if not done.bits[row, place : place + len(values)].isnan().all()
            }
            loss = {length: self._parts(more, length) for length in self.lengths}
            answers = {length: tuple(values[row].tolist()) for length, values in right.items()}
            measured.append(MeasuredContext(loss, places, answers, seconds, used))
        return measured

    def _read(
        self,
        model: nn.Module,
        rows: Int[Tensor, "B L1"],
        asks: dict[int, Any],
        seen: Callable[[int], None],
        *,
        cached: bool,
    ) -> Read:
        """Contexts read as the model can."""
        by_place = dict(asks.values())
        if cached:
            assert isinstance(model, LiveDecoder)  # no others have one
            if not model.varies:
                return read(model, rows, by_place, seen=seen)
            ends = {length: place for length, (place, _) in asks.items()}
            firsts = {ends.get(n, n): n - n // LAST for n in self.lengths}
            return read_each(model, rows, by_place, firsts)
        run, right = at_device(model), {}
        bits = losses(run, rows, last=rows.shape[1] - 1)
        for place, several in by_place.items():
            columns = [_asked_whole(run, rows[:, :place], ask) for ask in several]
            right[place] = torch.stack(columns, 1)
        return Read(bits, right)

    def reading(
        self,
        measured: Sequence[MeasuredContext],
        *,
        all_by: Sequence[MeasuredContext] = (),
        looks: int = 0,
    ) -> StudyReading:
        """The measurements of a model on its first contexts.

        Args:
            measured: one or more.
            all_by: those of a model that has read more. Losses are shown as if this one had too:
                what the others cost that model beyond these is added.
            looks: see ``StudyReading``.
        """
        level = self._mean_level
        bits = {
            length: [*chain(*(context.loss[length] for context in measured))]
            for length in self.lengths
        }
        bits = {length: [level + x for x in values] for length, values in bits.items()}
        places = {
            place: tuple(round(level + c.places[place], 5) for c in measured)
            for place in measured[0].places
        }
        right = {
            length: [context.right[length] for context in measured] for length in measured[0].right
        }
        times, width = [context.seconds for context in measured], self.lengths[-1] // BINS

        def beyond(of: Callable[[MeasuredContext], Sequence[float]]) -> float:
            """The mean of that model over all its contexts, less that over the shared ones."""
            if len(all_by) <= len(measured):
                return 0.0
            every, shared = (fmean(chain(*map(of, by))) for by in (all_by, all_by[: len(measured)]))
            return every - shared

        def at_length(length: int) -> float:
            return beyond(lambda context: context.loss[length])

        def at_place(place: int) -> float:
            return beyond(lambda context: [context.places.get(place, 0.0)])

        return StudyReading(
            loss={length: fmean(values) + at_length(length) for length, values in bits.items()},
            by_position=tuple(
                (place + width / 2, fmean(values) + at_place(place))
                for place, values in places.items()
            ),
            needles={n: tuple(map(fmean, zip(*rows, strict=True))) for n, rows in right.items()},
            per_second=self.lengths[-1] / median(times),
            time_error=spread(times) if len(times) > 1 else 1.0,
            peak_memory_bytes=max(context.peak_memory_bytes for context in measured),
            looks=looks,
            pieces={
                "loss": {n: rounded(torch.tensor(values)) for n, values in bits.items()},
                "needles": {n: tuple(chain(*zip(*rows, strict=True))) for n, rows in right.items()},
                POSITION: places,
            },
        )

    def _context(self, number: int) -> HiddenKeys:
        longest = self.lengths[-1]
        ends = Targets.spread(self.pieces, width=1, longest=longest, count=self.count)
        text = ends.windows(self.text, longest)[number].tolist()
        draw = random.Random(f"{self.seed}/{number}")
        return hidden_in(text, self.lengths, self.encode, draw)

    @cached_property
    def _mean_level(self) -> float:
        """Mean bits of the text's tokens with few before them."""
        near = self._near
        places = Targets.spread(self.pieces, width=4 * near, longest=self.lengths[-1], count=LEVELS)
        with accelerated(self.original):
            each = places.each(at_device(self.original), self.text, 5 * near)
        return float(each.mean())

    @property
    def _near(self) -> int:
        return max(1, min(NEAR, self.lengths[0] // 8))

    def _level(self, number: int, context: HiddenKeys) -> Float[Tensor, " L"]:
        """Bits that tokens cost the original with few tokens before them."""
        if number not in self._levels:
            near = self._near
            run, tokens, width = at_device(self.original), context.tokens, 4 * near
            length = len(tokens) - 1
            bits = torch.empty(length)
            first = min(width, length)
            bits[:first] = losses(run, tokens[None, : first + 1], last=first)[0]
            ends = [*range(2 * width, length, width), length] if length > first else []
            if ends:
                begins = torch.tensor(ends).unsqueeze(1) - width - near
                windows = tokens[begins + torch.arange(width + near + 1)]
                with accelerated(self.original):
                    for end, window in zip(ends, torch.split(windows, 1), strict=True):
                        bits[end - width : end] = losses(run, window, last=width)[0]
            self._levels[number] = bits
        return self._levels[number]

    def _parts(self, more: Float[Tensor, " L"], length: int) -> tuple[float, ...]:
        """Means over parts of the last tokens before a length."""
        last = more[length - length // LAST : length]
        return tuple(_mean(part, last, more[:length], more) for part in last.tensor_split(PARTS))

    def _binned(self, more: Float[Tensor, " L"]) -> Iterator[tuple[int, Tensor]]:
        """Bins of a context's tokens by their first position."""
        width = len(more) // BINS
        return ((place, more[place : place + width]) for place in range(0, BINS * width, width))

    def contexts_in(self, reading: StudyReading) -> int:
        """Number of contexts of a reading."""
        return len(reading.windows) // PARTS

    def facts(self, unit: str) -> dict[str, Any]:
        """See ``Suite``."""
        goal = self.lengths[-1]
        targets = Targets.spread(self.pieces, width=goal // LAST, longest=goal, count=self.count)
        named = words("context", unit=unit, goal=goal, last=LAST, depths=len(DEPTHS), near=NEAR)
        return named | {
            "depths": DEPTHS,
            "needles": "a pass key of five digits under a name, hidden in real text among others, "
            "and asked for at the end",
            "chance": 1e-5,
            "trivial": unigram_entropy(self.text, targets.places),
            "trivial_rule": f"{unit} frequencies",
            "targets": targets.places.numel(),
            "asked": self.count,
        }


def _mean(*wider: Tensor) -> float:
    """The mean of the first values that are not all hidden."""
    return next(float(x.nanmean()) for x in wider if not x.isnan().all())


def _joined(several: Any) -> dict[int, tuple[int, list[Any]]]:
    """Asks of several contexts by length: the place they have in common, and each one's."""
    joined: dict[int, tuple[int, list[Any]]] = {}
    for asks in several:
        for length, (place, pairs) in asks.items():
            before, listed = joined.get(length, (place, []))
            joined[length] = min(before, place), [*listed, pairs]
    return joined


def _asked_whole(run: Any, rows: Int[Tensor, "B n"], ask: Ask) -> Float[Tensor, " B"]:
    """1 for each right answer of a model without a cache."""
    right = []
    for row, prompt, answer in zip(rows, ask.prompts, ask.answers, strict=True):
        tokens = torch.cat([row, torch.tensor([*prompt, *answer[:-1]])]).unsqueeze(0)
        guessed = run(tokens)[0, -len(answer) :].argmax(-1).cpu().tolist()
        right.append(guessed == list(answer))
    return torch.tensor(right).double()


def lengths_around(length: int, encode: Encode) -> tuple[int, ...]:
    """Lengths from an eighth of the trained one to its double, that keys can be hidden in."""
    lengths = dict.fromkeys(round(length * 2 ** (step / 2)) for step in STEPS)
    return tuple(n for n in lengths if n >= min(shortest_context(encode), length))
