"""Sums of exponentiated logits beside the output; ``lse_is_of_all_logits`` tries every encoding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, create
from posenc.attention.backends import sdpa
from posenc.attention.backends.common import definition
from posenc.attention.problem.problem import Problem
from posenc.errors import ArgumentError
from posenc.testing.backend_laws import serving

ENCODINGS = {
    "rope": {"head_dim": 8},
    "alibi": {"heads": 4},
    "t5": {"heads": 4, "max_distance": 6, "buckets": 8, "causal": True},
    "shaw": {"head_dim": 8, "max_distance": 3},
}


def inputs(queries: int, keys: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((4, queries), (2, keys), (2, keys))
    return [torch.randn(2, *shape, 8).requires_grad_() for shape in shapes]


def test_no_backend_computes_logits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("computed from the definition")

    monkeypatch.setattr(sdpa, "lse_by_definition", refuse)
    monkeypatch.setattr(definition, "lse_by_definition", refuse)
    layouts = (Layout.sequence(12), Layout.packed([5, 7]), Layout.padded([12, 4], side="left"))
    q, k, v = inputs(12, 12)
    for layout in layouts:
        grid = Grid.of(layout, causal=True)
        for name, options in ENCODINGS.items():
            encoding = create(name, **options)
            for backend in sorted({"sdpa", "blockwise"} & {*serving(q, k, v, grid, encoding)}):
                attend(q, k, v, grid, encoding, backend=backend, return_lse=True)


def test_function_transforms_have_it() -> None:
    q, k, v = (x.detach() for x in inputs(9, 9))
    grid = Grid.of(Layout.sequence(9), causal=True)
    encoding = create("rope", head_dim=8)
    expected = attend(q, k, v, grid, encoding, backend="reference", return_lse=True)

    def one(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        operands = (x.unsqueeze(0) for x in (q, k, v))
        output, lse = attend(*operands, grid, encoding, return_lse=True)
        return output[0], lse[0]

    for got, want in zip(torch.vmap(one)(q, k, v), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_its_gradient_is_right_in_reference() -> None:
    q, k, v = inputs(5, 5)
    grid = Grid.of(Layout.padded([5, 3], side="left"), causal=True)
    _, lse = attend(q, k, v, grid, Encoding(), backend="reference", return_lse=True)
    finite = lse.masked_fill(lse.isneginf(), 0)
    found = torch.autograd.grad(finite.square().sum(), (q, k))
    logits = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    logits = logits.masked_fill(~grid.visible, -torch.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1))
    seen = grid.visible.any(-1).expand(lse.shape)
    loss = logits.exp().sum(-1)[seen].log().square().sum()
    for got, want in zip(found, torch.autograd.grad(loss, (q, k)), strict=True):
        torch.testing.assert_close(got, want)


def test_half_precision_is_summed_in_single() -> None:
    q, k, v = (x.detach().bfloat16() for x in inputs(12, 12))
    grid = Grid.of(Layout.sequence(12), causal=True)
    encoding = create("alibi", heads=4)
    _, expected = attend(q, k, v, grid, encoding, backend="reference", return_lse=True)
    for backend in ("sdpa", "blockwise"):
        output, lse = attend(q, k, v, grid, encoding, backend=backend, return_lse=True)
        assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(lse, expected, atol=1e-4, rtol=1e-4)


def test_over_no_keys_it_is_minus_infinity() -> None:
    q, k, v = inputs(5, 3)
    grid = Grid(Layout.sequence(5), Layout.sequence(3).slice(0, 0))
    output, lse = attend(q, k[:, :, :0], v[:, :, :0], grid, Encoding(), return_lse=True)
    assert output.shape == (2, 4, 5, 8)
    assert lse.shape == (2, 4, 5)
    assert lse.isneginf().all()


def test_weights_that_no_softmax_makes_have_none() -> None:
    q, k, v = inputs(5, 5)
    grid = Grid.of(Layout.sequence(5), causal=True)
    with pytest.raises(ArgumentError, match="return_lse: expected False with StickBreaking"):
        attend(q, k, v, grid, create("stick_breaking"), return_lse=True)


def sums_by_definition(budget: int) -> Tensor:
    q, k, v = inputs(5, 5)
    grid = Grid.of(Layout.padded([5, 3], side="left"), causal=True)
    problem = Problem(q, k, v, grid, Encoding(), 0.3, 0.0, ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(definition, "BUDGET", budget)
        return definition.lse_by_definition(problem)


def test_sums_are_the_same_one_query_at_a_time() -> None:
    torch.testing.assert_close(sums_by_definition(40), sums_by_definition(2**23))
