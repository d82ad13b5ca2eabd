"""Needles, words to copy, how answers are counted, and passes over a text timed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from posenc.lab.evaluation.suites import needles as probes
from posenc.lab.evaluation.suites import next_token as measuring
from posenc.lab.experiments.tasks.common import needles
from posenc.lab.training.seeding import generator

WINDOWS = torch.randint(32, 127, (6, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("depth", probes.DEPTHS)
def test_one_needle_at_its_depth_and_the_question_last(depth: float) -> None:
    windows = WINDOWS.clone()
    windows[:, 7] = needles.FIRST  # text that has the mark already
    hidden, answers = probes.ByteNeedles().hide(windows, depth, generator(1))
    marked = (hidden >= needles.FIRST) & (hidden < needles.FIRST + needles.KINDS)
    assert marked.sum(1).tolist() == [1] * 6
    assert marked.long().argmax(1).tolist() == [round(depth * 38)] * 6
    assert hidden.gather(1, marked.long().argmax(1, keepdim=True)).equal(answers)
    assert (hidden[:, -1] == needles.QUERY).all()
    assert windows[:, 7].eq(needles.FIRST).all(), "the text itself is not touched"


@pytest.mark.parametrize("depth", probes.DEPTHS)
def test_a_pass_key_is_told_once_and_asked_for_at_the_end(depth: float) -> None:
    windows = torch.randint(97, 123, (4, 160), generator=torch.Generator().manual_seed(0))
    hidden, answers = probes.KeyNeedles(lambda text: list(text.encode())).hide(
        windows, depth, generator(2)
    )
    assert hidden.shape == (4, 160)
    for row, answer in zip(hidden, answers, strict=True):
        text, key = bytes(row.tolist()).decode(), bytes(answer.tolist()).decode()
        assert text.endswith("\nThe pass key is" + key[:-1])
        assert text.count(f"The pass key is{key}. Remember it.") == 1
        assert abs(text.index(f"\nThe pass key is{key}") / (160 - 55) - depth) < 0.03


def test_the_word_to_copy_stands_whole_and_then_in_part() -> None:
    whole, answers = probes.copying(WINDOWS, probes.letters(), generator(3))
    assert whole.shape == WINDOWS.shape
    word = whole[:, -2 * probes.WORD + 1 : -probes.WORD + 1]
    assert whole[:, -probes.WORD + 1 :].equal(word[:, :-1])
    assert answers.equal(word[:, probes.PROMPT :])


def test_copying_by_looking_back_is_all_right_and_guessing_is_not() -> None:
    whole, answers = probes.copying(WINDOWS, probes.letters(), generator(3))

    def back(tokens: Tensor) -> Tensor:
        """The token that followed where this one stood a word earlier."""
        return torch.nn.functional.one_hot(tokens.roll(probes.WORD - 1, 1), 128).float()

    assert probes.shares_right(back, whole, answers, exact=False).eq(1).all()
    assert probes.shares_right(back, whole, answers, exact=True).eq(1).all()
    zeros = torch.zeros(128)
    missed = probes.shares_right(lambda t: zeros.expand(*t.shape, 128), whole, answers, exact=False)
    assert missed.shape == (6,)
    assert missed.eq(0).all()


@pytest.mark.parametrize(("latest", "limit"), [(0.5, 21), (0.25, 11)])
def test_training_rows_end_in_a_word_over_and_over(latest: float, limit: int) -> None:
    rows = probes.repeat(WINDOWS, generator(4), latest=latest)
    changed = (rows != WINDOWS).long().argmax(1)
    assert (changed < limit).all()
    for row, begin in zip(rows, changed.tolist(), strict=True):
        tail = row[begin:].tolist()
        assert any(tail[:-n] == tail[n:] for n in range(8, len(tail))), "no period"
        assert all(97 <= each < 123 for each in tail)


@pytest.fixture(scope="module", autouse=True)
def few_windows() -> None:
    """Times are as precise here as those of users."""


def test_medians_have_an_interval() -> None:
    assert measuring.spread([1.0] * 9 + [40.0]) == 0.0
    assert measuring.spread([5.0, 1.0, 2.0, 4.0, 1.0]) == pytest.approx(1.0)


class Stopwatch:
    """A clock that passes take scripted seconds on."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.passes, self.seconds = 0.0, 0, seconds

    def __call__(self) -> float:
        return self.now

    def run(self, inputs: Tensor) -> None:
        self.now += self.seconds[self.passes % len(self.seconds)]
        self.passes += 1


class Timed(nn.Module):
    """A model that takes as long as a stopwatch says."""

    def __init__(self, clock: Stopwatch) -> None:
        super().__init__()
        self.weight, self.clock = nn.Parameter(torch.zeros(1)), clock

    def forward(self, inputs: Tensor) -> None:
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
