"""Which method a study speaks for, and how sure that is."""

from __future__ import annotations

from posenc.lab.statistics import Estimate, estimate
from posenc.lab.stretching.results import Reading, Study

__all__ = ["choose", "gap", "has_needles"]

CLOSE = 0.05
"""A method may find so much smaller a share of needles than the best and still be chosen."""

LEARNED = 3.0
"""Needles count where the original finds so many times more than a guess."""


def choose(study: Study, *, tuned: bool) -> tuple[str | None, str]:
    """The method to use and why; None: there is none that a checkpoint can hold."""
    ranked = study.ranked(tuned=tuned)
    found = [(each, reading) for each, reading in ranked if each.writable]
    if not found:
        return None, "No method that a checkpoint can hold was measured."
    if sum(each.writable for each in study.findings) == 1:
        return found[0][0].key, "It was the one asked for."
    if not study.causal:
        most = "least" if study.deciding.lower else "highest"
        where = "length" if study.unit != "pixel" else "size"
        return found[0][0].key, f"It has the {most} {study.deciding.name} at the new {where}."
    if not has_needles(study):
        return found[0][0].key, "It has the least loss at the new length."
    best = max(reading.found(study.goal) for _, reading in found)
    key = next(each.key for each, reading in found if reading.found(study.goal) >= best - CLOSE)
    return key, (
        f"Of the methods that find as many needles as the best at the new length (up to "
        f"{CLOSE:.0%} fewer) it has the least loss there."
    )


def has_needles(study: Study) -> bool:
    """Whether the original finds needles at its own length, so that others can be told by them."""
    original = study.of("direct") if study.causal else None
    if original is None or original.untuned is None:
        return False
    return original.untuned.found(study.length) >= LEARNED * study.chance


def gap(one: Reading, other: Reading, *, lower: bool = True) -> Estimate | None:
    """How much worse ``one`` is at the goal, over the stretches of text (documents, images) seen.

    Both saw the same, so that what makes a stretch hard cancels. The interval is that of other
    such stretches, not of other models.

    Args:
        one, other: what is compared.
        lower: whether less is better.
    """
    pairs = zip(one.windows, other.windows, strict=True)
    return estimate(a - b if lower else b - a for a, b in pairs)
