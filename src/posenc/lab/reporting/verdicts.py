"""Verdicts in a word, by how much a value changes from the trained length to a longer one.

``word`` decides whether a value holds, degrades or breaks; the sentences that say so are in
``templates/sentences.jinja``.
"""

from __future__ import annotations

import math
from typing import Literal

from posenc.lab.reporting.intervals import Estimate

HOLDS, BREAKS = 0.05, 0.25
"""Deteriorations from the training length, as shares, up to which a value holds, and beyond which
it breaks; in between it degrades."""

Word = Literal["holds", "unsure", "degrades", "breaks"]
"""Unsure where the interval of the change reaches from ``HOLDS`` to beyond ``BREAKS``."""

TONES = {
    **dict.fromkeys(("holds", "learned", "fast", "same"), "good"),
    **dict.fromkeys(("degrades", "unsure", "tied", "slower"), "fair"),
    **dict.fromkeys(("breaks", "unlearned", "overfitted", "slow", "differs", "refuses"), "bad"),
    **dict.fromkeys(("untestable", "unfinished", "unknown"), "none"),
}
"""Word → colour on pages and terminals."""

SEVERITY: tuple[Word, ...] = ("holds", "unsure", "degrades", "breaks")


def deterioration(value: float, base: float, *, lower: bool) -> float:
    """Change from ``base`` to a worse ``value``, as a share of ``base``; negative if better.

    Args:
        value, base: before and after.
        lower: lower values are better.
    """
    difference = value - base if lower else base - value
    if not difference:
        return 0.0
    return difference / abs(base) if base else math.copysign(math.inf, difference)


def word(change: Estimate, limits: tuple[float, float] = (HOLDS, BREAKS)) -> Word:
    """The verdict on a deterioration.

    Args:
        change: for the worse, positive.
        limits: up to which a value holds, and beyond which it breaks.
    """
    holds, breaks = limits
    if change.low <= holds and change.high > breaks:
        return "unsure"
    if change.mean <= holds:
        return "holds"
    return "breaks" if change.mean > breaks else "degrades"
