"""Findings of a study in sentences, from ``templates/sentences.jinja``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from posenc.evaluation.candidates import CUT, SCALED, WINDOW
from posenc.evaluation.choosing import (
    QUANTILE,
    TIE,
    baselines,
    best,
    gap,
    has_needles,
    ranked,
    say,
    shortfall,
)
from posenc.evaluation.results import Study, StudyReading

SAME = 0.02
"""Largest deterioration at short contexts that is not reported (of losses, relative)."""

SLOWER = 1.5
"""A method that takes so many times as long is reported as slow."""

EXPECTED: tuple[tuple[str, ...], ...] = (
    ("direct",),
    ("interpolate",),
    ("ntk",),
    ("yarn", "yarn@alpha=0.5@beta=4"),
    ("rerope", "self_extend"),
)
"""From worst to best at twice the trained length, before any training."""


def setting(study: Study) -> str:
    """Model, data and lengths of the study."""
    return say("setting", study=study, lengths=", ".join(map(study.called, study.lengths)))


def headline(study: Study) -> list[str]:
    """The recommended method and its certainty; the figures of a model measured as it is."""
    if study.gate:
        return [study.gate]
    if study.factor == 1.0:
        (method,) = study.findings
        facts = {"study": study, "key": method.key, "reading": method.untuned}
        shown = [metric for metric in study.metrics if not metric.brief]
        return [say("figures", **facts, metric=metric) for metric in shown]
    sentences = [*_advised(study, tuned=study.tuned), *_certainty(study)]
    return sentences or ["Nothing that a checkpoint can hold was measured: see below."]


def findings(study: Study) -> list[tuple[str, list[str]]]:
    """Further findings: titles, and the sentences under each."""
    if study.factor == 1.0:
        return []
    if study.gate:
        return [("The checkpoint", _written(study))]
    groups: list[tuple[str, list[str]]] = []
    for tuned in _whens(study):
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
        return [f"Written: {study.chosen}. {study.reason}", *_noted(study, study.chosen)]
    return [
        "No checkpoint was written." if study.gate else f"No checkpoint was written. {study.reason}"
    ]


def _whens(study: Study) -> tuple[bool, ...]:
    return (False, True) if study.tuned else (False,)


def _readings(study: Study, *, tuned: bool = False) -> dict[str, StudyReading]:
    return {method.key: reading for method, reading in ranked(study, tuned=tuned)}


def _advised(study: Study, *, tuned: bool) -> Iterator[str]:
    """The recommended method beside the baselines, and its cost."""
    key, readings = best(study, tuned=tuned), _readings(study, tuned=tuned)
    if key is None:
        return
    steps = study.finetune["steps"] if tuned else 0
    when = f"After {steps} steps of fine-tuning" if tuned else "Without any training"
    missing = shortfall(study, key, tuned=tuned)
    if missing:
        yield f"{when}, do not stretch: {missing}."
        return
    names = baselines(study).items()
    yield say(
        "advised",
        study=study,
        when=when,
        key=key,
        reading=readings[key],
        others=[(words, readings[name]) for name, words in names if name in readings],
        needles=next((m for m in study.metrics if m.key == "needles" and has_needles(study)), None),
    )
    every = {method.key: reading for method, reading in study.ranked(tuned=tuned)}
    yield from _cost(study, key, every)


def _cost(study: Study, key: str, readings: dict[str, StudyReading]) -> Iterator[str]:
    """Cost of a method, if high; compared with shorter texts, always."""
    chosen, plain = readings[key], readings.get("direct")
    facts = {"study": study, "key": key, "chosen": chosen}
    if plain is not None:
        slower = plain.per_second / chosen.per_second
        timed = chosen.timed and plain.timed
        if not timed or slower >= SLOWER:
            yield say("cost", **facts, base=plain, times=slower if timed else None)
    base = readings.get(CUT) or readings.get(SCALED)
    if base is not None:
        longer = 1.0 if study.unit == "pixel" else study.goal / study.length
        times = longer * base.per_second / chosen.per_second
        timed = chosen.timed and base.timed
        yield say("cost_of_length", **facts, base=base, times=times if timed else None)


def _certainty(study: Study) -> Iterator[str]:
    """Certainty of the recommendation."""
    key, readings = best(study, tuned=study.tuned), _readings(study, tuned=study.tuned)
    if key is None:
        return
    metric, chosen = study.deciding, readings.pop(key)
    gaps = {name: gap(reading, chosen, lower=metric.lower) for name, reading in readings.items()}
    known = {name: deficit for name, deficit in gaps.items() if deficit is not None}
    worse = {name: d for name, d in known.items() if d.sure and d.mean > 0}
    if known:
        yield say(
            "certainty",
            study=study,
            same=[name for name, deficit in known.items() if not deficit.sure],
            better=[name for name, d in known.items() if d.sure and d.mean < 0],
            worse=min(worse.items(), key=lambda pair: pair[1].mean) if worse else None,
            pieces=len(chosen.windows),
        )
    asked = study.asked * len(study.depths) if has_needles(study) else 0
    half = QUANTILE * math.sqrt(0.25 / asked) if asked else None
    yield say("chance", asked=asked, half=half)


def _noted(study: Study, key: str) -> Iterator[str]:
    """Advice on the written method, and on ``segments`` if that is better."""
    chosen, segments = study.of(key), study.of("segments")
    if chosen is not None:
        yield from (f"{chosen.key}: {sentence}" for sentence in chosen.advice)
    mine, other = (method and method.reading(study.tuned) for method in (chosen, segments))
    deficit = gap(mine, other, lower=study.deciding.lower) if mine and other else None
    if deficit is not None and deficit.sure and deficit.mean > 0:
        yield say("segments", study=study)


def _ranking(study: Study, *, tuned: bool) -> Iterator[str]:
    order = [(method.key, reading) for method, reading in ranked(study, tuned=tuned)]
    if len(order) > 1:
        yield say("ranking", study=study, ranked=order)


def _baseline(study: Study) -> Iterator[str]:
    """Methods that are significantly better than the baselines."""
    metric, readings = study.deciding, _readings(study)
    for key in (CUT, SCALED):
        base = readings.get(key)
        if base is None:
            continue
        gaps = {n: gap(base, reading, lower=metric.lower) for n, reading in readings.items()}
        better = [name for name, deficit in gaps.items() if deficit and deficit.sure]
        better = [name for name in better if gaps[name].mean > 0]  # type: ignore[union-attr]
        yield say("baseline", study=study, words=baselines(study)[key], base=base, better=better)


def _short(study: Study) -> Iterator[str]:
    """Deterioration at the trained length."""
    original = study.of("direct" if study.causal else CUT)
    if original is None or original.untuned is None:
        return
    metric = study.deciding
    for tuned in _whens(study):
        before = (original.reading(tuned) or original.untuned).of(metric)[study.length]
        worse = {}
        for method, reading in study.ranked(tuned=tuned):
            now = reading.of(metric)[study.length]
            if method.role == "method":
                worse[method.key] = now / before - 1 if metric.lower else before - now
        if worse:
            much = {key: by for key, by in worse.items() if by > SAME}
            yield say("short", metric=metric, tuned=tuned, limit=SAME, worse=much)


def expectation(study: Study) -> list[str]:
    """The order that is expected before training, and how the measured one differs."""
    measured = _readings(study)
    steps = [(group, [key for key in group if key in measured]) for group in EXPECTED]
    known = [keys for _, keys in steps if keys]
    at = study.length * 2
    if len(known) < 3 or at not in study.lengths:
        return []

    def loss(keys: list[str]) -> float:
        return min(measured[key].loss[at] for key in keys)

    order = ", then ".join(" and ".join(keys) for keys in known)
    sentences = [f"Expected at twice the length before any training, from worst to best: {order}."]
    pairs = [(worse, better, loss(worse), loss(better)) for worse, better in pairwise(known)]
    tied = [pair for pair in pairs if abs(pair[3] - pair[2]) <= pair[2] * TIE]
    wrong = [pair for pair in pairs if pair[3] > pair[2] * (1 + TIE)]
    if not wrong and not tied:
        sentences.append(f"So it is here, at {at} {study.unit}s.")
    sentences += [say("tied", worse=pair[0], better=pair[1], limit=TIE) for pair in tied]
    for worse, better, *losses in wrong:
        sentences.append(say("wrong", worse=worse, better=better, losses=losses))
        advised = [method for key in better if (method := study.of(key)) and method.advice]
        sentences += [f"{method.key}: {' '.join(method.advice)}" for method in advised]
    return sentences


def _window_beaten(study: Study, *, tuned: bool) -> Iterator[str]:
    """Methods with less loss than a plain sliding window."""
    losses = {key: r.loss[study.goal] for key, r in _readings(study, tuned=tuned).items()}
    if WINDOW in losses:
        limit = losses[WINDOW]
        beaten = [key for key, loss in losses.items() if loss < limit * (1 - TIE)]
        yield say("window_beaten", study=study, limit=limit, beaten=beaten, margin=TIE)


def _needles(study: Study, *, tuned: bool) -> Iterator[str]:
    """Methods that find most needles, and whether that is informative."""
    original = study.of("direct")
    if original is None or original.untuned is None:
        return
    facts = {"study": study, "base": original.untuned.found(study.length)}
    if not has_needles(study):
        if not tuned:
            yield say("needles_unlearned", **facts)
        return
    shares = {key: r.found(study.goal) for key, r in _readings(study, tuned=tuned).items()}
    window = shares.pop(WINDOW, None)
    most = sorted(shares.items(), key=lambda pair: -pair[1])[:4]
    yield say("needles", **facts, most=most, window=window)


def _copying(study: Study) -> Iterator[str]:
    """Effect of extension on near distances."""
    original = study.of("direct")
    if original is None or original.untuned is None:
        return
    base, at = original.untuned.copied[study.length], study.length
    if base < 3 * study.copy_chance:
        yield say("copying_unlearned", study=study, base=base)
        return
    copied = [(m.key, r.copied[at]) for m, r in study.ranked() if m.role == "method"]
    if copied:
        yield say("copying", base=base, worst=sorted(copied, key=lambda pair: pair[1])[:3])
