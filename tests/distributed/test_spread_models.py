"""Encoders, decoders and encoder-decoders whose tokens are on several ranks."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool

JOBS = "tests.distributed.spread_models"


@pytest.mark.parametrize(
    ("kind", "encoding", "form", "split"),
    [
        ("decoder", "t5", "auto", "balanced"),
        ("decoder by ddp", "t5", "ring", "uneven"),
        ("decoder", "rope", "heads", "contiguous"),
        ("decoder by ddp", "forgetting", "auto", "balanced"),
        ("decoder", "cope", "auto", "uneven"),
        ("decoder", "learned", "auto", "balanced"),
        ("decoder", "conv", "auto", "balanced"),
        ("decoder", "abacus", "auto", "scattered"),
        ("masked_lm", "learned", "auto", "balanced"),
        ("masked_lm", "t5", "ring", "uneven"),
        ("masked_lm", "conv", "gather", "scattered"),
        ("deberta", "learned", "auto", "empty"),
        ("deberta", "conv", "auto", "uneven"),
        ("transformer", "rope shaw alibi", "auto", "balanced"),
        ("transformer", "t5 forgetting rope", "auto", "uneven"),
        ("transformer", "shaw rope nope", "heads", "contiguous"),
    ],
)
def test_models_equal_those_of_one_process(
    pool: Pool, kind: str, encoding: str, form: str, split: str
) -> None:
    kind, _, ddp = kind.partition(" by ")
    arguments = {"kind": kind, "encoding": encoding, "form": form, "split": split, "ddp": bool(ddp)}
    assert max(pool.run(f"{JOBS}:difference", 2, **arguments)) < 2e-6


def test_what_one_rank_cannot_compute_is_refused(pool: Pool) -> None:
    for messages in pool.run(f"{JOBS}:refusals", 2):
        assert "a TextClassifier, whose mean" in messages["text_classifier"]
        assert "one rank" in messages["sequence_classifier"]
        assert "whole images" in messages["vision_transformer"]
        assert "whole images" in messages["swin"]
        assert "latent attention" in messages["latent"]
        assert "layout: expected the layout of this rank's tokens" in messages["layout"]
        assert "cache: expected None with another attend" in messages["cache"]
