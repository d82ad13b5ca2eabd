"""Choice of a method among those measured, and the verdicts, headline and remedies of a study."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping

from posenc.errors import CheckpointError
from posenc.lab.evaluation.candidates import CUT, SCALED, WINDOW
from posenc.lab.evaluation.results import Findings, Study, StudyReading
from posenc.lab.reporting.numbers import (
    Estimate,
    confidence_after,
    confidence_at,
    estimate,
    listed,
    sentence,
)
from posenc.lab.reporting.opening import (
    BREAKS,
    HOLDS,
    Opening,
    Remedy,
    Verdict,
    Verdicts,
    Word,
    at_times,
    deterioration,
    fitting,
    meanings,
    of_one,
    shortened,
    word,
)

CLOSE = 0.05
"""Deficit in needles, as a share, that does not count, however sure it is."""

TIE = 0.01
"""Largest relative difference of losses that are called level, however significant it is."""

LEARNED = 3.0
"""Needles count if the original finds so many times more than a guess."""

QUANTILE = 1.96
"""Quantile of the normal distribution, for 95 % intervals of shares of needles."""


def choose(study: Study, *, tuned: bool, always: bool = False) -> tuple[str | None, str]:
    """The method to write (None: none) and the reason.

    One of several methods is chosen only if it gains over every baseline; a single method always,
    unless the model has learned nothing.

    Args:
        study: the measurements.
        tuned: use those after fine-tuning.
        always: choose the best method even if it gains nothing, or nothing was learned.
    """
    key = best(study, tuned=tuned)
    if key is None:
        return None, "No method that a checkpoint can hold was measured."
    if study.gate and not always:
        return None, study.gate
    missing = missing_gain(study, key, tuned=tuned)
    alone = sum(method.writable for method in study.findings) == 1
    if missing and not always and not alone:
        return None, sentence("no_gain", missing=missing)
    keys = [method.key for method, _ in ranked(study, tuned=tuned)]
    ahead = keys[: keys.index(key)]
    why = "It was the one asked for."
    if not alone:
        why = sentence("why", study=study, needles=has_needles(study), margin=CLOSE, ahead=ahead)
    return key, f"{why} It gains nothing: {missing}." if missing else why


def gate(study: Study) -> str:
    """Reason why nothing is concluded of a model that has learned nothing; "" if it has.

    It has if it beats the trivial predictor at any length, as it is, extended or fine-tuned.
    """
    reached = _reached(study)
    if study.trivial is None or reached is None:
        return ""
    sign = 1 if study.deciding.lower else -1
    return (
        sentence("gate", study=study, reached=reached)
        if sign * (reached - study.trivial) >= 0
        else ""
    )


def require_learned(study: Study) -> None:
    """Refuse a study that is stopped by its gate.

    Raises:
        CheckpointError: naming the trivial predictor and the best value.
    """
    if study.gate:
        metric, reached = study.deciding, _reached(study)
        assert study.trivial is not None  # else there is no gate
        assert reached is not None
        raise CheckpointError(
            study.checkpoint,
            expected=f"a better {metric.name} than {metric.shown(study.trivial)} "
            f"({study.trivial_rule} alone)",
            got=f"{metric.shown(reached)} at best",
            remedy="Is it trained, are config.json and tokenizer its own, and are the lengths "
            "those it was trained for?",
        )


def _reached(study: Study) -> float | None:
    """The best value of the deciding metric, of all models and lengths."""
    values = [
        value
        for method in study.findings
        for reading in (method.untuned, method.tuned)
        if reading is not None
        for value in reading.of(study.deciding).values()
    ]
    return (min if study.deciding.lower else max)(values, default=None)


def best(study: Study, *, tuned: bool) -> str | None:
    """The best method that a checkpoint can hold, if any.

    That of least loss (the best in the deciding metric) among those that do not surely find fewer
    needles than the one that finds most.
    """
    writable = [pair for pair in study.ranked(tuned=tuned) if pair[0].writable]
    if not writable:
        return None
    if not has_needles(study):
        return writable[0][0].key
    _, finder = max(writable, key=lambda pair: pair[1].found(study.goal))
    enough = finder.found(study.goal) - CLOSE
    return next(
        method.key
        for method, reading in writable
        if reading.found(study.goal) >= enough or _more(study, finder, reading) == 0
    )


def baselines(study: Study) -> dict[str, str]:
    """Keys of the baselines, with their names in a sentence."""
    names = {
        "direct": "not stretched",
        WINDOW: "a plain sliding window",
        CUT: f"cut at {study.length}",
    }
    if study.deciding.key == "right":  # other metrics compare with it
        names[SCALED] = f"scaled to {study.called(study.length)}"
    return names


def ranked(study: Study, *, tuned: bool) -> list[tuple[Findings, StudyReading]]:
    """``Study.ranked`` without the scaled original if the metric compares with it."""
    hidden = {SCALED} - baselines(study).keys()
    return [pair for pair in study.ranked(tuned=tuned) if pair[0].key not in hidden]


def missing_gain(study: Study, key: str, *, tuned: bool) -> str:
    """Reason why a method gains nothing over a baseline, as a clause; "" if it gains over all.

    It gains if it is significantly better in the deciding metric (in losses by more than ``TIE``)
    and finds no significantly fewer needles, or finds significantly more of them (if these count)
    at no more loss; over a sliding window, whose loss few undercut, also by needles alone.
    """
    readings = study.readings(tuned=tuned)
    chosen, metric = readings[key], study.deciding
    level, close, worse = "cannot be told from", f"is within {TIE:.0%} of", "is worse than"
    relations: dict[str, list[str]] = {level: [], close: [], worse: []}
    for name, words in baselines(study).items():
        base = readings.get(name)
        if base is None:
            continue
        difference = gap(base, chosen, lower=metric.lower)
        stands = 0 if difference is None or not difference.sure else _sign(difference.mean)
        value = base.of(metric)[study.goal]
        near = abs(value - chosen.of(metric)[study.goal]) <= TIE * value
        tied = stands > 0 and metric.lower and near
        stands = 0 if tied else stands
        more = _more(study, chosen, base) if has_needles(study) else 0
        if (stands > 0 and more >= 0) or (more > 0 and (stands == 0 or name == WINDOW)):
            continue
        relation = worse if stands < 0 or more < 0 else close if tied else level
        relations[relation].append(f"{words} ({metric.shown(value)})")
    clauses = [f"{relation} {listed(names)}" for relation, names in relations.items() if names]
    if not clauses:
        return ""
    holds = HOLDS if judged(study, chosen) == "holds" else None
    facts = {"key": key, "reading": chosen, "clauses": clauses, "holds": holds}
    return sentence("missing_gain", study=study, needles=has_needles(study), **facts)


def as_trained(study: Study) -> StudyReading:
    """Reference readings: the original's, or without it those of the best."""
    original = study.of("direct") or study.of(CUT)
    reading = original.untuned if original else None
    return reading or study.ranked()[0][1]


def judged(study: Study, reading: StudyReading) -> Word:
    """The verdict on the deciding metric, held to the original's at the trained length."""
    metric = study.deciding
    base = as_trained(study).of(metric)[study.base_length]
    change = deterioration(reading.of(metric)[study.goal], base, lower=metric.lower)
    return word(Estimate(change, None, 1))


def short_cost(study: Study, reading: StudyReading, *, tuned: bool) -> float | None:
    """By how much a model is worse than the original at the trained length.

    Returns:
        The change of a loss as a share of it, or of a share; None where that is not measured, as of
        images, whose table is unchanged there.
    """
    original = study.of("direct" if study.causal else CUT)
    if study.factor == 1.0 or study.unit == "pixel" or original is None:
        return None
    metric, base = study.deciding, original.reading(tuned) or original.untuned
    if base is None or study.length not in study.lengths:
        return None
    before, now = base.of(metric)[study.length], reading.of(metric)[study.length]
    return now / before - 1 if metric.lower else before - now


def worse_by(study: Study, cost: float | None) -> str:
    """``short_cost`` in tables: ``+4.0%`` of a loss, ``-3 points`` of a share."""
    if cost is None:
        return "—"
    return f"{cost:+.1%}" if study.deciding.lower else f"{-100 * cost:+.0f} points"


def has_needles(study: Study) -> bool:
    """True if the original finds needles at the trained length, so that they separate methods."""
    original = study.of("direct") if study.causal else None
    if original is None or original.untuned is None:
        return False
    needles = original.untuned.found(study.base_length)
    return needles > 0 and needles >= LEARNED * study.chance


def gap(
    one: StudyReading, other: StudyReading, *, lower: bool = True, confidence: float | None = None
) -> Estimate | None:
    """Deficit of ``one`` to ``other`` at the goal, paired over pieces of text, documents or images.

    The interval is over such pieces, not over models.

    Args:
        one, other: measurements on the same pieces.
        lower: lower values are better.
        confidence: of the interval; by default 95 % in all, looks included.
    """
    pairs = zip(one.windows, other.windows, strict=False)  # what was settled has read fewer
    confidence = confidence or confidence_after(max(one.looks, other.looks))
    differences = (a - b if lower else b - a for a, b in pairs)
    return estimate(differences, confidence=confidence)


def unsettled(study: Study, *, tuned: bool, look: int) -> set[str]:
    """The models that further measurements may tell from the best one, and the best one itself.

    A model is settled if its value of the deciding metric is surely another, or surely level (see
    ``TIE``), and it does not find more needles.

    Args:
        study: the measurements so far.
        tuned: use those after fine-tuning.
        look: number of this question, from 1 on; see ``confidence_at``.

    Returns:
        No keys where all are settled.
    """
    readings, key = study.readings(tuned=tuned), best(study, tuned=tuned)
    if key is None or study.gate:
        return set(readings)
    chosen, metric = readings.pop(key), study.deciding
    level = TIE * abs(chosen.of(metric)[study.goal])

    def is_open(reading: StudyReading) -> bool:
        deficit = gap(reading, chosen, lower=metric.lower, confidence=confidence_at(look))
        if deficit is None or (has_needles(study) and _more(study, reading, chosen) > 0):
            return True
        return not deficit.sure and not (-level < deficit.low and deficit.high < level)

    unsure = {name for name, reading in readings.items() if is_open(reading)}
    return unsure | {key} if unsure else set()


def readings_of(study: Study, *, tuned: bool = False) -> dict[str, StudyReading]:
    """Readings by method, as ``ranked``."""
    return {method.key: reading for method, reading in ranked(study, tuned=tuned)}


def gaps(study: Study, key: str) -> dict[str, Estimate]:
    """Deficits of the other models to one, where they are known."""
    readings = readings_of(study, tuned=study.tuned)
    lower, chosen = study.deciding.lower, readings.pop(key)
    gap_by_name = {name: gap(reading, chosen, lower=lower) for name, reading in readings.items()}
    return {name: deficit for name, deficit in gap_by_name.items() if deficit is not None}


def _more(study: Study, one: StudyReading, other: StudyReading) -> int:
    """1 (-1) if ``one`` finds significantly more (fewer) needles than ``other``, else 0.

    By the normal interval of the difference of two shares, each with one more found and one more
    missed, so that shares of 0 and 1 have one too.
    """
    asked = study.asked * len(study.depths)
    shares = [(asked * reading.found(study.goal) + 1) / (asked + 2) for reading in (one, other)]
    error = math.sqrt(sum(share * (1 - share) / (asked + 2) for share in shares))
    difference = shares[0] - shares[1]
    return _sign(difference) if abs(difference) > QUANTILE * error else 0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


NAME = 32
"""Characters of a name in a headline, at most."""


def headline(study: Study) -> str:
    """The recommended method, or what became of a model measured as it is, in a line."""
    at = at_times(study.goal, study.length, size=study.unit == "pixel")
    if study.gate:
        return sentence(
            "not_trained", name=shortened(study.checkpoint, NAME), rule=study.trivial_rule
        )
    if study.factor == 1.0:
        return _alone(study, at)
    tuned = study.tuned
    key, steps = best(study, tuned=tuned), study.finetune["steps"] if tuned else 0
    if key is None:
        return sentence("nothing_writable")
    if missing_gain(study, key, tuned=tuned):
        alone = sum(method.writable for method in study.findings) == 1
        facts = {"key": shortened(key, NAME), "alone": alone}
        return fitting(sentence("do_not_stretch", at=place, **facts) for place in (at, ""))
    readings = study.readings(tuned=tuned)
    metric, goal = study.deciding, study.goal
    figures = f"{metric.name} {metric.shown(readings[key].of(metric)[goal])}"
    for name, words in (("direct", "not stretched"), (CUT, "cut")):
        if name in readings:
            figures += f", {words} {metric.shown(readings[name].of(metric)[goal])}"
            break
    last = judged(study, readings[key])
    facts = {"key": shortened(key, NAME), "at": at, "steps": steps}
    forms = ((last, figures), (last, ""), ("", ""))
    texts = (sentence("use", verdict=verdict, figures=shown, **facts) for verdict, shown in forms)
    return fitting(texts)


def _alone(study: Study, at: str) -> str:
    """The verdict on a model measured as it is, with its values if they fit."""
    name, effective = shortened(study.checkpoint, NAME), study.effective
    if effective is not None and not effective.honest:
        return sentence("overstated", name=name, study=study)
    (_, reading), first = study.alone, study.base_length
    metrics = {study.deciding.name: study.deciding}
    if has_needles(study):
        metrics["recall"] = next(metric for metric in study.metrics if metric.key == "needles")
    changes = [
        (noun, *(metric.shown(reading.of(metric)[length]) for length in (first, study.goal)))
        for noun, metric in metrics.items()
    ]
    verdict = judged(study, reading) if study.goal > first else "learned"
    if effective is not None:
        figures = [changes[:1], []] if study.goal > effective.length else [[]]
        return fitting(sentence("reads", name=name, study=study, changes=c) for c in figures)
    return of_one(name, verdict, at, changes)


def opening(study: Study) -> Opening:
    """The headline, verdicts on loss and recall, and ways to settle what is open."""
    rows = verdicts(study)
    alone = study.findings[0].key if study.factor == 1.0 else ""
    rows.sort(key=lambda row: row[0].key != alone)
    than = f"the model as trained is at {study.called(study.base_length)}"
    facts = {"holds": HOLDS, "breaks": BREAKS, "than": than}

    def meaning(word: str) -> str:
        if word == "unlearned":
            return sentence("means_unlearned_here", study=study)
        return sentence(f"means_{word}", **facts)

    return Opening(
        headline=headline(study),
        verdicts=Verdicts(
            title=f"Verdicts at {study.at(study.goal)}{when(study, tuned=study.tuned)}",
            columns=(study.deciding.name, *(["recall"] if study.causal else [])),
            rows=tuple(
                Verdict(
                    name=method.key,
                    words=words,
                    reference=method.key != alone if alone else method.role != "method",
                )
                for method, words in rows
            ),
            guide=sentence("length_words", **facts),
            meanings=meanings((word for _, words in rows for word in words), meaning),
        ),
        remedies=remedies(study),
    )


def when(study: Study, *, tuned: bool) -> str:
    """The end of a title, where something was fine-tuned."""
    return (" after fine-tuning" if tuned else " without training") if study.tuned else ""


def verdicts(study: Study) -> list[tuple[Findings, tuple[str, ...]]]:
    """A word on loss and one on recall of each model, best first.

    Values at the requested length are held to those of the original at the trained one. Recall has
    the interval of a share; it is ``unlearned`` where the original does not find needles, and all
    is where the gate stops the study.
    """
    needles = as_trained(study).found(study.base_length) if study.causal else 0.0
    rows: list[tuple[Findings, tuple[str, ...]]] = []
    for method, reading in study.ranked(tuned=study.tuned):
        words: list[str] = ["unlearned" if study.gate else judged(study, reading)]
        if study.causal:
            learned = has_needles(study) and not study.gate
            words.append(_recall(study, needles, reading) if learned else "unlearned")
        rows.append((method, tuple(words)))
    return rows


def _recall(study: Study, base: float, reading: StudyReading) -> str:
    """The verdict on needles found, held to the share ``base``."""
    needles, asked = reading.found(study.goal), study.asked * len(study.depths)
    half = QUANTILE * math.sqrt(needles * (1 - needles) / asked) / base
    return word(Estimate(1 - needles / base, half, asked))


def remedies(study: Study) -> tuple[Remedy, ...]:
    """Remedies that separate tied methods, or narrow the interval of recall."""
    return () if study.gate else tuple(_remedies(study))


def _remedies(study: Study) -> Iterator[Remedy]:
    longer = {"--minutes": str(math.ceil(study.seconds / 30))} if study.unread else {}
    key = None if study.factor == 1.0 else best(study, tuned=study.tuned)
    same = [name for name, deficit in gaps(study, key).items() if not deficit.sure] if key else []
    if key is not None and same:
        pieces = len(readings_of(study, tuned=study.tuned)[key].windows)
        facts = {"same": same, "key": key, "study": study, "pieces": pieces}
        data = {"--images": "OTHERS"} if study.unit == "pixel" else {"--text": "ANOTHER.txt"}
        command = _again(study.command, longer or data)
        yield Remedy(text=sentence("settled_by_other_data", **facts), command=command)
    unsure = [method.key for method, words in verdicts(study) if words[1:] == ("unsure",)]
    if unsure:
        text = sentence("settled_by_other_needles", unsure=unsure, study=study)
        again = _again(study.command, longer or {"--seed": str(study.seed + 1)})
        yield Remedy(text=text, command=again)


def _again(command: str, options: Mapping[str, str]) -> str:
    """A command line with these options, and with another folder for its report; "" for none."""
    words = shlex.split(command)
    if not words:
        return ""
    arguments, out = [], f"posenc-{words[1]}"
    following = iter(words)
    for part in following:
        name, equals, value = part.partition("=")
        if name not in ("--out", *options):
            arguments.append(part)
            continue
        value = value if equals else next(following, "")
        out = value if name == "--out" else out
    changed = [*options.items(), ("--out", f"{out}-again")]
    return shlex.join([*arguments, *(part for pair in changed for part in pair)])
