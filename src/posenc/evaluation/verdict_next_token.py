"""Findings on models of the next token alone, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from posenc.evaluation.candidates import WINDOW
from posenc.evaluation.choosing import TIE, has_needles
from posenc.evaluation.results import Study
from posenc.experiments.wording import listed

__all__ = ["EXPECTED", "copying", "expectation", "needles_found", "window_beaten"]

EXPECTED: tuple[tuple[str, ...], ...] = (
    ("direct",),
    ("interpolate",),
    ("ntk",),
    ("yarn", "yarn@alpha=0.5@beta=4"),
    ("rerope", "self_extend"),
)
"""From worst to best at twice the trained length, before any training."""


def expectation(study: Study) -> list[str]:
    """The order that is expected before training, and where it is not so."""
    found = {each.key: reading for each, reading in study.ranked()}
    steps = [(group, [key for key in group if key in found]) for group in EXPECTED]
    known = [(group, keys) for group, keys in steps if keys]
    if len(known) < 3 or study.length * 2 not in study.lengths:
        return []
    at = study.length * 2

    def best(keys: Sequence[str]) -> float:
        return min(found[key].loss[at] for key in keys)

    order = ", then ".join(" and ".join(keys) for _, keys in known)
    sentences = [f"Expected at twice the length before any training, from worst to best: {order}."]
    wrong = [
        (worse, better)
        for (_, worse), (_, better) in pairwise(known)
        if best(better) > best(worse) * (1 + TIE)
    ]
    same = [
        (worse, better)
        for (_, worse), (_, better) in pairwise(known)
        if abs(best(better) - best(worse)) <= best(worse) * TIE
    ]
    if not wrong and not same:
        sentences.append(f"So it is here, at {at} {study.unit}s.")
    for worse, better in same:
        sentences.append(
            f"{listed(worse)} and {listed(better)} do not differ by more than {TIE:.0%} here."
        )
    for worse, better in wrong:
        told = f"{best(better):.3f} against {best(worse):.3f}"
        sentences.append(
            f"Not so here: {listed(better)} {'are' if len(better) > 1 else 'is'} worse than "
            f"{listed(worse)} ({told})."
        )
        for key in better:
            each = study.of(key)
            if each is not None and each.advice:
                sentences.append(f"{key}: {' '.join(each.advice)}")
    return sentences


def window_beaten(study: Study, *, tuned: bool) -> Iterator[str]:
    """Methods with less loss than a plain sliding window."""
    ranked = study.ranked(tuned=tuned)
    window = next((reading for each, reading in ranked if each.key == WINDOW), None)
    if window is None:
        return
    limit = window.loss[study.goal]
    beaten = [e.key for e, r in ranked if r.loss[study.goal] < limit * (1 - TIE)]
    who = listed(beaten) if beaten else "No method"
    verb = "have" if len(beaten) > 1 else "has"
    yield (
        f"A plain sliding window of {study.length}, which sees nothing farther back, reaches "
        f"{limit:.3f}. {who} {verb} less loss than it by more than {TIE:.0%}."
    )


def needles_found(study: Study, *, tuned: bool) -> Iterator[str]:
    """Methods that find most needles, and whether that says anything."""
    original = study.of("direct")
    if original is None or original.untuned is None:
        return
    base = original.untuned.found(study.length)
    if not has_needles(study):
        if not tuned:
            yield (
                f"The model finds {base:.0%} of the needles at its own length, where a guess finds "
                f"{study.chance:.1%}: what it finds at others says nothing of the methods."
            )
        return
    ranked = study.ranked(tuned=tuned)
    others = [pair for pair in ranked if pair[0].key != WINDOW]
    ordered = sorted(others, key=lambda pair: -pair[1].found(study.goal))
    told = ", ".join(f"{e.key} {r.found(study.goal):.0%}" for e, r in ordered[:4])
    window = next((r for e, r in ranked if e.key == WINDOW), None)
    rest = "" if window is None else f"; the window {window.found(study.goal):.0%}"
    yield (
        f"Most needles found at {study.goal}: {told}{rest}. At {study.length} the original finds "
        f"{base:.0%}, and a guess {study.chance:.1%}."
    )


def copying(study: Study) -> Iterator[str]:
    """Effect of extension on near distances."""
    original = study.of("direct")
    if original is None or original.untuned is None:
        return
    base = original.untuned.copied[study.length]
    if base < 3 * study.copy_chance:
        yield (
            f"The model copies {base:.0%} of a repeated word at its own length, where a guess "
            f"copies {study.copy_chance:.1%}: it has not learned to, so that what it copies at "
            "others says nothing."
        )
        return
    ranked = [(e, r) for e, r in study.ranked() if e.role == "method"]
    worst = sorted(ranked, key=lambda pair: pair[1].copied[study.length])[:3]
    told = ", ".join(f"{e.key} {r.copied[study.length]:.0%}" for e, r in worst)
    if told:
        yield (
            f"Of a word repeated right after itself the original copies {base:.0%} at the trained "
            f"length; what blurs near distances copies less: {told}."
        )
