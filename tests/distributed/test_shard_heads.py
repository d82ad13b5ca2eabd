"""Layers whose heads are on several ranks equal layers on one, for every encoding."""

from __future__ import annotations

import torch

from posenc.registry import ENCODINGS
from tests.distributed.pool import Pool
from tests.distributed.sharded_heads import Sample

JOBS = "tests.distributed.sharded_heads"

REFUSED = {"dape": "Dape mixes heads"}
"""Registry entries whose heads are not spread, with the reason; all others are served."""


def test_every_registry_entry_is_served_or_refused_by_name(pool: Pool) -> None:
    samples = [Sample(name) for name in ENCODINGS]
    for found in pool.run(f"{JOBS}:differences", 3, samples=samples):
        answers = dict(zip(ENCODINGS, found, strict=True))
        for name, reason in REFUSED.items():
            assert reason in answers.pop(name)
        wrong = [text for text in answers.values() if text]
        assert not wrong, "\n".join(wrong)


def test_options_that_use_the_layer(pool: Pool) -> None:
    """Projections of the layer, and positions with gradients."""
    content = {"projections": "content"}
    samples = [
        Sample("deberta", content),
        Sample("deberta", {**content, "buckets": 8, "max_distance": 9, "normalize": True}),
        Sample("deberta", {**content, "lookup": "released"}),
        Sample("rope", moving=True),
        Sample("fire", moving=True),
    ]
    assert pool.run(f"{JOBS}:differences", 3, samples=samples) == [[""] * len(samples)] * 3


def test_positions_added_to_queries_and_keys(pool: Pool) -> None:
    assert max(pool.run(f"{JOBS}:detr_difference", 2)) < 1e-9


def test_dropped_weights_are_those_of_any_number_of_ranks(pool: Pool) -> None:
    for name in ("t5", "forgetting"):
        (alone,) = pool.run(f"{JOBS}:dropped", 1, name=name)
        for output in pool.run(f"{JOBS}:dropped", 3, name=name):
            torch.testing.assert_close(output, alone, atol=1e-6, rtol=1e-6)
