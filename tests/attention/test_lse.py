"""Sums of exponentiated logits beside the output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, create
from posenc.attention.backends import definition
from posenc.errors import ArgumentError


def inputs(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((4, queries), (2, keys), (2, keys))
    q, k, v = (torch.randn(2, *shape, 8).requires_grad_() for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "reference"])
@pytest.mark.parametrize("name", ["rope", "alibi"])
def test_outputs_over_parts_of_the_keys_are_joined_by_it(name: str, backend: str) -> None:
    encoding = create(name, heads=4, head_dim=8)
    q, k, v = inputs(9, 12)
    query, key = Layout.sequence(9), Layout.sequence(12)
    whole, total = attend(
        q, k, v, Grid(query, key, True), encoding, backend=backend, return_lse=True
    )
    assert total.dtype == torch.float32
    assert total.requires_grad == (backend == "reference")
    parts = [
        attend(
            q,
            k[:, :, a:b],
            v[:, :, a:b],
            Grid(query, key.slice(a, b), True),
            encoding,
            backend=backend,
            return_lse=True,
        )
        for a, b in ((0, 5), (5, 12))
    ]
    sums = torch.stack([lse for _, lse in parts])
    assert sums[1, :, :, :5].isneginf().all()  # the first queries see none of the second part
    torch.testing.assert_close(sums.logsumexp(0), total)
    weights = (sums - total).exp().unsqueeze(-1)
    joined = sum(out * weight for (out, _), weight in zip(parts, weights, strict=True))
    torch.testing.assert_close(joined, whole, atol=1e-5, rtol=1e-5)
    plain = attend(q, k, v, Grid(query, key, True), encoding, backend=backend)
    torch.testing.assert_close(whole, plain, atol=0, rtol=0)


def test_its_gradient_is_right_in_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(5, 5)
    grid = Grid.of(Layout.padded([5, 3], side="left"), causal=True)
    found = []
    for budget in (2**23, 40):  # all queries at once, and one at a time
        monkeypatch.setattr(definition, "BUDGET", budget)
        _, lse = attend(q, k, v, grid, Encoding(), backend="reference", return_lse=True)
        finite = lse.masked_fill(lse.isneginf(), 0)
        found.append(torch.autograd.grad(finite.square().sum(), (q, k)))
        assert all(gradient.isfinite().all() for gradient in found[-1])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    logits = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    logits = logits.masked_fill(~grid.visible, -torch.inf)
    expected = torch.stack([row.logsumexp(-1) for row in logits.unbind()])
    torch.testing.assert_close(lse, expected)


def test_weights_that_no_softmax_makes_have_none() -> None:
    q, k, v = inputs(5, 5)
    grid = Grid.of(Layout.sequence(5), causal=True)
    with pytest.raises(ArgumentError, match="return_lse: expected False with StickBreaking"):
        attend(q, k, v, grid, create("stick_breaking"), return_lse=True)
