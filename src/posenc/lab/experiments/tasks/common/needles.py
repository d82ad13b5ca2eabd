"""Real text as bytes: windows, the loss with the levels that it is held to, and needles.

A needle is a byte to remember among real text; a query byte asks for it. Local text is predicted
as well by a model that sees little of it, so loss alone does not show whether a model can use its
far past. A needle does: one of 16 control bytes replaces a byte of the text, and wherever the query
byte stands the right continuation is that needle."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.lab.experiments.corpus import Pieces
from posenc.lab.experiments.tasks.common.task import seen, training_loss
from posenc.lab.experiments.text_loss import byte_entropy, pair_entropy
from posenc.lab.reporting.judge import Metric

OVERFIT = 0.5
"""Bits per byte that training text may cost less than held-out text, net of what byte pairs do:
files differ by less than that."""


def random_windows(
    text: Tensor, pieces: Pieces, *, rows: int, length: int, source: torch.Generator
) -> Int[Tensor, "rows length"]:
    """Windows from anywhere in a text."""
    drawn = torch.randint(pieces.count(length), (rows, 1), generator=source)
    return text[pieces.begins(drawn, length) + torch.arange(length)].long()


def byte_losses(
    train: Tensor,
    tested: tuple[Tensor, Tensor],
    trained: tuple[Tensor, Tensor],
    *,
    training: str,
    **wording: Any,
) -> tuple[Metric, Metric, Metric]:
    """The deciding loss in bits per byte, that of training, and the deciding one on training data.

    Args:
        train: text that the levels count frequencies in.
        tested, trained: a text and the places of its scored bytes, held out and trained on.
        training: the end of the training loss's description.
        wording: ``label``, ``axis`` and ``description`` of the deciding loss.
    """

    def levels(text: Tensor, places: Tensor) -> dict[str, Any]:
        trivial, learned = (level(train, text, places) for level in (byte_entropy, pair_entropy))
        return {"trivial": trivial, "learned": learned}

    wording["description"] += " The rule is what a byte costs who knows only how frequent each is."
    loss = Metric(
        key="loss",
        unit="bits per byte",
        lower_is_better=True,
        trivial_rule="byte frequencies",
        headline=True,
        rule="the byte before alone",
        overfit=OVERFIT,
        **levels(*tested),
        **wording,
    )
    return loss, training_loss(loss.unit, training), seen(loss, **levels(*trained))


QUERY = 0x05
"""ASCII's "enquiry"; text does not contain it."""

FIRST, KINDS = 0x10, 16
"""Needles are the 16 control bytes from here."""

CHANCE = 1 / KINDS
"""Share of needles that a guess finds."""

QUERIES = 8
"""Times a training window asks for its needle."""


def hide(
    inputs: Int[Tensor, "B L"], targets: Int[Tensor, "B L"], generator: torch.Generator
) -> None:
    """Put a needle into the first half of each training window, and queries after it, in place.

    The answer is a target only, so that the needle stands nowhere else; all other targets stay
    those of the text, so that needles and queries are never predicted in it.
    """
    rows, length = inputs.shape
    needle, place = _draw(rows, length // 2, generator)
    after = torch.rand(rows, QUERIES, generator=generator) * (length - 1 - place)
    queries = place + 1 + after.long()
    inputs.scatter_(1, queries, QUERY)
    inputs.scatter_(1, place, needle)
    targets.scatter_(1, queries, needle.expand(-1, QUERIES))


def haystacks(
    windows: Int[Tensor, "W L"], generator: torch.Generator
) -> tuple[Int[Tensor, "W L"], Int[Tensor, " W"]]:
    """Windows with a needle in the first eighth and a query at the end, and the right answers."""
    rows, length = windows.shape
    needle, place = _draw(rows, max(1, length // 8), generator)
    hidden = unmarked(windows)
    hidden.scatter_(1, place, needle)
    hidden[:, -1] = QUERY
    return hidden, needle[:, 0]


def _draw(
    rows: int, places: int, generator: torch.Generator
) -> tuple[Int[Tensor, "B 1"], Int[Tensor, "B 1"]]:
    needle = torch.randint(FIRST, FIRST + KINDS, (rows, 1), generator=generator)
    return needle, torch.randint(0, places, (rows, 1), generator=generator)


def unmarked(windows: Int[Tensor, "W L"]) -> Int[Tensor, "W L"]:
    """A copy of windows with blanks in place of needles and queries."""
    marks = (windows == QUERY) | ((windows >= FIRST) & (windows < FIRST + KINDS))
    return windows.masked_fill(marks, ord(" "))
