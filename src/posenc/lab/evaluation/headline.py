"""The headline of a study, a verdict a model, and ways to settle what is open."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping

from posenc.lab.evaluation.candidates import CUT
from posenc.lab.evaluation.choosing import (
    QUANTILE,
    as_trained,
    best,
    gaps,
    has_needles,
    judged,
    missing_gain,
    readings_of,
)
from posenc.lab.evaluation.results import Findings, Study, StudyReading
from posenc.lab.reporting.numbers import Estimate
from posenc.lab.reporting.opening import (
    BREAKS,
    HOLDS,
    Opening,
    Remedy,
    Verdict,
    Verdicts,
    at_times,
    fitting,
    meanings,
    of_one,
    shortened,
    word,
)
from posenc.lab.reporting.sentences import sentence

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
    key = None if study.factor == 1.0 else best(study, tuned=study.tuned)
    same = [name for name, deficit in gaps(study, key).items() if not deficit.sure] if key else []
    if key is not None and same:
        pieces = len(readings_of(study, tuned=study.tuned)[key].windows)
        facts = {"same": same, "key": key, "study": study, "pieces": pieces}
        data = {"--images": "OTHERS"} if study.unit == "pixel" else {"--text": "ANOTHER.txt"}
        command = _again(study.command, data)
        yield Remedy(text=sentence("settled_by_other_data", **facts), command=command)
    unsure = [method.key for method, words in verdicts(study) if words[1:] == ("unsure",)]
    if unsure:
        text = sentence("settled_by_other_needles", unsure=unsure, asked=study.asked)
        again = _again(study.command, {"--seed": str(study.seed + 1)})
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
