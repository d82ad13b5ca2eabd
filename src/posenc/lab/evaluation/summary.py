"""The outcome of a study: headline, verdicts, reasons and remedies."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping

from posenc.lab.evaluation.candidates import CUT
from posenc.lab.evaluation.choosing import (
    best,
    gaps,
    has_needles,
    judged,
    missing_gain,
    readings_of,
    short_cost,
    verdicts,
    worse_by,
)
from posenc.lab.evaluation.results import Study
from posenc.lab.reporting.judge import BREAKS, TIE
from posenc.lab.reporting.numbers import counted, listed, sentence
from posenc.lab.reporting.opening import (
    Opening,
    Remedy,
    Verdict,
    Verdicts,
    at_times,
    defined,
    fitting,
    length_words,
    meanings,
    of_one,
    shortened,
)

NAME = 32
"""Characters of a name in a headline, at most."""


def opening(study: Study) -> Opening:
    """The headline, verdicts on loss and recall, and ways to settle what is open."""
    rows = verdicts(study)
    alone = study.findings[0].key if study.factor == 1.0 else ""
    rows.sort(key=lambda row: row[0].key != alone)
    definitions = length_words(f"as trained at {study.called(study.base_length)}")
    definitions["unlearned"] = (
        f"the model as trained finds hardly more needles than a guess ({study.chance:.1%})"
    )
    if study.gate and study.trivial is not None:
        trivial = study.deciding.shown(study.trivial)
        definitions["unlearned"] = f"no model beats {study.trivial_rule} alone ({trivial})"
    return Opening(
        headline=headline(study),
        verdicts=Verdicts(
            title=f"Verdicts at {study.at(study.goal)}{when(study, tuned=study.tuned)}",
            columns=(study.deciding.noun, *(["recall"] if study.causal else [])),
            rows=tuple(
                Verdict(
                    name=method.key,
                    words=words,
                    reference=method.key != alone if alone else method.role != "method",
                )
                for method, words in rows
            ),
            guide=defined(definitions, "holds", "breaks"),
            meanings=meanings((word for _, words in rows for word in words), definitions),
        ),
        remedies=() if study.gate else tuple(_remedies(study)),
    )


def when(study: Study, *, tuned: bool) -> str:
    """The end of a title, where something was fine-tuned."""
    return (" after fine-tuning" if tuned else " without training") if study.tuned else ""


def headline(study: Study) -> str:
    """The recommended method, or what became of a model measured as it is, in a line."""
    at = at_times(study.goal, study.length, size=study.unit == "pixel")
    if study.gate:
        name = shortened(study.checkpoint, NAME)
        return f"Nothing can be said of {name}: it is no better than {study.trivial_rule}"
    if study.factor == 1.0:
        return _alone(study, at)
    tuned = study.tuned
    key, steps = best(study, tuned=tuned), study.finetune["steps"] if tuned else 0
    if key is None:
        return "Nothing that a checkpoint can hold was measured"
    if missing_gain(study, key, tuned=tuned):
        alone = sum(method.writable for method in study.findings) == 1
        facts = {"key": shortened(key, NAME), "alone": alone}
        return fitting(sentence("do_not_stretch", at=place, **facts) for place in (at, ""))
    readings = study.readings(tuned=tuned)
    metric, goal = study.deciding, study.goal
    figures = f"{metric.noun} {metric.shown(readings[key].of(metric)[goal])}"
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
        claimed = f"not the {effective.claimed} that are stated"
        return f"{name} reads {effective.length} {study.unit}s, {claimed}"
    (_, reading), first = study.alone, study.base_length
    metrics = {study.deciding.noun: study.deciding}
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


def answer(study: Study) -> list[str]:
    """Reasons for what was chosen, or why nothing was; how far a model reads as it is."""
    gate = [study.gate] if study.gate else []
    if study.factor == 1.0:
        return gate or [*_read(study)]
    chosen = study.of(study.chosen or "")
    if chosen is None:
        return gate or [study.reason]
    written = f"Written: {chosen.key}. {study.reason}".strip()
    return [
        *gate,
        written,
        *_on_short(study, chosen.key),
        *(f"{chosen.key}: {t}" for t in chosen.advice),
    ]


def _read(study: Study) -> Iterator[str]:
    """Effective length of a model measured as it is, and what was not measured."""
    effective, (_, reading) = study.effective, study.alone
    if effective is not None:
        abilities = [name for name in effective.abilities if name not in reading.tasks]
        tasks = len(effective.abilities) - len(abilities)
        abilities += [f"answers in {counted(tasks, 'task')}"] if tasks else []
        names = [name for name in effective.unlearned if name not in study.left_out]
        facts = {"study": study, "e": effective, "abilities": abilities, "names": names}
        yield sentence("effective", **facts, breaks=BREAKS)
    for reason in dict.fromkeys(study.left_out.values()):
        names = [name for name, why in study.left_out.items() if why == reason]
        lengths = f"{listed(names)} {study.unit}s" if names[0].isdigit() else listed(names)
        yield f"Not measured: {lengths}; {reason}."


def _on_short(study: Study, key: str) -> Iterator[str]:
    """Cost of the chosen method on short texts, if high, and equally good ones that cost less."""
    readings = study.readings(tuned=study.tuned)
    costs = {n: short_cost(study, each, tuned=study.tuned) for n, each in readings.items()}
    cost = costs[key]
    if cost is None or cost <= TIE:
        return
    level = {name for name, deficit in gaps(study, key).items() if not deficit.sure}
    cheaper = [
        f"{method.key} {worse_by(study, other)}"
        for method in study.findings
        if method.writable and method.key in level
        if (other := costs.get(method.key)) is not None and other < cost - TIE
    ]
    text = f"On texts of {study.at(study.length)} the {study.deciding.noun} of {key} is "
    text += f"{worse_by(study, cost)} against the original's"
    yield f"{text}; as good on long ones: {listed(cheaper)}." if cheaper else f"{text}."


def _remedies(study: Study) -> Iterator[Remedy]:
    """Remedies that separate tied methods, or narrow the interval of recall."""
    longer = {"--minutes": str(math.ceil(study.seconds / 30))} if study.unread else {}
    key = None if study.factor == 1.0 else best(study, tuned=study.tuned)
    same = [name for name, deficit in gaps(study, key).items() if not deficit.sure] if key else []
    if key is not None and same:
        pieces = len(readings_of(study, tuned=study.tuned)[key].windows)
        noun = f"{study.deciding.noun} on {pieces} {study.sample}"
        clause = sentence("open", reason="level", labels=same, of=key, noun=noun)
        way, data = "other_text", {"--text": "ANOTHER.txt"}
        if study.unit == "pixel":
            way, data = "other_images", {"--images": "OTHERS"}
        yield _remedy(study, clause, ("more_minutes", longer) if longer else (way, data))
    unsure = [method.key for method, words in verdicts(study) if words[1:] == ("unsure",)]
    if unsure:
        needles = f"{counted(study.asked, 'needle')} a depth"
        clause = sentence("open", reason="needles", labels=unsure, of=needles)
        other = "other_needles", {"--seed": str(study.seed + 1)}
        yield _remedy(study, clause, ("more_minutes", longer) if longer else other)


def _remedy(study: Study, clause: str, way: tuple[str, Mapping[str, str]]) -> Remedy:
    """A way to settle a clause, with the options that it changes."""
    text = sentence("settled", way=way[0], clauses=[clause])
    return Remedy(text=text, command=_again(study.command, way[1]))


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
