"""Loss of models of text: on the same targets at every length, and by position."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.lab.experiments.corpus import Pieces

Model = Callable[[Tensor], Tensor]
"""Tokens ``[B, L]`` to logits ``[B, L, V]`` of the token after each (``restored``: of each)."""

Each = Callable[[Tensor], Tensor]
"""Windows of indices to values; see ``PositionProfile.curve``."""

PRIOR = 8
"""Pairs' worth of single bytes in ``pair_entropy``."""

TOKENS_A_CALL = 4096
"""Tokens evaluated at a time: enough to fill one core, little enough for any memory."""


@dataclass(frozen=True, eq=False)
class Targets:
    """Segments of a text that are predicted in contexts of any length, always the same bytes.

    Args:
        ends: ``[W]``, where in the text each segment ends (exclusive).
        width: bytes in a segment.
    """

    ends: Int[Tensor, " W"]
    width: int

    @classmethod
    def spread(cls, pieces: Pieces, *, width: int, longest: int, count: int) -> Targets:
        """Up to ``count`` segments without overlap, evenly over a text of these pieces.

        Each has ``longest`` bytes of input before its end; the text must be longer than
        ``longest + width``.
        """
        span = longest + 1
        last_start = pieces.count(span) - 1
        steps = min(count, max(1, last_start // width))
        begins = pieces.begins(torch.arange(1, steps + 1) * last_start // steps, span)
        return cls(begins + span, width)

    @property
    def places(self) -> Int[Tensor, "W width"]:
        """Places of the predicted bytes in the text."""
        return self.ends.unsqueeze(1) + torch.arange(-self.width, 0)

    def windows(self, text: Int[Tensor, " T"], length: int) -> Int[Tensor, "W L1"]:
        """Windows of ``length`` inputs and one target more, which end where the segments end."""
        return text[self.ends.unsqueeze(1) + torch.arange(-length - 1, 0)].long()

    def each(self, model: Model, text: Int[Tensor, " T"], length: int) -> Float[Tensor, "W width"]:
        """Bits per byte of the segments, one by one, with windows of ``length``."""
        return losses(model, self.windows(text, length), last=self.width)

    def loss(self, model: Model, text: Int[Tensor, " T"], length: int) -> float:
        """Bits a byte on the segments with windows of ``length``."""
        return float(self.each(model, text, length).mean())


@dataclass(frozen=True, eq=False)
class PositionProfile:
    """Loss by position in the context, on the same bytes at every position.

    Windows of ``bins · width`` tokens slide over runs of text in steps of ``width``, so that each
    segment of a run is seen in every bin.

    Args:
        starts: ``[G]``, where in the text each run begins.
        width: positions in a bin, and bytes in a segment.
        bins: how many there are.
        run: segments in a run.
    """

    starts: Int[Tensor, " G"]
    width: int
    bins: int
    run: int

    @classmethod
    def spread(
        cls, pieces: Pieces, *, length: int, bins: int, run: int, count: int
    ) -> PositionProfile:
        """Up to ``count`` runs, evenly over a text of these pieces, for windows of ``length``.

        The text must be longer than ``(run + 2 · bins) · width``, about three times ``length``.
        """
        bins = min(bins, length)
        width = length // bins
        span = (run + 2 * bins - 2) * width + 1
        last_start = pieces.count(span) - 1
        runs = max(1, min(count, last_start // span + 1))
        begins = pieces.begins(torch.arange(runs) * last_start // max(1, runs - 1), span)
        return cls(begins + 1 + (bins - 1) * width, width, bins, run)

    def shortened(self, length: int) -> PositionProfile:
        """The profile of these segments in windows of at most ``length`` tokens."""
        return replace(self, bins=max(1, min(self.bins, length // self.width)))

    @property
    def length(self) -> int:
        """Tokens in a window."""
        return self.bins * self.width

    @property
    def middles(self) -> list[float]:
        """Middle position of every bin."""
        return [(index + 0.5) * self.width for index in range(self.bins)]

    def loss(self, model: Model, text: Int[Tensor, " T"]) -> list[tuple[float, float]]:
        """(middle of the bin, bits a byte) for every bin."""
        return self.curve(lambda rows: losses(model, text[rows].long(), last=self.length))

    def curve(self, each: Each) -> list[tuple[float, float]]:
        """(middle of the bin, mean of ``segments``) for every bin; NaN for none."""
        means = self.segments(each).nanmean((0, 2)).tolist()
        return list(zip(self.middles, means, strict=True))

    def segments(self, each: Each) -> Float[Tensor, "S bins width"]:
        """The values of every segment's tokens in every bin.

        Args:
            each: a value for each of the last ``length`` tokens of windows ``[W, length + 1]``,
                given as indices of the text; NaN for none.
        """
        slides = torch.arange(-(self.bins - 1), self.run) * self.width
        begins = (self.starts.unsqueeze(1) + slides).flatten()
        values = each(begins.unsqueeze(1) + torch.arange(-1, self.length))
        binned = values.reshape(len(self.starts), len(slides), self.bins, self.width)
        # Segment s lies in bin ``index`` of the window that slid to s - index.
        first = range(self.bins - 1, -1, -1)
        segments = [binned[:, begin : begin + self.run, n] for n, begin in enumerate(first)]
        return torch.stack(segments, 2).flatten(0, 1)


@torch.inference_mode()
def losses(model: Model, windows: Int[Tensor, "W L1"], *, last: int) -> Float[Tensor, "W last"]:
    """Bits that the last ``last`` tokens of each window cost, each given all before it."""
    parts = []
    for chunk in torch.split(windows, rows_a_call(windows.shape[1] - 1)):
        logits = model(chunk[:, :-1])[:, -last:].float()
        targets = chunk[:, -last:].to(logits.device)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        parts.append(nats.reshape(targets.shape).cpu())
    return torch.cat(parts) / math.log(2)


@torch.inference_mode()
def restored(
    model: Model,
    inputs: Int[Tensor, "W L"],
    wanted: Int[Tensor, "W L"],
    chosen: Bool[Tensor, "W L"],
) -> tuple[Float[Tensor, "W L"], Float[Tensor, "W L"]]:
    """Bits per chosen token, and 1 or 0 for right or wrong; NaN for all others.

    Args:
        model: predicts the token at each place.
        inputs: tokens with the chosen ones masked.
        wanted: the tokens.
        chosen: tokens to be scored.
    """
    bits = torch.full(wanted.shape, torch.nan)
    right = bits.clone()
    rows = rows_a_call(wanted.shape[1])
    for begin in range(0, len(inputs), rows):
        part = slice(begin, begin + rows)
        asked = chosen[part]
        logits = model(inputs[part])[asked].float().cpu()
        answers = wanted[part][asked]
        bits[part][asked] = F.cross_entropy(logits, answers, reduction="none") / math.log(2)
        right[part][asked] = (logits.argmax(-1) == answers).float()
    return bits, right


@torch.inference_mode()
def predictions(model: Model, windows: Int[Tensor, "W L"]) -> Int[Tensor, " W"]:
    """The likeliest token after each window."""
    chunks = torch.split(windows, rows_a_call(windows.shape[1]))
    return torch.cat([model(chunk)[:, -1].argmax(-1).cpu() for chunk in chunks])


def byte_entropy(train: Int[Tensor, " T"], text: Int[Tensor, " U"], places: Tensor) -> float:
    """Bits per byte at some places of ``text`` under the byte frequencies of ``train``."""
    counts = torch.bincount(train.long(), minlength=256).double() + 1
    bits = -(counts / counts.sum()).log2()
    return float(bits[text[places].long()].mean())


def unigram_entropy(text: Int[Tensor, " T"], places: Tensor) -> float:
    """Bits per id at some places of a text under the frequencies of all its other ids.

    Each of the ids in the text counts one more than it occurs elsewhere.
    """
    _, ids, counts = torch.unique(text, return_inverse=True, return_counts=True)
    bits = math.log2(len(text) - 1 + len(counts)) - counts.double().log2()
    return float(bits[ids[places]].mean())


def pair_entropy(train: Int[Tensor, " T"], text: Int[Tensor, " U"], places: Tensor) -> float:
    """Bits per byte at some places of ``text``, given the byte before each, by pairs in ``train``.

    Frequencies of pairs, smoothed by those of single bytes: log2 of
    (n(a, b) + K p(b)) / (n(a) + K), with ``PRIOR`` as K.

    Args:
        train: to count in.
        text: with the bytes to predict.
        places: of these, none the first.
    """
    single = torch.bincount(train.long(), minlength=256).double() + 1
    single /= single.sum()
    pairs = torch.bincount(256 * train[:-1].long() + train[1:].long(), minlength=1 << 16)
    counts = pairs.double().reshape(256, 256)
    share = (counts + PRIOR * single) / (counts.sum(1, keepdim=True) + PRIOR)
    return float(-share[text[places - 1].long(), text[places].long()].log2().mean())


def at_device(model: nn.Module) -> Model:
    """The model, called with tokens on any device."""
    device = next(model.parameters()).device
    return lambda tokens: model(tokens.to(device))


def rows_a_call(length: int) -> int:
    """Windows of so many tokens that are evaluated at a time."""
    return max(1, TOKENS_A_CALL // length)
