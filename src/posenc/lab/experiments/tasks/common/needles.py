"""Needles: a byte to remember among real text, and a query byte that asks for it.

Local text is predicted as well by a model that sees little of it, so loss alone does not show
whether a model can use its far past. A needle does: one of 16 control bytes replaces a byte of the
text, and wherever the query byte stands the right continuation is that needle.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

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
