"""The choice among extensions, by hand."""

from __future__ import annotations

import pytest

from posenc.evaluation import choosing
from posenc.evaluation.results import Findings, Study, StudyReading
from posenc.evaluation.suites import next_token as measuring
from posenc.evaluation.suites.needles import ByteNeedles, letters
from posenc.evaluation.suites.next_token import NextTokenSuite
from posenc.experiments.pieces import Pieces


def reading(loss: float, found: float, wobble: float = 0.0) -> StudyReading:
    return StudyReading(
        loss={16: 2.0, 32: loss},
        by_position=((4.0, 2.0),),
        needles={16: (0.9,), 32: (found,)},
        copied={16: 0.9, 32: 0.9},
        per_second=1.0,
        peak_memory_bytes=1,
        windows=tuple(loss + 0.3 * (n % 3) + wobble * (1 if n % 2 else -1) for n in range(64)),
    )


def study(**readings: StudyReading) -> Study:
    import torch

    facts = NextTokenSuite(
        torch.zeros(64), Pieces((64,)), (16, 32), ByteNeedles(), letters(), seed=0, windows=1
    )
    baselines = ("direct", "window")
    return Study(
        checkpoint="tiny",
        family="llama",
        parameters=1,
        length=16,
        factor=2.0,
        lengths=(16, 32),
        metrics=facts.facts("byte")["metrics"],
        guide="",
        depths=(0.5,),
        unit="byte",
        chance=0.06,
        copy_chance=0.04,
        text="",
        sha256="",
        asked=64,
        findings=tuple(
            Findings(
                key=key,
                role="baseline" if key in baselines else "method",
                writable=key not in (*baselines, "segments"),
                untuned=each,
            )
            for key, each in readings.items()
        ),
    )


BASE = {"direct": reading(4.0, 0.1), "window": reading(2.4, 0.05)}


def chosen(**readings: StudyReading) -> str | None:
    return choosing.choose(study(**(BASE | readings)), tuned=False)[0]


def test_stretching_must_gain() -> None:
    other = reading(2.9, 0.05)
    assert chosen(yarn=reading(2.3, 0.5), ntk=other) == "yarn"
    assert chosen(yarn=reading(2.5, 0.5), ntk=other) == "yarn", "needles beat the window"
    assert chosen(yarn=reading(2.34, 0.05, wobble=0.3), ntk=other) is None, "not significant"
    assert chosen(yarn=reading(2.39, 0.05), ntk=other) is None, "by less than 1%"
    assert chosen(yarn=reading(4.2, 0.9), ntk=reading(4.3, 0.8)) is None
    assert chosen(direct=reading(2.5, 0.9), yarn=reading(2.3, 0.3), ntk=other) is None
    assert chosen(segments=reading(2.0, 0.9), yarn=reading(2.3, 0.5), ntk=other) == "yarn"
    assert chosen(yarn=reading(4.2, 0.1)) == "yarn", "the only one asked for"


def test_close_shares_of_needles_leave_the_choice_to_loss() -> None:
    found = {"ntk": reading(2.3, 0.2), "yarn": reading(2.5, 0.57), "rerope": reading(2.6, 0.6)}
    assert chosen(**found) == "yarn"


def test_gaps_are_paired() -> None:
    found = choosing.gap(reading(2.5, 0.5), reading(2.3, 0.5))
    assert found is not None
    assert found.mean == pytest.approx(0.2)
    assert found.half_width == pytest.approx(0.0, abs=1e-9)


def test_medians_have_an_interval() -> None:
    assert measuring._spread([1.0] * 9 + [40.0]) == 0.0
    assert measuring._spread([5.0, 1.0, 2.0, 4.0, 1.0]) == pytest.approx(1.0)
