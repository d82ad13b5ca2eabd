"""Choice of a method among those measured, and verdicts on all of them.

What decides is in ``reporting/judge.py``.
"""

from __future__ import annotations

from posenc.errors import CheckpointError
from posenc.lab.evaluation.candidates import CUT, SCALED, WINDOW
from posenc.lab.evaluation.results import Findings, Study, StudyReading
from posenc.lab.reporting import judge
from posenc.lab.reporting.judge import (
    CLOSE,
    HOLDS,
    LEARNED,
    TIE,
    Metric,
    Word,
    deterioration,
    share_change,
    sign,
    word,
)
from posenc.lab.reporting.numbers import Estimate, confidence_after, confidence_at, listed, sentence


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
        return None, f"Nothing is gained by stretching: {missing}."
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
    metric, trivial, reached = study.deciding, study.trivial, _reached(study)
    if trivial is None or reached is None or metric.sign * (reached - trivial) < 0:
        return ""
    return (
        f"Nothing can be said of {study.checkpoint}: its best {metric.noun} is "
        f"{metric.shown(reached)} ({study.trivial_rule} alone: {metric.shown(trivial)}). It is not "
        "trained, or config.json, tokenizer or lengths are not its own."
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
            expected=f"a better {metric.noun} than {metric.shown(study.trivial)} "
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
    return (min if study.deciding.lower_is_better else max)(values, default=None)


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
        difference = gap(metric, base, chosen)
        stands = 0 if difference is None or not difference.sure else sign(difference.mean)
        value = base.of(metric)[study.goal]
        near = abs(value - chosen.of(metric)[study.goal]) <= TIE * value
        tied = stands > 0 and metric.lower_is_better and near
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
    change = deterioration(reading.of(metric)[study.goal], base, lower=metric.lower_is_better)
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
    return now / before - 1 if metric.lower_is_better else before - now


def worse_by(study: Study, cost: float | None) -> str:
    """``short_cost`` in tables: ``+4.0%`` of a loss, ``-3 points`` of a share."""
    if cost is None:
        return "—"
    return f"{cost:+.1%}" if study.deciding.lower_is_better else f"{-100 * cost:+.0f} points"


def has_needles(study: Study) -> bool:
    """True if the original finds needles at the trained length, so that they separate methods."""
    original = study.of("direct") if study.causal else None
    if original is None or original.untuned is None:
        return False
    needles = original.untuned.found(study.base_length)
    return needles > 0 and needles >= LEARNED * study.chance


def gap(
    metric: Metric, one: StudyReading, other: StudyReading, *, confidence: float | None = None
) -> Estimate | None:
    """Deficit of ``one`` to ``other`` at the goal, paired over pieces of text, documents or images.

    The interval is over such pieces, not over models.

    Args:
        metric: the deciding one.
        one, other: measurements on the same pieces; what was settled early has read fewer.
        confidence: of the interval; by default 95 % in all, looks included.
    """
    confidence = confidence or confidence_after(max(one.looks, other.looks))
    return judge.gap(metric, one.values, other.values, confidence=confidence)


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
        deficit = gap(metric, reading, chosen, confidence=confidence_at(look))
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
    chosen = readings.pop(key)
    gap_by_name = {n: gap(study.deciding, reading, chosen) for n, reading in readings.items()}
    return {name: deficit for name, deficit in gap_by_name.items() if deficit is not None}


def _more(study: Study, one: StudyReading, other: StudyReading) -> int:
    """1 (-1) if ``one`` finds significantly more (fewer) needles than ``other``, else 0."""
    asked = study.asked * len(study.depths)
    return judge.order_of(one.found(study.goal), other.found(study.goal), asked)


def verdicts(study: Study) -> list[tuple[Findings, tuple[str, ...]]]:
    """A word on loss and one on recall of each model, best first.

    Values at the requested length are held to those of the original at the trained one. Recall has
    the interval of a share; it is ``unlearned`` where the original does not find needles, and all
    is where the gate stops the study.
    """
    base = as_trained(study).found(study.base_length) if study.causal else 0.0
    learned, asked = has_needles(study) and not study.gate, study.asked * len(study.depths)
    rows: list[tuple[Findings, tuple[str, ...]]] = []
    for method, reading in study.ranked(tuned=study.tuned):
        words: list[str] = ["unlearned" if study.gate else judged(study, reading)]
        if study.causal:
            change = share_change(reading.found(study.goal), base, asked) if learned else None
            words.append("unlearned" if change is None else word(change))
        rows.append((method, tuple(words)))
    return rows
