"""Encodings of some heads."""

from __future__ import annotations

import pytest
import torch

import posenc
from posenc.errors import ArgumentError


@pytest.mark.parametrize(("begin", "end"), [(2, 2), (-1, 2), (3, 9), (4, 3)])
def test_heads_that_are_not_there_are_refused(begin: int, end: int) -> None:
    with pytest.raises(ArgumentError, match="begin, end"):
        posenc.create("alibi", heads=8).heads(begin, end)


def test_heads_that_share_a_query_stay_together() -> None:
    encoding = posenc.create("rope_pp", heads=8, head_dim=8)
    with pytest.raises(ArgumentError, match="multiples of 2"):
        encoding.heads(1, 4)
    assert encoding.heads(2, 4).query_key is encoding.query_key


def test_mixed_heads_are_refused() -> None:
    with pytest.raises(ArgumentError, match="mixes heads"):
        posenc.create("dape", heads=8).heads(0, 4)


def test_ranges_of_ranges_and_gradients() -> None:
    """Of the parameters that are shared, those of other heads get a gradient of zero."""
    encoding = posenc.create("t5", heads=8, causal=True)
    some = encoding.heads(2, 8).heads(1, 3)
    grid = posenc.Grid.of(posenc.Layout.sequence(9), causal=True)
    q, k, v = torch.randn(3, 1, 8, 9, 4)
    whole = posenc.attend(q, k, v, grid, encoding)[:, 3:5]
    part = posenc.attend(q[:, 3:5], k[:, 3:5], v[:, 3:5], grid, some)
    torch.testing.assert_close(part, whole)
    (gradient,) = torch.autograd.grad(part.sin().sum(), list(encoding.parameters()))
    assert gradient.any(-1).tolist() == [head in (3, 4) for head in range(8)]


def test_wrapped_parts_say_what_the_inner_one_does_with_heads() -> None:
    wrapped = posenc.extension.EXTENSIONS["log_n"].function(
        posenc.create("dape", heads=8), length=64
    )
    with pytest.raises(ArgumentError, match="mixes heads"):
        wrapped.heads(0, 4)
