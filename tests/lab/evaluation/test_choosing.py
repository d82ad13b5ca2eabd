"""The method that a study chooses, and the reason that it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from posenc.errors import CheckpointError
from posenc.lab.evaluation.choosing import choose, gap, gate, require_learned
from posenc.lab.evaluation.results import StudyReading
from posenc.lab.evaluation.summary import answer
from tests.lab.evaluation.studies import BASE, blind, reading, study
from tests.support.samples import LOSS


def test_needles_come_before_loss() -> None:
    found = study(**BASE, ntk=reading(2.3, 0.2), yarn=reading(2.5, 0.57), rerope=reading(2.6, 0.6))
    assert choose(found, tuned=False)[0] == "yarn", "as many as rerope's, and less loss"


def test_stretching_must_gain() -> None:
    def chosen(**readings: StudyReading) -> str | None:
        return choose(study(**(BASE | {"ntk": reading(2.9, 0.05)} | readings)), tuned=False)[0]

    assert chosen(yarn=reading(2.3)) == "yarn"
    assert chosen(yarn=reading(2.5)) == "yarn", "needles beat the window"
    assert chosen(yarn=reading(2.34, 0.05)) == "yarn"
    assert chosen(yarn=reading(2.34, 0.05, spread=0.3)) is None, "not significant"
    assert chosen(yarn=reading(2.39, 0.05)) is None, "by less than 1%"
    assert chosen(direct=reading(2.5, 0.9), yarn=reading(2.3, 0.3)) is None, "needles are lost"
    assert chosen(segments=reading(2.0, 0.9), yarn=reading(2.3)) == "yarn"


def test_a_tie_or_no_gain_means_not_to_stretch() -> None:
    """All at chance: level with the model as it is."""
    spreads = {"direct": 0.1, "window": 0.2, "self_extend": 0.3, "ntk": 0.05}
    noisy = {key: reading(4.95, 0.06, spread=spread) for key, spread in spreads.items()}
    found = study(**blind(noisy))
    key, why = choose(found, tuned=False)
    assert key is None
    assert why.startswith("Nothing is gained by stretching: at 32 bytes ")
    assert "cannot be told from not stretched (4.950) and a plain sliding window (4.950)" in why
    assert answer(replace(found, reason=why)) == [why]
    key, why = choose(found, tuned=False, always=True)
    assert key in {"self_extend", "ntk"}
    assert "It gains nothing: at 32 bytes" in why


def test_a_loss_that_is_surely_less_by_next_to_nothing_is_no_gain() -> None:
    """A model that has learned nothing has about the same loss by every method."""
    losses = {"direct": 6.385, "window": 6.386, "drope": 6.373, "yarn": 6.386}
    readings = {key: reading(loss) for key, loss in losses.items()}
    found = study(**blind(readings, 0.01, 0.0))
    key, why = choose(found, tuned=False)
    assert key is None
    assert ", which is within 1% of not stretched (6.385) and a plain sliding window" in why


def test_one_method_that_was_asked_for_is_written_and_said_to_gain_nothing() -> None:
    found = study(**BASE, yarn=reading(4.2, 0.1))
    key, why = choose(found, tuned=False)
    assert key == "yarn"
    assert why.startswith("It was the one asked for. It gains nothing: at 32 bytes yarn")
    assert "is worse than not stretched (4.000) and a plain sliding window (2.400)" in why


def test_needles_that_a_window_loses_are_a_gain_at_its_loss() -> None:
    found = study(**BASE, yarn=reading(2.45, 0.9), ntk=reading(2.5, 0.9))
    assert choose(found, tuned=False)[0] == "yarn"
    few = study(**BASE, yarn=reading(2.45, 0.06), ntk=reading(2.5, 0.08))
    assert choose(few, tuned=False)[0] is None, "no more than the window, at more loss"
    much = study(**BASE, yarn=reading(4.5, 0.9), ntk=reading(4.6, 0.9))
    assert choose(much, tuned=False)[0] is None, "needles at more loss than not stretched"


def test_the_reason_does_not_deny_the_table() -> None:
    """A method with less loss that cannot be written is named."""
    found = study(**BASE, segments=reading(2.0), ntk=reading(2.3), yarn=reading(2.35))
    key, why = choose(found, tuned=False)
    assert key == "ntk"
    assert why.endswith("it has the least loss at the new length; segments has less.")
    assert choose(study(**BASE, ntk=reading(2.3), yarn=reading(2.35)), tuned=False)[1].endswith(
        "it has the least loss at the new length."
    )


def test_loss_decides_where_the_original_finds_none() -> None:
    found = study(**blind(BASE), ntk=reading(2.3, 0.2), rerope=reading(2.6, 0.6))
    assert choose(found, tuned=False)[0] == "ntk"


def test_what_no_checkpoint_holds_is_not_advised() -> None:
    found = study(**BASE, segments=reading(2.0, 0.9), ntk=reading(2.3, 0.2), yarn=reading(2.5))
    assert choose(found, tuned=False)[0] == "yarn"
    assert choose(study(**BASE, segments=reading(2.0)), tuned=False)[0] is None


def test_a_model_no_better_than_frequencies_is_not_judged() -> None:
    """By its best value: longer contexts may well cost more than frequencies do."""
    known = replace(study(**BASE), trivial=2.2, trivial_rule="byte frequencies")
    assert gate(known) == "", "2.0 at 16"
    assert gate(replace(known, trivial=None)) == ""
    level = replace(known, trivial=2.0)
    assert "best loss is 2.000 (byte frequencies alone: 2.000)" in gate(level)
    stopped = replace(level, gate=gate(level))
    assert answer(stopped) == [stopped.gate]
    assert choose(stopped, tuned=False)[0] is None
    with pytest.raises(CheckpointError, match=r"better loss than 2\.000 .* got 2\.000 at best"):
        require_learned(stopped)
    require_learned(known)


def test_the_gap_is_paired() -> None:
    difference = gap(LOSS, reading(2.5), reading(2.3))
    assert difference.mean == pytest.approx(0.2)
    assert difference.half_width == pytest.approx(0, abs=1e-9), "what they share cancels"
    noisy = gap(LOSS, reading(2.5, spread=0.3), reading(2.3))
    assert noisy.half_width == pytest.approx(0.3 * 1.998 / 63**0.5, rel=1e-3)
