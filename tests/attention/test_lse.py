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

HALVES = ((0, 5), (5, 12))


def inputs(queries: int, keys: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((4, queries), (2, keys), (2, keys))
    return [torch.randn(2, *shape, 8).requires_grad_() for shape in shapes]


def spread(encoding: Encoding) -> Encoding:
    """With parameters off their initial values, where terms are zero."""
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    return encoding


def served() -> list[tuple[str, str]]:
    """Encodings, each with the backends that serve it."""
    sequence = Layout.sequence(12)
    grid = Grid(sequence.slice(0, 9), sequence, True)
    return [
        (name, backend)
        for name, options in ENCODINGS.items()
        for backend in serving(*inputs(9, 12), grid, create(name, **options))
    ]


@pytest.mark.parametrize(("name", "backend"), served())
def test_outputs_over_parts_of_the_keys_are_joined_by_it(name: str, backend: str) -> None:
    encoding = spread(create(name, **ENCODINGS[name]))
    q, k, v = inputs(9, 12)
    query, key = Layout.sequence(9), Layout.sequence(12)
    grid = Grid(query, key, True)
    whole, whole_lse = attend(q, k, v, grid, encoding, backend=backend, return_lse=True)
    assert whole_lse.dtype == torch.float32
    outputs, sums = [], []
    for a, b in HALVES:
        part = Grid(query, key.slice(a, b), True)
        operands = (q, k[:, :, a:b], v[:, :, a:b])
        output, lse = attend(*operands, part, encoding, backend=backend, return_lse=True)
        outputs.append(output)
        sums.append(lse)
    assert sums[1][:, :, :5].isneginf().all()  # the first queries see none of the second part
    torch.testing.assert_close(torch.stack(sums).logsumexp(0), whole_lse)
    weights = torch.stack(sums).softmax(0).unsqueeze(-1)
    joined = (torch.stack(outputs) * weights).sum(0)
    torch.testing.assert_close(joined, whole, atol=1e-5, rtol=1e-5)
    tensors = [q, k, v, *encoding.parameters()]
    expected = torch.autograd.grad(whole.sin().sum(), tensors, None, True, allow_unused=True)
    gradients = torch.autograd.grad(joined.sin().sum(), tensors, allow_unused=True)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    plain = attend(q, k, v, grid, encoding, backend=backend)
    torch.testing.assert_close(whole, plain, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", ["sdpa", "blockwise"])
def test_gradients_of_the_output_are_those_without_it(backend: str) -> None:
    layout = Layout.padded([12, 5], side="left")
    q, k, v = inputs(12, 12)
    encoding = create("rope", head_dim=8)
    found = []
    for lse in (False, True):
        given = attend(
            q, k, v, Grid.of(layout, causal=True), encoding, backend=backend, return_lse=lse
        )
        output = given[0] if isinstance(given, tuple) else given
        found.append(torch.autograd.grad(output.square().sum(), (q, k, v)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


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


def test_images() -> None:
    encoding = spread(create("swin", heads=4, window=(5, 6)))
    q, k, v = inputs(30, 30)
    grid = Grid.of(Layout.image(5, 6))
    expected = attend(q, k, v, grid, encoding, backend="reference", return_lse=True)
    found = attend(q, k, v, grid, encoding, backend="blockwise", return_lse=True)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("grid", [Layout.sequence(12), Layout.padded([12, 4])])
def test_dropout_does_not_change_it(grid: Layout) -> None:
    q, k, v = inputs(12, 12)
    encoding = spread(create("t5", **ENCODINGS["t5"]))
    whole = Grid.of(grid, causal=True)
    _, expected = attend(q, k, v, whole, encoding, backend="reference", return_lse=True)
    for backend in ("blockwise", "reference"):
        _, lse = attend(q, k, v, whole, encoding, backend=backend, dropout=0.5, return_lse=True)
        torch.testing.assert_close(lse, expected, atol=1e-5, rtol=1e-5)


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
