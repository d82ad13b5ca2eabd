"""One run of a comparison whose numbers are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posenc.lab.experiments.jobs import Outcome, TrainingJob, carry_out
from posenc.lab.experiments.results import Measurement, RefusedMeasurement
from tests.lab.experiments.small_comparisons import small


def outcome_of(folder: Path, *, steps: int = 2, damage: float = 0.0, **changes: object) -> Outcome:
    """The outcome of a run; ``damage`` is added to its losses at 32."""
    settings = small(folder, steps=steps, **changes)
    task = settings.entry.make(settings)
    measure = task.measure

    def measured(
        *arguments: Any, **options: Any
    ) -> Iterator[list[Measurement | RefusedMeasurement]]:
        for piece in measure(*arguments, **options):
            for item in piece:
                if isinstance(item, Measurement) and (item.metric, item.x) == ("loss", 32):
                    object.__setattr__(item, "value", item.value + damage)
            yield piece

    task.measure = measured  # type: ignore[method-assign]
    job = TrainingJob(encoding="rope", seed=3, steps=steps, folder=folder / "rope" / "seed-3")
    job.folder.mkdir(parents=True)
    carry_out(job, task, settings, workers=1, stop=lambda: False, emit=lambda event: None)
    return Outcome.read(job.folder / "run.json")


@pytest.mark.parametrize(("rate", "steps", "step"), [(1e30, 2, 2), (1e39, 1, 1)])
def test_training_that_diverges_is_an_outcome(
    tmp_path: Path, rate: float, steps: int, step: int
) -> None:
    """Also where the last step leaves weights that are not finite, but had a loss that is."""
    outcome = outcome_of(tmp_path, steps=steps, learning_rate=rate)
    assert {item.metric for item in outcome.measurements} <= {"training_loss"}
    headline = [item for item in outcome.refusals if item.metric == "loss"]
    assert {(item.subject, item.x) for item in headline} == {
        (name, x) for name in ("rope", "rope|window=16") for x in (16, 32)
    }
    for item in outcome.refusals:
        assert item.reason.startswith(f"training of seed 3 diverged at step {step}: its loss or ")


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refusals(tmp_path: Path, damage: float) -> None:
    outcome = outcome_of(tmp_path, damage=damage)
    lengths = {item.x for item in outcome.measurements if item.metric == "loss"}
    assert lengths == {16}
    refused = [item for item in outcome.refusals if item.x == 32]
    assert {(item.subject, item.metric) for item in refused} == {
        ("rope", "loss"),
        ("rope|window=16", "loss"),
    }
    assert {item.reason for item in refused} == {f"the model of seed 3 gives {damage}"}
