"""Ways to settle what a comparison leaves undecided, with their commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from posenc.lab.declared import declared_options
from posenc.lab.experiments.results import Comparison
from posenc.lab.experiments.settings import ComparisonSettings, resume_command
from posenc.lab.experiments.tasks import TASKS
from posenc.lab.experiments.verdicts import Row, by_metric
from posenc.lab.reporting.judge import BREAKS, HOLDS, longest_change
from posenc.lab.reporting.numbers import Estimate, quantile, sentence
from posenc.lab.reporting.opening import Remedy

MORE = 4
"""Factor of the advised steps if nothing was learned; divisor if overfitted."""

FEWEST_SEEDS, MOST_SEEDS = 3, 30
"""Seeds advised after a single one, and the most that are advised."""

Clause = tuple[str, Sequence[Row]]
"""A reason why verdicts are open, in words, and the rows it holds for."""


def remedies(comparison: Comparison, rows: Sequence[Row]) -> tuple[Remedy, ...]:
    """Ways to settle the open verdicts on candidates: finish, train longer or less, more seeds.

    Args:
        comparison: the records.
        rows: verdicts on its subjects.
    """
    if not comparison.complete:
        command = _resuming(comparison.provenance.command)
        return (Remedy(text=sentence("settled", way="finishing"), command=command),)
    candidates = [row for row in rows if row.subject.role == "candidate"]
    return tuple(_remedies(comparison, candidates))


def seeds_needed(worse: Estimate) -> int | None:
    """Seeds that would decide a change whose mean and spread remain; None: too many.

    A change is undecided if its interval reaches from ``HOLDS`` to beyond ``BREAKS``.
    """
    if worse.half_width is None:
        return FEWEST_SEEDS
    at_one = worse.half_width * worse.n**0.5 / quantile(worse.n)
    for seeds in range(worse.n, MOST_SEEDS + 1):
        half = at_one * quantile(seeds) / seeds**0.5
        if worse.mean - half > HOLDS or worse.mean + half <= BREAKS:
            return seeds
    return None


def _remedies(comparison: Comparison, rows: Sequence[Row]) -> Iterable[Remedy]:
    judged = [row for row in rows if row.gate is None]
    cells = list(_unsure(comparison, judged))
    nouns = dict.fromkeys(noun for _, noun, _ in cells)

    def unsure(reason: str, *, few: bool) -> list[Clause]:
        chosen = {
            noun: [row for row, of, seeds in cells if of == noun and (seeds is not None) == few]
            for noun in nouns
        }
        return [
            clause
            for noun, rows_of_noun in chosen.items()
            for clause in _clause(reason, rows_of_noun, noun)
        ]

    def gated(gate: str) -> list[Clause]:
        return _clause(gate, [row for row in rows if row.gate == gate])

    blind = _clause("blind", [row for row in judged if row.finds == "unlearned"])
    longer = [*gated("unlearned"), *blind, *gated("tied"), *unsure("scattered", few=False)]
    if longer:
        entry = TASKS.get(comparison.task)
        usual = 0 if entry is None else entry.defaults.steps
        more = _steps(comparison, lambda steps: max(MORE * steps, usual))
        yield _remedy(comparison, "more_steps", longer, steps=more)
    if overfitted := gated("overfitted"):
        fewer = _steps(comparison, lambda steps: steps // MORE)
        yield _remedy(comparison, "fewer_steps", overfitted, steps=fewer)
    if by_seeds := unsure("unsure", few=True):
        most = max(seeds for _, _, seeds in cells if seeds is not None)
        yield _remedy(comparison, "more_seeds", by_seeds, seeds=most)
    elif judged and comparison.most_seeds == 1:
        yield _remedy(comparison, "first_seeds", [("", judged)], seeds=FEWEST_SEEDS)


def _steps(comparison: Comparison, change: Callable[[int], int]) -> int | None:
    """Changed steps; None if the actual ones are unknown."""
    steps = comparison.provenance.settings.get("steps")
    return max(1, change(steps)) if isinstance(steps, int) else None


def _unsure(comparison: Comparison, rows: Sequence[Row]) -> Iterable[tuple[Row, str, int | None]]:
    """Unsure verdicts by a metric: the row, the metric's noun, and the seeds that it needs."""
    for row in rows:
        for metric, verdict, _ in by_metric(comparison, row):
            if verdict == "unsure":
                measured = comparison.by_length(row.subject.name, metric.key)
                worse = longest_change(metric, measured, comparison.train_length)
                yield row, metric.noun, None if worse is None else seeds_needed(worse)


def _clause(reason: str, rows: Sequence[Row], noun: str = "") -> list[Clause]:
    """A clause, unless there are no rows."""
    labels = [row.subject.label for row in rows]
    return [(sentence("open", reason=reason, labels=labels, noun=noun), rows)] if rows else []


def _remedy(
    comparison: Comparison,
    name: str,
    clauses: Sequence[Clause],
    *,
    seeds: int | None = None,
    steps: int | None = None,
) -> Remedy:
    chosen = {row.subject.name for _, rows in clauses for row in rows}
    names = [subject.name for subject in comparison.subjects if subject.name in chosen]
    changes: dict[str, Any] = {}
    if seeds is not None:
        changes = {"seeds": list(range(seeds)), "out": f"posenc-{seeds}-seeds"}
    elif steps is not None:
        changes = {"steps": steps, "out": f"posenc-{steps}-steps"}
    text = sentence("settled", way=name, clauses=[text for text, _ in clauses], count=seeds)
    command = _command(comparison, changes | {"encodings": names}) if changes else ""
    return Remedy(text=text, command=command)


def _resuming(command: str) -> str:
    """The command that continues what a command began; "" if that was no command line."""
    words = shlex.split(command) if command.startswith("posenc compare") else []
    if not words:
        return ""
    folders = [after for word, after in pairwise(words) if word == "--out"]
    return resume_command(Path(folders[-1] if folders else "posenc-compare"))


def _command(comparison: Comparison, changes: Mapping[str, Any]) -> str:
    """The command line of the same comparison with other settings; "" if they are not known.

    Only options that differ from the task's defaults are given.
    """
    if comparison.task not in TASKS:
        return ""
    settings = {**comparison.provenance.settings, **changes}
    defaults = ComparisonSettings(
        out=Path(), task=comparison.task, train_length=comparison.train_length
    )
    usual = {**defaults.to_json(), "steps": defaults.planned_steps}
    usual["train_length"] = defaults.entry.defaults.train_length
    settings["train_length"] = comparison.train_length
    settings["task"], usual["task"] = comparison.task, ComparisonSettings.task
    words = ["posenc", "compare"]
    for key, value in settings.get("options", {}).items():
        if value != usual["options"].get(key):
            words += ["--option", f"{key}={_written(value)}"]
    for key in (*declared_options(ComparisonSettings), "out"):
        value = settings.get(key, usual[key])
        if value != usual[key]:
            count = key == "seeds" and value == list(range(len(value)))
            words += [f"--{key.replace('_', '-')}", _written(len(value) if count else value)]
    return shlex.join(words)


def _written(value: object) -> str:
    """A value as the command line takes it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
