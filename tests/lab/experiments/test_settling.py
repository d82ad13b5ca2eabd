"""Remedies for what is undecided: they name it, and their commands do what they say."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc.errors import DataError
from posenc.lab.experiments.results import Comparison, Measurement
from posenc.lab.experiments.settings import NOT_ABOUT_RESULTS, ComparisonSettings
from posenc.lab.experiments.settling import MOST_SEEDS, remedies, seeds_needed
from posenc.lab.experiments.verdicts import judged
from posenc.lab.reporting.numbers import estimate
from tests.support.commands import run_command
from tests.support.samples import LOSS, sample


def spread(mean: float, deviation: float, seeds: int) -> list[float]:
    """Numbers of this mean and this standard deviation."""
    numbers = np.linspace(-1.0, 1.0, seeds)
    return list(mean + deviation * numbers / numbers.std(ddof=1))


def scattered(mean: float, deviation: float, seeds: int) -> Comparison:
    """The sample, but alibi's recall falls from 1 by so much, by so many seeds."""
    base = sample(seeds=tuple(range(seeds)))
    falls = spread(mean, deviation, seeds)
    recall = [
        Measurement(subject="alibi", seed=seed, metric="recall", x=x, value=value)
        for seed, fall in enumerate(falls)
        for x, value in ((64, 1.0), (512, 1.0 - fall))
    ]
    kept = tuple(m for m in base.measurements if (m.subject, m.metric) != ("alibi", "recall"))
    return replace(base, measurements=(*kept, *recall))


def found(comparison: Comparison) -> str | None:
    return next(row.finds for row in judged(comparison) if row.subject.name == "alibi")


@pytest.mark.parametrize(
    ("mean", "deviation"), [(0.35, 0.3), (0.0, 0.2), (0.1, 0.12), (0.4, 0.5), (0.2, 0.1)]
)
def test_so_many_seeds_decide_and_one_less_does_not(mean: float, deviation: float) -> None:
    first = estimate(spread(mean, deviation, 3))
    needed = seeds_needed(first)
    assert needed > 3
    assert found(scattered(mean, deviation, needed)) != "unsure"
    assert found(scattered(mean, deviation, needed - 1)) == "unsure"
    (remedy,) = remedies(comparison := scattered(mean, deviation, 3), judged(comparison))
    assert remedy.text == (
        "Undecided: the seeds differ on the recall of alibi. "
        f"At this spread {needed} seeds settle it:"
    )
    assert f"--encodings alibi --seeds {needed} " in remedy.command


def test_too_many_seeds_are_not_advised() -> None:
    comparison = scattered(0.2, 0.9, 3)
    assert seeds_needed(estimate(spread(0.2, 0.9, 3))) is None
    (remedy,) = remedies(comparison, judged(comparison))
    assert remedy.text.startswith("Undecided: the seeds differ much on the recall of alibi. ")
    assert "--steps 2400" in remedy.command
    assert MOST_SEEDS < 100


def told(comparison: Comparison, **gates: str) -> list[str]:
    rows = [
        replace(row, verdict=gates.get(row.subject.name, row.verdict)) for row in judged(comparison)
    ]
    return [remedy.text for remedy in remedies(comparison, rows)]


def test_says_what_is_open_and_of_whom() -> None:
    assert told(sample()) == []
    assert told(sample(), alibi="unlearned", t5="unlearned", rope="tied") == [
        "Undecided: alibi and t5 have not learned the task; rope cannot be told from the control. "
        "Training longer may settle it:"
    ]
    assert told(sample(), alibi="overfitted") == [
        "Undecided: alibi has learned the training data alone. "
        "Fewer steps, or more text, may settle it:"
    ]
    names = ("alibi", "t5", "rope", "sinusoidal")
    (many,) = told(sample(), **dict.fromkeys(names, "unlearned"))
    assert many.startswith("Undecided: 4 encodings have not learned the task. ")
    assert told(sample(seeds=(0,))) == ["One seed does not show what is chance; 3 do:"]
    assert told(sample(complete=False)) == ["Runs are missing. To finish them:"]
    assert told(sample(), nope="unlearned") == [], "references are not to be judged"


@pytest.mark.parametrize(
    ("command", "resumed"),
    [
        ("posenc compare --out 'my demo' --replace", "posenc compare --resume --out 'my demo'"),
        ("posenc compare", "posenc compare --resume --out posenc-compare"),
        ("posenc.lab.experiments.compare(…)", ""),
    ],
)
def test_finishing_is_a_command_of_the_same_folder(command: str, resumed: str) -> None:
    base = sample(complete=False)
    base = replace(base, provenance=replace(base.provenance, command=command))
    (remedy,) = remedies(base, judged(base))
    assert remedy.command == resumed


COPY = {"task": "copy", "train_length": 12, "test_lengths": (12, 20)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"encodings": ("alibi", "t5"), "width": 32, "seeds": (3, 5), "learning_rate": 3e-3},
        COPY | {"options": {"distinct": True}},
        {"task": "digits", "layers": 3, "batch": 8},
        {"text": Path("my book.txt"), "test_lengths": (64, 96), "options": {"needle_rows": 0.5}},
    ],
    ids=["defaults", "sizes", "copy", "digits", "text"],
)
def test_the_command_means_the_same_comparison(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But for what it is to change; read by the command line itself."""
    settings = ComparisonSettings(out=Path("x"), steps=500, **options)
    plain = {k: v for k, v in settings.to_json().items() if k not in NOT_ABOUT_RESULTS}
    base = sample(metric=replace(LOSS, learned=1.0))
    (row, *_) = judged(base)
    row = replace(row, verdict="unlearned", predicts="unlearned", finds=None)
    names = [recipe for recipe in settings.encodings if recipe != "nope"]
    subject = replace(base.subjects[0], role="candidate")
    subjects = tuple(replace(subject, name=name, label=name) for name in names)
    about = {"task": settings.task, "train_length": settings.train_length}
    provenance = replace(base.provenance, settings=plain)
    comparison = replace(base, subjects=subjects, provenance=provenance, **about)
    rows = [replace(row, subject=subject) for subject in subjects]
    (remedy,) = remedies(comparison, rows)
    read: list[ComparisonSettings] = []

    def caught(settings: ComparisonSettings, **rest: object) -> Comparison:
        read.append(settings)
        raise DataError("text", expected="", got="", remedy="")

    monkeypatch.setattr("posenc.lab.experiments.compare.compare", caught)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(remedy.command)
    assert words[:2] == ["posenc", "compare"]
    run_command(*words[1:])
    (again,) = read
    steps = max(4 * 500, settings.entry.defaults.steps)
    expected = replace(settings, steps=steps, encodings=tuple(names), out=again.out)
    assert again.to_json() == expected.to_json()
    assert again.out == Path(f"posenc-{steps}-steps")
