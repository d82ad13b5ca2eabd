"""Comparisons within a number of minutes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from posenc.errors import ArgumentError
from posenc.lab.experiments.compare import compare
from posenc.lab.experiments.progress import Paced, RunsPrepared, Stopping
from posenc.lab.experiments.settings import load_settings
from posenc.lab.training.stopping import Deadline
from tests.lab.experiments.small_comparisons import Log, small


def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A callback that ends the budget."""
    return lambda: monkeypatch.setattr(Deadline, "left", property(lambda self: -1.0))


def test_budget_is_turned_into_steps_and_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small(tmp_path, encodings=("rope",), steps=None, budget_minutes=30.0)
    log = Log(Paced, spend(monkeypatch))
    assert not compare(settings, progress=log).complete
    (paced,) = (event for event in log.events if isinstance(event, Paced))
    assert paced.steps >= 20
    assert paced.steps % 10 == 0
    assert 0.0 < paced.seconds <= 1800.5
    (stopping,) = (event for event in log.events if isinstance(event, Stopping))
    assert stopping.over_budget
    assert load_settings(settings.out).steps == paced.steps


def test_budget_too_small_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posenc.lab.experiments.compare.LEAST_STEPS", 10**7)
    settings = small(tmp_path, encodings=("rope",), steps=None, budget_minutes=3.0)
    with pytest.raises(ArgumentError, match=r"budget_minutes: expected at least \d+\.\d on this"):
        compare(settings)


def test_a_budget_that_is_spent_at_once_leaves_nothing(tmp_path: Path) -> None:
    """It ends the preparation of the data, which goes on in a process of its own."""
    settings = small(tmp_path, steps=None, budget_minutes=1e-6)
    with pytest.raises(ArgumentError, match="1e-06, which ends while the data is prepared"):
        compare(settings)
    assert not settings.out.exists()


def test_a_budget_that_ends_with_the_first_steps_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    settings = small(tmp_path, encodings=("rope",), steps=None, budget_minutes=3.0)
    with pytest.raises(ArgumentError, match=r"speed of training is measured.*add --resume"):
        compare(settings, progress=Log(RunsPrepared, spend(monkeypatch)))
    assert list(scratch.iterdir()) == [], "processes that are ended leave nothing behind"
    assert load_settings(settings.out).budget_minutes == 3.0
