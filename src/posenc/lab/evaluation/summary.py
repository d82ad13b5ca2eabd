"""The outcome of a study, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from statistics import fmean

from posenc.extension import EXTENSIONS
from posenc.lab.evaluation.candidates import CUT, SCALED, WINDOW
from posenc.lab.evaluation.choosing import (
    QUANTILE,
    TIE,
    baselines,
    best,
    gap,
    gaps,
    has_needles,
    missing_gain,
    ranked,
    readings_of,
    short_cost,
    worse_by,
)
from posenc.lab.evaluation.results import Study, StudyReading
from posenc.lab.reporting.numbers import counted, sentence
from posenc.lab.reporting.opening import BREAKS

SAME = 0.02
"""Largest deterioration at short contexts that is not reported (of losses, relative)."""

MOST_RANKED = 4
"""Methods that are named from the best on."""

SLOWER = 1.5
"""A method that takes so many times as long is reported as slow."""


def setting(study: Study) -> str:
    """Model, data and lengths of the study."""
    return sentence("setting", study=study, lengths=", ".join(map(study.called, study.lengths)))


def answer(study: Study) -> list[str]:
    """The recommended method and its certainty; the figures of a model measured as it is."""
    if study.gate:
        return [study.gate]
    if study.factor == 1.0:
        return [*_read(study)]
    sentences = [*_advised(study, tuned=study.tuned), *_certainty(study)]
    return sentences or ["Nothing that a checkpoint can hold was measured: see below."]


def _read(study: Study) -> Iterator[str]:
    """Effective length of a model measured as it is, and its figures."""
    method, reading = study.alone
    lengths: Iterable[int] = study.lengths
    if study.effective is not None:
        decisive = study.effective.reference, study.effective.length, study.effective.claimed
        lengths = sorted({study.lengths[0], study.goal, *decisive} & set(study.lengths))
        named = study.effective.abilities
        abilities = [name for name in named if name not in reading.tasks]
        tasks = len(named) - len(abilities)
        abilities += [f"answers in {counted(tasks, 'task')}"] if tasks else []
        names = [name for name in study.effective.unlearned if name not in study.left_out]
        yield sentence("effective", study=study, abilities=abilities, names=names, breaks=BREAKS)
        at = study.effective.reference
        shares = [fmean(values[at]) for values in reading.tasks.values() if at in values]
        if shares:
            share, count = fmean(shares), len(shares)
            yield sentence("answered", study=study, length=at, count=count, share=share)
    for metric in study.metrics:
        if not metric.brief:
            facts = {"study": study, "key": method.key, "reading": reading, "metric": metric}
            yield sentence("figures", **facts, lengths=lengths)
    window = study.of(WINDOW)
    if window is not None and window.untuned is not None:
        yield sentence("control", study=study, reading=reading, window=window.untuned)
    for reason in dict.fromkeys(study.left_out.values()):
        names = [name for name, why in study.left_out.items() if why == reason]
        if names[0].isdigit():
            yield sentence("not_measured", study=study, reason=reason, lengths=names)
        else:
            yield sentence("not_asked", reason=reason, names=names)


def findings(study: Study) -> list[tuple[str, list[str]]]:
    """Further findings: titles, and the sentences under each."""
    if study.factor == 1.0:
        return []
    if study.gate:
        return [("The checkpoint", _written(study))]
    groups: list[tuple[str, list[str]]] = []
    for tuned in study.whens:
        sentences = [] if tuned or not study.tuned else [*_advised(study, tuned=False)]
        sentences += _ranking(study, tuned=tuned)
        if study.causal:
            sentences += [*_window_beaten(study, tuned=tuned), *_needles(study, tuned=tuned)]
        else:
            sentences += _baseline(study)
        groups.append(("After fine-tuning" if tuned else "Without training", sentences))
    if study.unit != "pixel":  # at the trained size a table of images is unchanged
        short = [*_short(study), *(_copying(study) if study.causal else ())]
        groups.append(("In contexts no longer than before", short))
    if study.causal:
        groups.append(("Against what is expected", expectation(study)))
    groups.append(("The checkpoint", _written(study)))
    return [(title, sentences) for title, sentences in groups if sentences]


def _written(study: Study) -> list[str]:
    """The written method and the reason for it, or for none."""
    if study.chosen is not None:
        written = sentence("written", key=study.chosen, reason=study.reason)
        return [written, *_noted(study, study.chosen)]
    return [sentence("written", key=None, reason="" if study.gate else study.reason)]


def _advised(study: Study, *, tuned: bool) -> Iterator[str]:
    """The recommended method beside the baselines, and its cost."""
    key, readings = best(study, tuned=tuned), readings_of(study, tuned=tuned)
    if key is None:
        return
    steps = study.finetune["steps"] if tuned else 0
    missing = missing_gain(study, key, tuned=tuned)
    if missing:
        yield sentence("advised_none", steps=steps, missing=missing)
        return
    names = baselines(study).items()
    yield sentence(
        "advised",
        study=study,
        steps=steps,
        key=key,
        reading=readings[key],
        others=[(words, readings[name]) for name, words in names if name in readings],
        needles=next((m for m in study.metrics if m.key == "needles" and has_needles(study)), None),
    )
    every = study.readings(tuned=tuned)
    cost = short_cost(study, every[key], tuned=tuned)
    if cost is not None and cost > TIE:
        yield sentence("on_short", study=study, key=key, cost=cost, cheaper=_cheaper(study, key))
    yield from _cost(study, key, every)


def _cheaper(study: Study, key: str) -> list[tuple[str, str]]:
    """Methods level with one that are less worse on short texts, each with that."""
    tuned, readings = study.tuned, study.readings(tuned=study.tuned)
    level = {name for name, deficit in gaps(study, key).items() if not deficit.sure}
    costs = {
        method.key: cost
        for method in study.findings
        if method.writable
        and method.key in readings
        and (cost := short_cost(study, readings[method.key], tuned=tuned)) is not None
    }
    return [
        (name, worse_by(study, cost))
        for name, cost in costs.items()
        if name in level and cost < costs[key] - TIE
    ]


def _cost(study: Study, key: str, readings: dict[str, StudyReading]) -> Iterator[str]:
    """Cost of a method, if high; compared with shorter texts, always."""
    chosen, plain = readings[key], readings.get("direct")
    facts = {"study": study, "key": key, "chosen": chosen}
    if plain is not None:
        times = _times(chosen, plain)
        if times is None or times >= SLOWER:
            yield sentence("cost", **facts, base=plain, times=times, than="original")
    base = readings.get(CUT) or readings.get(SCALED)
    if base is not None:
        longer = 1.0 if study.unit == "pixel" else study.goal / study.length
        times = _times(chosen, base, longer)
        yield sentence("cost", **facts, base=base, times=times, than="shorter")


def _times(one: StudyReading, other: StudyReading, longer: float = 1.0) -> float | None:
    """Ratio of times per text ``longer`` times as long; None where times are imprecise."""
    timed = one.timed and other.timed
    return longer * other.per_second / one.per_second if timed else None


def _certainty(study: Study) -> Iterator[str]:
    """Certainty of the recommendation."""
    key, readings = best(study, tuned=study.tuned), readings_of(study, tuned=study.tuned)
    if key is None:
        return
    gap_by_name = gaps(study, key)
    worse = {name: d for name, d in gap_by_name.items() if d.sure and d.mean > 0}
    if gap_by_name:
        yield sentence(
            "sureness",
            study=study,
            same=[name for name, deficit in gap_by_name.items() if not deficit.sure],
            better=[name for name, d in gap_by_name.items() if d.sure and d.mean < 0],
            worse=min(worse.items(), key=lambda pair: pair[1].mean) if worse else None,
            pieces=len(readings[key].windows),
        )
    asked = study.asked * len(study.depths) if has_needles(study) else 0
    half = QUANTILE * math.sqrt(0.25 / asked) if asked else None
    yield sentence("chance", asked=asked, half=half)


def _noted(study: Study, key: str) -> Iterator[str]:
    """Advice on the written method, and on ``segments`` if that is better."""
    chosen, segments = study.of(key), study.of("segments")
    if chosen is not None:
        yield from (f"{chosen.key}: {sentence}" for sentence in chosen.advice)
    mine, other = (method and method.reading(study.tuned) for method in (chosen, segments))
    deficit = gap(mine, other, lower=study.deciding.lower) if mine and other else None
    if deficit is not None and deficit.sure and deficit.mean > 0:
        yield sentence("segments", study=study)


def _ranking(study: Study, *, tuned: bool) -> Iterator[str]:
    metric, goal = study.deciding, study.goal
    order = [
        (method.key, metric.shown(reading.of(metric)[goal]))
        for method, reading in ranked(study, tuned=tuned)
    ]
    if len(order) > 1:
        last = order[-1:] if len(order) > MOST_RANKED else []
        yield sentence("ranking", study=study, most=order[:MOST_RANKED], last=last)


def _baseline(study: Study) -> Iterator[str]:
    """Methods that are significantly better than the baselines."""
    metric, readings = study.deciding, readings_of(study)
    for key in (CUT, SCALED):
        base = readings.get(key)
        if base is None:
            continue
        gaps = {n: gap(base, reading, lower=metric.lower) for n, reading in readings.items()}
        better = [name for name, lead in gaps.items() if lead and lead.sure and lead.mean > 0]
        yield sentence(
            "baseline", study=study, words=baselines(study)[key], base=base, better=better
        )


def _short(study: Study) -> Iterator[str]:
    """Deterioration at the trained length."""
    metric = study.deciding
    for tuned in study.whens:
        costs = {
            method.key: cost
            for method, reading in study.ranked(tuned=tuned)
            if method.role == "method"
            and (cost := short_cost(study, reading, tuned=tuned)) is not None
        }
        if costs:
            form = "{:+.1%}" if metric.lower else "{:+.0f}"
            scale = 1 if metric.lower else -100
            much = [(key, form.format(scale * by)) for key, by in costs.items() if by > SAME]
            yield sentence("short", metric=metric, tuned=tuned, limit=SAME, worse=much)


def expectation(study: Study) -> list[str]:
    """The order that is expected before training, and how the measured one differs."""
    measured = readings_of(study)
    ranks: dict[int, list[str]] = {}
    for key in measured:
        entry = EXTENSIONS.get(key.partition("@")[0])
        if entry is not None and entry.claims.at_twice is not None:
            ranks.setdefault(entry.claims.at_twice, []).append(key)
    expectations = [ranks[rank] for rank in sorted(ranks)]
    at = study.length * 2
    if len(expectations) < 3 or at not in study.lengths:
        return []

    def loss(keys: list[str]) -> float:
        return min(measured[key].loss[at] for key in keys)

    pairs = [(worse, better, loss(worse), loss(better)) for worse, better in pairwise(expectations)]
    tied = [pair for pair in pairs if abs(pair[3] - pair[2]) <= pair[2] * TIE]
    wrong = [pair for pair in pairs if pair[3] > pair[2] * (1 + TIE)]
    sentences = [sentence("expected", ranks=expectations)]
    if not wrong and not tied:
        sentences.append(sentence("as_expected", at=study.at(at)))
    sentences += [
        sentence("no_difference", worse=pair[0], better=pair[1], limit=TIE) for pair in tied
    ]
    for worse, better, *losses in wrong:
        sentences.append(sentence("wrong", worse=worse, better=better, losses=losses))
        advised = [method for key in better if (method := study.of(key)) and method.advice]
        sentences += [f"{method.key}: {' '.join(method.advice)}" for method in advised]
    return sentences


def _window_beaten(study: Study, *, tuned: bool) -> Iterator[str]:
    """Methods with less loss than a plain sliding window."""
    losses = {key: r.loss[study.goal] for key, r in readings_of(study, tuned=tuned).items()}
    if WINDOW in losses:
        limit = losses[WINDOW]
        beaten = [key for key, loss in losses.items() if loss < limit * (1 - TIE)]
        yield sentence("window_beaten", study=study, limit=limit, beaten=beaten, margin=TIE)


def _needles(study: Study, *, tuned: bool) -> Iterator[str]:
    """Methods that find most needles, and whether that is informative."""
    original = study.of("direct")
    if original is None or original.untuned is None:
        return
    facts = {"study": study, "base": original.untuned.found(study.length)}
    if not has_needles(study):
        if not tuned:
            yield sentence("needles_unlearned", **facts)
        return
    shares = {key: r.found(study.goal) for key, r in readings_of(study, tuned=tuned).items()}
    window = shares.pop(WINDOW, None)
    most = _in_percent(sorted(shares.items(), key=lambda pair: -pair[1])[:MOST_RANKED])
    yield sentence("needles", **facts, most=most, window=window)


def _copying(study: Study) -> Iterator[str]:
    """Effect of extension on near distances."""
    original = study.of("direct")
    if original is None or original.untuned is None or not original.untuned.copied:
        return
    base, at = original.untuned.copied[study.length], study.length
    if base < 3 * study.copy_chance:
        yield sentence("copying_unlearned", study=study, base=base)
        return
    copied = [(m.key, r.copied[at]) for m, r in study.ranked() if m.role == "method"]
    if copied:
        less = [pair for pair in copied if pair[1] < base - SAME]
        worst = _in_percent(sorted(less, key=lambda pair: pair[1])[:3])
        yield sentence("copying", base=base, limit=SAME, worst=worst)


def _in_percent(shares: list[tuple[str, float]]) -> list[tuple[str, str]]:
    return [(key, f"{share:.0%}") for key, share in shares]
