"""Records survive JSON."""

from __future__ import annotations

import json

import pytest

from posenc.errors import CheckpointError
from posenc.lab.experiments.results import Comparison
from tests.support.samples import sample


def test_round_trip() -> None:
    before = sample()
    assert Comparison.from_json(json.loads(json.dumps(before.to_json()))) == before


def test_frame_has_a_row_a_measurement() -> None:
    frame = sample().frame()
    assert list(frame.columns) == ["subject", "seed", "metric", "x", "value"]
    assert len(frame) == len(sample().measurements)


def test_headline_and_values() -> None:
    comparison = sample()
    assert comparison.headline.key == "loss"
    assert comparison.metric("recall") is not None
    assert comparison.metric("colour") is None
    assert set(comparison.values("alibi", "loss", 512)) == {0, 1, 2}
    assert comparison.values("learned", "loss", 512) == {}


@pytest.mark.parametrize("change", [{"colour": 1}, {"runs": [{"subject": "x"}]}])
def test_unknown_or_missing_fields_are_refused(change: dict[str, object]) -> None:
    plain = sample().to_json() | change
    with pytest.raises(CheckpointError, match="comparison"):
        Comparison.from_json(plain)
