"""Choice of a method by a study, whether it gains anything, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from posenc.evaluation.candidates import CUT, SCALED, WINDOW
from posenc.evaluation.results import Findings, Reading, Study
from posenc.experiments.statistics import Estimate, estimate
from posenc.experiments.wording import listed

__all__ = ["TIE", "baselines", "best", "choose", "gap", "has_needles", "shortfall"]

CLOSE = 0.05
"""A method may find so much smaller a share of needles than the best and still be chosen."""

TIE = 0.01
"""Losses that differ by no more than this share are level, however sure the difference."""

LEARNED = 3.0
"""Needles count where the original finds so many times more than a guess."""

QUANTILE = 1.96
"""Of the normal distribution, for 95 % intervals of shares of needles."""


def choose(study: Study, *, tuned: bool, always: bool = False) -> tuple[str | None, str]:
    """The method to write and why; None: there is none, and why.

    A method that gains nothing over what needs no stretching is not chosen of several; one that
    was asked for alone is.

    Args:
        study: the measurements.
        tuned: by those after fine-tuning.
        always: choose the best even where it gains nothing.
    """
    key = best(study, tuned=tuned)
    if key is None:
        return None, "No method that a checkpoint can hold was measured."
    missing = shortfall(study, key, tuned=tuned)
    if sum(each.writable for each in study.findings) == 1:
        asked = "It was the one asked for."
        return key, f"{asked} It gains nothing: {missing}." if missing else asked
    if missing and not always:
        return None, f"Nothing is gained by stretching: {missing}."
    why = _why(study, key, tuned=tuned)
    return key, f"{why} It gains nothing: {missing}." if missing else why


def best(study: Study, *, tuned: bool) -> str | None:
    """The best method that a checkpoint can hold; None: there is none."""
    found = _writable(study, tuned=tuned)
    if not found:
        return None
    if not has_needles(study):
        return found[0][0].key
    most = max(reading.found(study.goal) for _, reading in found)
    return next(e.key for e, reading in found if reading.found(study.goal) >= most - CLOSE)


def baselines(study: Study) -> dict[str, str]:
    """Baselines, which need no extension: key, and name in a sentence."""
    names = {
        "direct": "not stretched",
        WINDOW: "a plain sliding window",
        CUT: f"cut at {study.length}",
    }
    if study.deciding.key == "right":  # of the others it is the measure
        names[SCALED] = f"scaled to {study.called(study.length)}"
    return names


def shortfall(study: Study, key: str, *, tuned: bool) -> str:
    """Why a method gains nothing over some baseline, in a phrase; "" where it gains over all.

    It gains where it is surely better by the deciding metric (of losses by more than ``TIE``) and
    finds surely no fewer needles, or finds surely more of them (where these count) at no more loss;
    a plain sliding window, whose loss few undercut, is also beaten by needles alone.
    """
    readings = {each.key: reading for each, reading in study.ranked(tuned=tuned)}
    chosen, metric, names = readings[key], study.deciding, baselines(study)
    level: list[str] = []
    close: list[str] = []
    ahead: list[str] = []
    for name in names:
        base = readings.get(name)
        if base is None:
            continue
        difference = gap(base, chosen, lower=metric.lower)
        stands = 0 if difference is None or not difference.sure else _sign(difference.mean)
        near = abs(base.of(metric)[study.goal] - chosen.of(metric)[study.goal])
        tied = stands > 0 and metric.lower and near <= TIE * base.of(metric)[study.goal]
        stands = 0 if tied else stands
        more = _more(study, chosen, base) if has_needles(study) else 0
        if (stands > 0 and more >= 0) or (more > 0 and (stands == 0 or name == WINDOW)):
            continue
        (ahead if stands < 0 or more < 0 else close if tied else level).append(name)
    if not (level or close or ahead):
        return ""

    def figures(keys: Sequence[str]) -> str:
        values = {name: readings[name].of(metric)[study.goal] for name in keys}
        return listed([f"{names[name]} ({metric.shown(value)})" for name, value in values.items()])

    told = f"at {study.called(study.goal)} {study.unit}s {key}, the best that a checkpoint can "
    told += f"hold, has {metric.name} {metric.shown(chosen.of(metric)[study.goal])}"
    if has_needles(study):
        told += f" and finds {chosen.found(study.goal):.0%} of the needles"
    relations = [
        f"{relation} {figures(names)}"
        for relation, names in (
            ("cannot be told from", level),
            (f"is within {TIE:.0%} of", close),
            ("is worse than", ahead),
        )
        if names
    ]
    told += ", which " + listed(relations)
    if study.causal and not has_needles(study):
        told += "; needles do not count, of which the model finds hardly more than a guess"
    return told


def has_needles(study: Study) -> bool:
    """Whether the original finds needles at its own length, so that others can be told by them."""
    original = study.of("direct") if study.causal else None
    if original is None or original.untuned is None:
        return False
    return original.untuned.found(study.length) >= LEARNED * study.chance


def gap(one: Reading, other: Reading, *, lower: bool = True) -> Estimate | None:
    """Deficit of ``one`` to ``other`` at the goal, over the texts (documents, images) read.

    Both read the same pieces, so that their difficulty cancels. The interval is over such pieces,
    not over models.

    Args:
        one, other: what is compared.
        lower: whether less is better.
    """
    pairs = zip(one.windows, other.windows, strict=True)
    return estimate(a - b if lower else b - a for a, b in pairs)


def _writable(study: Study, *, tuned: bool) -> list[tuple[Findings, Reading]]:
    return [(each, reading) for each, reading in study.ranked(tuned=tuned) if each.writable]


def _why(study: Study, key: str, *, tuned: bool) -> str:
    """Why a method is the best of those that a checkpoint can hold, and which others are ahead."""
    where = "length" if study.unit != "pixel" else "size"
    most = f"{'least' if study.deciding.lower else 'highest'} {study.deciding.name}"
    held = "Of the methods that a checkpoint can hold"
    if has_needles(study):
        held += f" and that find as many needles as the best at the new {where} "
        held += f"(up to {CLOSE:.0%} fewer)"
    ranked = [each.key for each, _ in study.ranked(tuned=tuned)]
    counted = [name for name in ranked if name != SCALED or SCALED in baselines(study)]
    ahead = counted[: counted.index(key)]
    also = ""
    if ahead:
        amount = "less" if study.deciding.lower else "a higher one"
        also = f"; {listed(ahead)} {'have' if len(ahead) > 1 else 'has'} {amount}"
    return f"{held} it has the {most} at the new {where}{also}."


def _more(study: Study, one: Reading, other: Reading) -> int:
    """Whether ``one`` surely finds more needles (1) or fewer (-1) than ``other``; 0: neither.

    By the normal interval of the difference of two shares, each with one more found and one more
    missed, so that shares of 0 and 1 have one too.
    """
    asked = study.asked * len(study.depths)
    shares = [(asked * each.found(study.goal) + 1) / (asked + 2) for each in (one, other)]
    error = math.sqrt(sum(share * (1 - share) / (asked + 2) for share in shares))
    difference = shares[0] - shares[1]
    return _sign(difference) if abs(difference) > QUANTILE * error else 0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
