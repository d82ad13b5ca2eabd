"""Spans of bucket maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc.attention.problem.terms import spans_of

OFFSETS = torch.arange(-30, 31)

MAPS = {
    "clipped": OFFSETS.clamp(-4, 4) + 4,
    "one": OFFSETS * 0,
    "rising": OFFSETS + 30,
    "falling": 30 - OFFSETS,
    "by distance": OFFSETS.abs(),
    "in pairs": (OFFSETS + 30) // 2,
    "with gaps": (OFFSETS + 30) // 3 * 5 + 2,
    "scattered": (OFFSETS * 7) % 11,
    "single offset": torch.tensor([3]),
}


@pytest.mark.parametrize("name", MAPS)
def test_spans_say_the_bucket_of_every_offset(name: str) -> None:
    bucket = MAPS[name]
    spans = spans_of(bucket)
    assert torch.equal(spans.buckets[spans.number.long()], bucket)
    steps = spans.number.diff()
    assert bool(((steps == 0) | (steps == 1)).all()), "a vector of offsets has a vector of buckets"
    assert torch.equal(_written_out(spans.spans), spans.number)
    numbers = torch.arange(len(spans.spans), dtype=torch.int32)
    lengths = spans.spans[:, 1] - spans.spans[:, 0] + 1
    assert torch.equal(spans.span_of, numbers.repeat_interleave(lengths.long()))


def _written_out(spans: Tensor) -> Tensor:
    found = [n + s * t for a, b, n, s in spans.tolist() for t in range(b - a + 1)]
    return torch.tensor(found, dtype=torch.int32)


def test_few_spans_describe_the_usual_maps() -> None:
    assert len(spans_of(MAPS["clipped"]).spans) == 3
    assert len(spans_of(MAPS["rising"]).spans) == 1
    assert len(spans_of(MAPS["one"]).spans) == 1


def test_all_buckets_in_their_order_need_no_copy_of_the_rows() -> None:
    assert spans_of(MAPS["clipped"]).consecutive
    assert not spans_of(MAPS["falling"]).consecutive
    assert not spans_of(MAPS["with gaps"]).consecutive


@pytest.mark.usefixtures("entered")
def test_spans_of_a_map_are_computed_once() -> None:
    assert spans_of(MAPS["in pairs"]) is spans_of(MAPS["in pairs"].clone())
