"""Passes over a text are timed."""

from __future__ import annotations

import pytest
import torch

from posenc.lab.evaluation.suites import next_token as measuring


@pytest.fixture(scope="module", autouse=True)
def few_windows() -> None:
    """Times are as precise here as those of users."""


def test_medians_have_an_interval() -> None:
    assert measuring._spread([1.0] * 9 + [40.0]) == 0.0
    assert measuring._spread([5.0, 1.0, 2.0, 4.0, 1.0]) == pytest.approx(1.0)


class Stopwatch:
    """A clock that passes take scripted seconds on."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.passes, self.seconds = 0.0, 0, seconds

    def __call__(self) -> float:
        return self.now

    def run(self, inputs: torch.Tensor) -> None:
        self.now += self.seconds[self.passes % len(self.seconds)]
        self.passes += 1


class Timed(torch.nn.Module):
    """A model that takes as long as a stopwatch says."""

    def __init__(self, clock: Stopwatch) -> None:
        super().__init__()
        self.weight, self.clock = torch.nn.Parameter(torch.zeros(1)), clock

    def forward(self, inputs: torch.Tensor) -> None:
        self.clock.run(inputs)


def test_passes_are_timed_until_their_time_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = Stopwatch(0.01)
    monkeypatch.setattr(measuring.time, "perf_counter", steady)
    spent = measuring.cost(Timed(steady), torch.zeros(1), count=3)
    assert spent.per_second == pytest.approx(300)
    assert spent.time_error == pytest.approx(0, abs=1e-9)
    assert steady.passes == 1 + measuring.FEWEST_PASSES
    busy = Stopwatch(0.01, 0.05, 0.011, 0.3)
    monkeypatch.setattr(measuring.time, "perf_counter", busy)
    spent = measuring.cost(Timed(busy), torch.zeros(1), count=3)
    assert busy.passes > 20, "more passes where they differ"
    assert spent.time_error > 0.2
    assert busy.now < measuring.PATIENCE + 0.7
    rare = Stopwatch(*[0.01] * 9, 0.4)
    monkeypatch.setattr(measuring.time, "perf_counter", rare)
    assert measuring.cost(Timed(rare), torch.zeros(1), count=3).time_error < 0.01
