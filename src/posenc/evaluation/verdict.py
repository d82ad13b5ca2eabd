"""Findings of a study, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from posenc.evaluation.candidates import CUT, SCALED
from posenc.evaluation.choosing import baselines, best, gap, has_needles, shortfall
from posenc.evaluation.results import Findings, Reading, Study
from posenc.evaluation.verdict_next_token import copying, expectation, needles_found, window_beaten
from posenc.experiments.wording import listed

__all__ = ["at", "findings", "headline", "setting"]

SAME = 0.02
"""At short contexts, deteriorations up to this (of a loss, as a share of itself) do not count."""

UNTIMED = "takes an unknown time (the machine was busy: its passes took too unequal times)"

SLOWER = 1.5
"""A method that takes so many times as long is said to."""


def setting(study: Study) -> str:
    """Model, text and lengths of the study."""
    lengths = ", ".join(study.called(length) for length in study.lengths)
    told = f"A {study.family} of {study.parameters:,} parameters, trained at "
    told += f"{at(study, study.length)}, "
    if study.unit == "pixel":
        return f"{told}was shown {study.text} at {lengths} pixels."
    told += f"read {study.text} in {'contexts' if study.causal else 'texts'} of {lengths}."
    if study.finetune:
        told += (
            " Everything was measured without training, and after "
            f"{study.finetune['steps']} equal steps of fine-tuning at "
            f"{study.finetune['positions']} positions."
        )
    return told


def headline(study: Study) -> list[str]:
    """The recommended method, and how sure that is; for a model as it is, its figures."""
    if study.factor == 1.0:
        return list(_alone(study))
    told = [*_advised(study, tuned=study.tuned), *_certainty(study)]
    return told or ["Nothing that a checkpoint can hold was measured: see below."]


def findings(study: Study) -> list[tuple[str, list[str]]]:
    """Further findings: titles, and sentences under each."""
    if study.factor == 1.0:
        return []
    groups: list[tuple[str, list[str]]] = []
    for tuned in (False, True) if study.tuned else (False,):
        told = [] if tuned or not study.tuned else [*_advised(study, tuned=False)]
        told += _ranking(study, tuned=tuned)
        if study.causal:
            told += [*window_beaten(study, tuned=tuned), *needles_found(study, tuned=tuned)]
        else:
            told += _baseline(study)
        groups.append(("After fine-tuning" if tuned else "Without training", told))
    if study.unit != "pixel":  # at the trained size a table of images is what it was
        short = [*_short(study), *(copying(study) if study.causal else ())]
        groups.append(("In contexts no longer than before", short))
    if study.causal:
        groups.append(("Against what is expected", expectation(study)))
    if study.chosen is not None:
        written = [f"Written: {study.chosen}. {study.reason}", *_noted(study)]
    else:
        written = [f"No checkpoint was written. {study.reason}"]
    groups.append(("The checkpoint", written))
    return [(title, told) for title, told in groups if told]


def at(study: Study, length: int) -> str:
    """A length with its unit."""
    side = " a side" if study.unit == "pixel" and length not in study.labels else ""
    return f"{study.called(length)} {study.unit}s{side}"


def _alone(study: Study) -> Iterator[str]:
    each = study.findings[0]
    reading = each.untuned
    assert reading is not None  # a study of one model has measured it
    for metric in study.metrics:
        if metric.brief:
            continue
        told = "; ".join(
            f"at {study.called(n)} {metric.told(value)}" for n, value in reading.of(metric).items()
        )
        beyond = study.goal > study.length
        how = {
            CUT: f", given {at(study, study.length)} of longer texts",
            "interpolate": ", its table interpolated for larger images",
        }.get(each.key, "")
        guess = f" (a guess finds {study.chance:.1%})" if metric.key == "needles" else ""
        yield (
            f"{study.checkpoint}, trained at {at(study, study.length)}{how if beyond else ''}: "
            f"{told}{guess}."
        )


def _advised(study: Study, *, tuned: bool) -> Iterator[str]:
    """The recommended method beside the baselines."""
    key = best(study, tuned=tuned)
    readings = {each.key: reading for each, reading in study.ranked(tuned=tuned)}
    if key is None:
        return
    when = "Without any training"
    if tuned:
        when = f"After {study.finetune['steps']} steps of fine-tuning"
    missing = shortfall(study, key, tuned=tuned)
    if missing:
        yield f"{when}, do not stretch: {missing}."
        return
    chosen, metric, goal = readings[key], study.deciding, study.goal
    others = [
        (name, readings[other]) for other, name in baselines(study).items() if other in readings
    ]

    def beside(shown: Sequence[str]) -> str:
        pairs = ", ".join(
            f"{name}: {value}" for (name, _), value in zip(others, shown, strict=True)
        )
        return f" ({pairs})" if pairs else ""

    what = "size" if study.unit == "pixel" else "length"
    told = f"{when}, use {key}: at {at(study, goal)}, {study.factor:g} times the trained {what}, "
    told += metric.told(chosen.of(metric)[goal])
    told += beside([metric.shown(reading.of(metric)[goal]) for _, reading in others])
    if has_needles(study):
        found = f"{chosen.found(goal):.0%} of the needles"
        told += f", and it finds {found}{beside([f'{r.found(goal):.0%}' for _, r in others])}"
    yield f"{told}."
    yield from _cost(study, key, readings)


def _cost(study: Study, key: str, readings: dict[str, Reading]) -> Iterator[str]:
    """Cost of the chosen method, where that is much; beside shorter texts, always."""
    chosen, goal = readings[key], study.goal
    megabytes = f"takes {chosen.peak_memory_bytes / 1e6:.0f} MB beside "
    plain = readings.get("direct")
    if plain is not None and not (chosen.timed and plain.timed):
        yield f"{key} {UNTIMED}; it {megabytes}{plain.peak_memory_bytes / 1e6:.0f} MB."
    elif plain is not None and chosen.per_second * SLOWER <= plain.per_second:
        yield (
            f"{key} takes {plain.per_second / chosen.per_second:.2g} times as long as the model "
            f"not stretched to read {goal} {study.unit}s here, and {megabytes}"
            f"{plain.peak_memory_bytes / 1e6:.0f} MB."
        )
    base = readings.get(CUT) or readings.get(SCALED)
    if base is not None:
        longer = 1.0 if study.unit == "pixel" else goal / study.length
        what = ("an image of ", "one of ") if study.unit == "pixel" else ("", "")
        times = longer * base.per_second / chosen.per_second
        known = f"takes {times:.2g} times as long" if chosen.timed and base.timed else UNTIMED
        yield (
            f"{key} {known} for {what[0]}{at(study, goal)} as the model as trained for "
            f"{what[1]}{study.called(study.length)} here, and {megabytes}"
            f"{base.peak_memory_bytes / 1e6:.0f} MB."
        )


def _certainty(study: Study) -> Iterator[str]:
    """Certainty of the first sentence."""
    key = best(study, tuned=study.tuned)
    readings = {each.key: reading for each, reading in study.ranked(tuned=study.tuned)}
    if key is None:
        return
    metric = study.deciding
    chosen = readings.pop(key)
    if SCALED not in baselines(study):
        readings.pop(SCALED, None)
    gaps = {name: gap(reading, chosen, lower=metric.lower) for name, reading in readings.items()}
    known = {name: found for name, found in gaps.items() if found is not None}
    same = [name for name, found in known.items() if not found.sure]
    better = [name for name, found in known.items() if found.sure and found.mean < 0]
    worse = [(name, found) for name, found in known.items() if found.sure and found.mean > 0]
    told = []
    if same:
        told.append(
            f"{listed(same)} cannot be told from it by {'their' if len(same) > 1 else 'its'} "
            f"{metric.name}"
        )
    if worse:
        name, found = min(worse, key=lambda pair: pair[1].mean)
        rank = "the next"
        if better:
            rank += " that loses more" if metric.lower else " below it"
        told.append(f"{name}, {rank}, {metric.difference(found)}")
    if better:
        told.append(
            f"{listed(better)} {'have' if len(better) > 1 else 'has'} "
            f"{'less' if metric.lower else 'a higher'} {metric.name}"
        )
    if told:
        yield (
            f"How sure: {'; '.join(told)} ({len(chosen.windows)} {study.sample}, 95% intervals)."
        )
    one = "one trained model and one seed"
    if has_needles(study):
        asked = study.asked * len(study.depths)
        half = 1.96 * math.sqrt(0.25 / asked)
        yield (
            f"Shares of needles are of {asked} and sure to {half:.0%} at worst. All this is {one}: "
            "where methods are close, another may order them otherwise."
        )
    else:
        yield (f"All this is {one}: where methods are close, another may order them otherwise.")


def _noted(study: Study) -> Iterator[str]:
    """Advice of the written method on its options."""
    chosen = study.of(study.chosen or "")
    if chosen is not None:
        yield from (f"{chosen.key}: {sentence}" for sentence in chosen.advice)
    ahead = study.of("segments")
    best, other = (each and each.reading(study.tuned) for each in (chosen, ahead))
    found = gap(best, other, lower=study.deciding.lower) if best and other else None
    if found is not None and found.sure and found.mean > 0:
        yield (
            f"segments does better and needs no other checkpoint: posenc.extension.segments(model, "
            f"length={study.length}, …) reads with the model as it is."
        )


def _ranking(study: Study, *, tuned: bool) -> Iterator[str]:
    ranked = study.ranked(tuned=tuned)
    metric = study.deciding
    if SCALED not in baselines(study):
        ranked = [pair for pair in ranked if pair[0].key != SCALED]
    if len(ranked) < 2:
        return

    def told(pairs: Sequence[tuple[Findings, Reading]]) -> str:
        return ", ".join(f"{e.key} {metric.shown(r.of(metric)[study.goal])}" for e, r in pairs)

    best, rest = ("Least", "most") if metric.lower else ("Highest", "lowest")
    sentence = f"{best} {metric.name} at {at(study, study.goal)}: {told(ranked[:4])}"
    if len(ranked) > 4:
        sentence += f"; {rest}: {told(ranked[-1:])}"
    yield f"{sentence} {metric.axis}." if metric.lower else f"{sentence}."


def _baseline(study: Study) -> Iterator[str]:
    """Methods that are surely better than the baselines."""
    metric = study.deciding
    for key in (CUT, SCALED):
        base = study.of(key)
        if key not in baselines(study) or base is None or base.untuned is None:
            continue
        better = []
        for each, reading in study.ranked():
            found = gap(base.untuned, reading, lower=metric.lower)
            if found is not None and found.sure and found.mean > 0:
                better.append(each.key)
        yield (
            f"{baselines(study)[key].capitalize()}, as the model was trained, "
            f"{metric.told(base.untuned.of(metric)[study.goal])}. "
            f"{listed(better) if better else 'No method'} {'do' if len(better) > 1 else 'does'} "
            "surely better."
        )


def _short(study: Study) -> Iterator[str]:
    """Deterioration at the trained length."""
    original = study.of("direct" if study.causal else CUT)
    if original is None or original.untuned is None:
        return
    metric = study.deciding
    for tuned in (False, True) if study.tuned else (False,):
        base = original.reading(tuned) or original.untuned
        before = base.of(metric)[study.length]
        now = {
            each.key: reading.of(metric)[study.length]
            for each, reading in study.ranked(tuned=tuned)
            if each.role == "method"
        }
        if metric.lower:
            verb, much = "rises", f"{SAME:.0%}"
            worse = {key: value / before - 1 for key, value in now.items()}
            shown = {key: f"{by:+.1%}" for key, by in worse.items()}
        else:
            verb, much = "falls", f"{100 * SAME:.0f} points"
            worse = {key: before - value for key, value in now.items()}
            shown = {key: f"{-100 * by:+.0f}" for key, by in worse.items()}
        if not worse:
            continue
        when = " after fine-tuning" if tuned else ""
        told = ", ".join(f"{key} {shown[key]}" for key, by in worse.items() if by > SAME)
        if told:
            yield (
                f"At the trained length{when} the {metric.name} {verb} by more than {much} with "
                f"{told}."
            )
        else:
            yield (
                f"At the trained length{when} no method's {metric.name} {verb} by more than {much}."
            )
