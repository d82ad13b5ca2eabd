"""What a study says, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from posenc.lab.stretching.choosing import choose, gap, has_needles
from posenc.lab.stretching.contenders import WINDOW
from posenc.lab.stretching.results import Findings, Reading, Study

__all__ = ["EXPECTED", "expectation", "findings", "headline"]

EXPECTED: tuple[tuple[str, ...], ...] = (
    ("direct",),
    ("interpolate",),
    ("ntk",),
    ("yarn", "yarn@alpha=0.5@beta=4"),
    ("rerope", "self_extend"),
)
"""From worst to best at twice the trained length, before any training."""

TIE = 0.01
"""Losses that differ by a smaller share of themselves are called equal."""

SAME = 0.02
"""A loss at short contexts that is at most so much larger has not suffered."""


SLOWER = 1.5
"""A method that takes so many times as long is said to."""


def headline(study: Study) -> list[str]:
    """Which method to use, and how sure that is; of a model that was not stretched its figures."""
    if study.factor == 1.0:
        return list(_alone(study))
    return [*_advised(study, tuned=study.tuned), *_certainty(study)]


def findings(study: Study) -> list[tuple[str, list[str]]]:
    """What else was found: titles, and sentences under each."""
    if study.factor == 1.0:
        return []
    groups: list[tuple[str, list[str]]] = []
    for tuned in (False, True) if study.tuned else (False,):
        told = [] if tuned or not study.tuned else [*_advised(study, tuned=False)]
        for part in (_ranking, _window, _needles):
            told += part(study, tuned=tuned)
        groups.append(("After fine-tuning" if tuned else "Without training", told))
    groups.append(("In contexts no longer than before", [*_short(study), *_copying(study)]))
    groups.append(("Against what is expected", expectation(study)))
    if study.chosen is not None:
        written = [f"Written: {study.chosen}. {study.reason}", *_noted(study)]
    else:
        written = [f"No checkpoint was written. {study.reason}"]
    groups.append(("The checkpoint", written))
    return [(title, told) for title, told in groups if told]


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
            f"{_names(worse)} and {_names(better)} do not differ by more than {TIE:.0%} here."
        )
    for worse, better in wrong:
        told = f"{best(better):.3f} against {best(worse):.3f}"
        sentences.append(
            f"Not so here: {_names(better)} {'are' if len(better) > 1 else 'is'} worse than "
            f"{_names(worse)} ({told})."
        )
        for key in better:
            each = study.of(key)
            if each is not None and each.advice:
                sentences.append(f"{key}: {' '.join(each.advice)}")
    return sentences


def _alone(study: Study) -> Iterator[str]:
    reading = study.findings[0].untuned
    assert reading is not None  # a study of one model has measured it
    yield (
        f"{study.checkpoint}, trained at {study.length} {study.unit}s, "
        + "; ".join(f"at {n}: {v:.3f} bits a {study.unit}" for n, v in reading.loss.items())
        + "."
    )
    found = "; ".join(f"at {n}: {reading.found(n):.0%}" for n in study.lengths)
    yield f"Needles found, {found} (a guess finds {study.chance:.1%})."


def _advised(study: Study, *, tuned: bool) -> Iterator[str]:
    """What to use, beside the model as it is and a plain window."""
    key, _ = choose(study, tuned=tuned)
    readings = {each.key: reading for each, reading in study.ranked(tuned=tuned)}
    if key is None:
        return
    when = "Without any training"
    if tuned:
        when = f"After {study.finetune['steps']} steps of fine-tuning"
    chosen = readings[key]
    others = [
        (name, readings[other])
        for other, name in (("direct", "not stretched"), (WINDOW, "a plain sliding window"))
        if other in readings
    ]
    lost = ", ".join(f"{name} {reading.loss[study.goal]:.3f}" for name, reading in others)
    told = (
        f"{when}, use {key}: at {study.goal} {study.unit}s, {study.factor:g} times the trained "
        f"length, its loss is {_bits(chosen, study)} ({lost})"
    )
    if has_needles(study):
        missed = ", ".join(f"{name} {reading.found(study.goal):.0%}" for name, reading in others)
        told += f", and it finds {chosen.found(study.goal):.0%} of the needles ({missed})"
    yield f"{told}."
    plain = readings.get("direct")
    if plain is not None and chosen.tokens_per_second * SLOWER <= plain.tokens_per_second:
        yield (
            f"{key} takes {plain.tokens_per_second / chosen.tokens_per_second:.1f} times as long "
            f"as the model not stretched to read {study.goal} {study.unit}s here, and takes "
            f"{chosen.peak_memory_bytes / 1e6:.0f} MB beside "
            f"{plain.peak_memory_bytes / 1e6:.0f} MB."
        )


def _certainty(study: Study) -> Iterator[str]:
    """How sure the first sentence is."""
    key, _ = choose(study, tuned=study.tuned)
    readings = {each.key: reading for each, reading in study.ranked(tuned=study.tuned)}
    if key is None:
        return
    chosen = readings.pop(key)
    gaps = {name: gap(reading, chosen) for name, reading in readings.items()}
    known = {name: found for name, found in gaps.items() if found is not None}
    same = [name for name, found in known.items() if not found.sure]
    better = [name for name, found in known.items() if found.sure and found.mean < 0]
    worse = [(name, found) for name, found in known.items() if found.sure and found.mean > 0]
    told = []
    if same:
        told.append(
            f"{_names(same)} cannot be told from it by {'their' if len(same) > 1 else 'its'} loss"
        )
    if worse:
        name, found = min(worse, key=lambda pair: pair[1].mean)
        told.append(
            f"{name}, {'the next' if not better else 'the next that loses more'}, costs "
            f"{found.mean:.3f} ± {found.half_width:.3f} bits a {study.unit} more"
        )
    if better:
        told.append(f"{_names(better)} {'have' if len(better) > 1 else 'has'} less loss")
    read = f"{len(chosen.windows)} stretches of text, 95% intervals"
    if told:
        yield f"How sure: {'; '.join(told)} ({read})."
    if has_needles(study):
        asked = study.asked * len(study.depths)
        half = 1.96 * math.sqrt(0.25 / asked)
        yield (
            f"Shares of needles are of {asked} and sure to {half:.0%} at worst. All this is one "
            "trained model and one seed: where methods are close, another may order them otherwise."
        )
    else:
        yield (
            "All this is one trained model and one seed: where methods are close, another may "
            "order them otherwise."
        )


def _noted(study: Study) -> Iterator[str]:
    """What the written method has to say of its options here."""
    chosen = study.of(study.chosen or "")
    if chosen is not None:
        yield from (f"{chosen.key}: {sentence}" for sentence in chosen.advice)


def _ranking(study: Study, *, tuned: bool) -> Iterator[str]:
    ranked = study.ranked(tuned=tuned)
    if len(ranked) < 2:
        return
    told = f"Least loss at {study.goal} {study.unit}s: {_listed(ranked[:4], study)}"
    if len(ranked) > 4:
        told += f"; most: {_listed(ranked[-1:], study)}"
    yield f"{told} bits a {study.unit}."


def _window(study: Study, *, tuned: bool) -> Iterator[str]:
    ranked = study.ranked(tuned=tuned)
    window = next((reading for each, reading in ranked if each.key == WINDOW), None)
    if window is None:
        return
    limit = window.loss[study.goal]
    beaten = [e.key for e, r in ranked if r.loss[study.goal] < limit * (1 - TIE)]
    who = _names(beaten) if beaten else "No method"
    verb = "have" if len(beaten) > 1 else "has"
    yield (
        f"A plain sliding window of {study.length}, which sees nothing farther back, reaches "
        f"{limit:.3f}. {who} {verb} less loss than it by more than {TIE:.0%}."
    )


def _needles(study: Study, *, tuned: bool) -> Iterator[str]:
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


def _short(study: Study) -> Iterator[str]:
    """What stretching costs where the text is no longer than before."""
    original = study.of("direct")
    if original is None or original.untuned is None:
        return
    for tuned in (False, True) if study.tuned else (False,):
        base = original.reading(tuned) or original.untuned
        at = base.loss[study.length]
        worse = [
            (each.key, reading.loss[study.length] / at - 1)
            for each, reading in study.ranked(tuned=tuned)
            if each.role == "method"
        ]
        suffering = [(key, by) for key, by in worse if by > SAME]
        if not worse:
            continue
        when = " after fine-tuning" if tuned else ""
        told = ", ".join(f"{key} {by:+.1%}" for key, by in suffering)
        if suffering:
            yield (
                f"At the trained length{when} the loss rises by more than {SAME:.0%} with {told}."
            )
        else:
            yield f"At the trained length{when} no method's loss rises by more than {SAME:.0%}."


def _copying(study: Study) -> Iterator[str]:
    """What stretching does to near distances."""
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


def _bits(reading: Reading, study: Study) -> str:
    return f"{reading.loss[study.goal]:.3f} bits a {study.unit}"


def _listed(ranked: Sequence[tuple[Findings, Reading]], study: Study) -> str:
    return ", ".join(f"{each.key} {reading.loss[study.goal]:.3f}" for each, reading in ranked)


def _names(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
