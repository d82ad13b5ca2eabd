"""Linear attention against its quadratic form, one query at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from posenc import Encoding, Grid, Layout, create
from posenc.attention.extra.linear import Features, LinearAttention, attend_linear
from posenc.attention.prefix_sums import LinearState
from posenc.errors import ArgumentError, UnknownNameError
from posenc.testing.oracles import rotate_by_loops
from tests.support.exhaustive import in_turn

FEATURES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "elu": (lambda q: torch.nn.functional.elu(q) + 1, lambda k: torch.nn.functional.elu(k) + 1),
    "softmax": (lambda q: q.softmax(-1), torch.exp),
}
GRIDS = {
    "causal": Grid.of(Layout.sequence(11), causal=True),
    "both ways": Grid.of(Layout.sequence(11)),
    "one token": Grid.of(Layout.sequence(1), causal=True),
    "more keys": Grid(Layout.sequence(3, start=6), Layout.sequence(9), causal=True),
    "more queries": Grid(Layout.sequence(9), Layout.sequence(5, start=2), causal=True),
    "more keys from one start": Grid(Layout.sequence(4), Layout.sequence(9), causal=True),
    "more queries from one start": Grid(Layout.sequence(9), Layout.sequence(4), causal=True),
    "fractions": Grid.of(Layout.at(torch.tensor([0.0, 0.5, 2.25, 9.75])), causal=True),
    "packed": Grid.of(Layout.packed([3, 1, 6, 2]), causal=True),
    "packed both ways": Grid.of(Layout.packed([3, 1, 6, 2])),
    "left padding": Grid.of(Layout.padded([2, 9], side="left"), causal=True),
    "right padding": Grid.of(Layout.padded([2, 9]), causal=True),
    "padding both ways": Grid.of(Layout.padded([2, 9])),
    "all padding": Grid.of(Layout.padded([0, 3]), causal=True),
    "shuffled": Grid.of(
        Layout(
            torch.randperm(10, generator=torch.Generator().manual_seed(0)).float().view(1, 10, 1),
            torch.tensor([[4, 4, 0, 7, 1, 1, 9, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]),
            document=torch.tensor([[5, 1, 1, 5, 5, 1, 1, 5, 1, 5], [0, 0, 0, 0, 2, 2, 2, 1, 1, 1]]),
            valid=torch.tensor([[True] * 8 + [False] * 2, [True, False] * 5]),
        ),
        causal=True,
    ),
}


def inputs(grid: Grid, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(heads: int, length: int, width: int) -> Tensor:
        shape = (2, heads, length, width)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    keys = grid.key.length
    return draw(4, grid.query.length, 8), draw(2, keys, 8), draw(2, keys, 5)


def quadratic(q: Tensor, k: Tensor, v: Tensor, grid: Grid, features: str, *, turn: bool) -> Tensor:
    """RoFormer's linear attention with all Q×K products written out."""
    of_query, of_key = FEATURES[features]
    q, k, v = of_query(q), of_key(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    seen = grid.visible
    below = (q @ k.mT * seen).sum(-1, keepdim=True)
    if turn:
        q, k = _rotate(q, grid.query), _rotate(k, grid.key)
    return ((q @ k.mT * seen) @ v / below.where(below > 0, 1.0)) * (below > 0)


def _rotate(x: Tensor, layout: Layout) -> Tensor:
    theta = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turns = torch.polar(torch.ones(()).double(), (layout.positions.double() * theta).unsqueeze(1))
    turned = torch.complex(*x.chunk(2, dim=-1)) * turns
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize(
    ("grid", "name", "features", "chunk"),
    in_turn(4, GRIDS, list(product(("rope", "nope"), FEATURES)), [1, 4, 64]),
)
def test_equals_its_quadratic_form(grid: Grid, name: str, features: str, chunk: int) -> None:
    operands = tuple(x.requires_grad_() for x in inputs(grid))
    encoding = create(name, head_dim=8)
    got = attend_linear(*operands, grid, encoding, features=features, chunk=chunk)  # type: ignore[arg-type]
    expected = quadratic(*operands, grid, features, turn=name == "rope")
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(x.sin().sum(), operands) for x in (got, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_the_oracle_rotates_as_the_loops_do() -> None:
    x, layout = torch.randn(1, 2, 4, 8).double(), Layout.sequence(4, start=3)
    torch.testing.assert_close(_rotate(x, layout), rotate_by_loops(x, layout.positions))


def test_two_tokens_by_hand() -> None:
    # φ(0) = 1. Width 2 and one radian a token: queries and keys are (1, 1) turned by 0 and by 1.
    # Token 1 weighs token 0 by 2 cos 1 / 4 and itself by 2 / 4.
    zero = torch.zeros(1, 1, 2, 2)
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).reshape(1, 1, 2, 2)
    grid = Grid.of(Layout.sequence(2), causal=True)
    got = attend_linear(zero, zero, v, grid, create("rope", head_dim=2))
    expected = torch.tensor([[1.0, 0.0], [math.cos(1) / 2, 0.5]])
    torch.testing.assert_close(got[0, 0], expected)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("sizes", [[1] * 12, [5, 1, 6]])
@pytest.mark.parametrize(
    "layout",
    [
        Layout.sequence(12, start=3),
        Layout.padded([12, 7], side="left"),
        Layout.padded([12, 7]),
        Layout.packed([4, 3, 5]),
        Layout.from_attention_mask(torch.tensor([[1] * 4 + [0] * 3 + [1] * 5, [1] * 12])),
    ],
    ids=["sequence", "left padding", "right padding", "packed", "a gap"],
)
def test_decoding_equals_one_pass(layout: Layout, sizes: list[int], features: str) -> None:
    grid = Grid.of(layout, causal=True)
    operands = inputs(grid)
    rope = create("rope", head_dim=8)
    whole = attend_linear(*operands, grid, rope, features=features)  # type: ignore[arg-type]
    state, parts, begin = LinearState(), [], 0
    for size in sizes:
        here = layout.slice(begin, begin + size)
        part = [x[:, :, begin : begin + size] for x in operands]
        parts.append(
            attend_linear(*part, Grid.of(here, causal=True), rope, features=features, state=state)  # type: ignore[arg-type]
        )
        begin += size
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, atol=1e-6, rtol=1e-6)


def test_the_state_does_not_grow() -> None:
    state, sizes = LinearState(), set()
    rope = create("rope", head_dim=8)
    for start in range(5):
        grid = Grid.of(Layout.sequence(1, start), causal=True)
        attend_linear(*inputs(grid), grid, rope, state=state)
        assert state.memory is not None
        sizes.add(state.memory.total.numel() + state.memory.norm.numel())
    assert sizes == {2 * 4 * 8 * (5 + 1)}


@pytest.mark.parametrize("features", FEATURES)
def test_beams_are_reordered(features: Features) -> None:
    """With the document that each was in."""
    documents = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
    layout = replace(Layout.sequence(6), document=documents, start=None)
    rope, state, other = create("rope", head_dim=8), LinearState(), LinearState()
    rows = torch.tensor([1, 1, 0])
    now, then = layout.slice(0, 3), layout.slice(3, 6)
    operands, others = inputs(Grid.of(now)), inputs(Grid.of(then))
    attend_linear(*operands, Grid.of(now, causal=True), rope, features=features, state=state)
    state.select(rows)
    for part, tensors in ((now, operands), (then, others)):
        grid = Grid.of(part.select(rows), causal=True)
        given = [x[rows] for x in tensors]
        expected = attend_linear(*given, grid, rope, features=features, state=other)
    got = attend_linear(*given, grid, rope, features=features, state=state)
    torch.testing.assert_close(got, expected)


def test_padding_does_not_drown_keys_far_below_zero() -> None:
    """exp(k) is divided by the largest key that a query sees, which no hidden one is."""
    grid = Grid.of(Layout.padded([3, 6]), causal=True)
    q, k, v = inputs(grid)
    expected = quadratic(q, k, v, grid, "softmax", turn=False)
    got = attend_linear(q, k - 1000, v, grid, Encoding(), features="softmax")
    torch.testing.assert_close(got, expected)


def test_gradients_stop_where_the_state_was_detached() -> None:
    grid, then = (Grid.of(Layout.sequence(3, s), causal=True) for s in (0, 3))
    state = LinearState()
    operands = [x.requires_grad_() for x in inputs(grid)]
    attend_linear(*operands, grid, Encoding(), state=state)
    attended = attend_linear(*inputs(then), then, Encoding(), state=state)
    assert attended.requires_grad
    state = LinearState()
    attend_linear(*operands, grid, Encoding(), state=state)
    state.detach()
    assert not attend_linear(*inputs(then), then, Encoding(), state=state).requires_grad


class Written(TorchDispatchMode):
    """Counts the numbers that all operations write, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and not x._is_view():
                self.numbers += x.numel()
        return out


LONG = {
    "causal": lambda n: Grid.of(Layout.sequence(n), causal=True),
    "both ways": lambda n: Grid.of(Layout.sequence(n)),
    "packed": lambda n: Grid.of(Layout.packed([n // 4, 3 * n // 4]), causal=True),
}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("grid", LONG.values(), ids=LONG)
def test_time_is_linear(grid: Callable[[int], Grid], features: str) -> None:
    """Multiplications and numbers written, forward and backward, double with the length."""

    def count(length: int) -> tuple[int, int]:
        operands = [torch.randn(1, 1, length, 8).requires_grad_() for _ in range(3)]
        layout, rope = grid(length), create("rope", head_dim=8)
        with FlopCounterMode(display=False) as flops, Written() as written:
            attend_linear(*operands, layout, rope, features=features).sum().backward()  # type: ignore[arg-type]
        return flops.get_total_flops(), written.numbers

    for short, long in zip(count(1024), count(2048), strict=True):
        assert 1.9 * short < long < 2.1 * short


def test_a_large_key_ahead_does_not_drown_the_past() -> None:
    """exp(k) is divided by the largest key a query sees, not by the largest of the row."""
    grid = Grid.of(Layout.sequence(6), causal=True)
    q, k, v = inputs(grid, torch.float32)
    loud = k.clone()
    loud[:, :, 4:] += 300.0
    rope = create("rope", head_dim=8)
    quiet, got = (attend_linear(q, x, v, grid, rope, features="softmax") for x in (k, loud))
    torch.testing.assert_close(got[:, :, :4], quiet[:, :, :4])
    assert got.isfinite().all()
    expected = quadratic(*(x.double() for x in (q, loud, v)), grid, "softmax", turn=True)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-4)


def test_elu_keeps_what_is_far_below_zero() -> None:
    """elu(x) + 1 written out is 0 in float32 below -17; its ratios still matter."""
    grid = Grid.of(Layout.sequence(2), causal=True)
    low = torch.full((1, 1, 2, 2), -30.0)
    v = torch.tensor([1.0, 3.0]).reshape(1, 1, 2, 1)
    got = attend_linear(low, low, v, grid, Encoding())
    torch.testing.assert_close(got.flatten(), torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_in_float32(dtype: torch.dtype) -> None:
    """In float16 four of these products, 2 · 101² each, already add up to infinity."""
    x, v = torch.full((1, 1, 200, 2), 100, dtype=dtype), torch.ones(1, 1, 200, 1, dtype=dtype)
    got = attend_linear(x, x, v, Grid.of(Layout.sequence(200), causal=True), Encoding(), chunk=64)
    assert got.dtype == dtype
    torch.testing.assert_close(got, torch.ones_like(got))


def test_autocast_changes_nothing() -> None:
    grid = Grid.of(Layout.sequence(40), causal=True)
    operands = inputs(grid, torch.float32)
    rope = create("rope", head_dim=8)
    expected = attend_linear(*operands, grid, rope)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(attend_linear(*operands, grid, rope), expected)


def test_nothing_seen_gives_zeros_and_finite_gradients() -> None:
    grid = Grid(Layout.sequence(4), Layout.sequence(4, start=2), causal=True)
    operands = [x.requires_grad_() for x in inputs(grid)]
    for features in ("elu", "softmax"):
        output = attend_linear(*operands, grid, Encoding(), features=features)  # type: ignore[arg-type]
        assert torch.equal(output[:, :, :2], torch.zeros_like(output[:, :, :2]))
        gradients = torch.autograd.grad(output.sum(), operands)
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_images() -> None:
    """Rotations on two axes serve as well, both ways, with a class token and masked cells."""
    mask = torch.tensor([[[True, True, False], [True, True, True]]])
    grid = Grid.of(Layout.image(2, 3, valid=mask, prefix=1))
    q, k, v = inputs(grid)
    axial = create("rope2d", head_dim=8)
    got = attend_linear(q, k, v, grid, axial)
    assert axial.query_key is not None
    of_query, of_key = FEATURES["elu"]
    turned_q, turned_k = axial.query_key(of_query(q), of_key(k).repeat_interleave(2, 1), grid)
    below = (of_query(q) @ of_key(k).repeat_interleave(2, 1).mT * grid.visible).sum(-1, True)
    weights = (turned_q @ turned_k.mT * grid.visible) / below.where(below > 0, 1.0)
    torch.testing.assert_close(got, weights @ v.repeat_interleave(2, 1), atol=1e-6, rtol=1e-6)


def test_the_layer() -> None:
    layer = LinearAttention(
        dim=24, heads=4, kv_heads=2, encoding=create("rope", head_dim=6), causal=True
    )
    x, state = torch.randn(2, 9, 24), LinearState()
    whole = layer(x, Layout.sequence(9))
    parts = [layer(x[:, i : i + 3], Layout.sequence(3, i), state=state) for i in (0, 3, 6)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    whole.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_consecutive_heads_of_the_layer_share_a_query() -> None:
    encoding = create("rope_pp", heads=4, head_dim=6)
    layer = LinearAttention(dim=24, heads=4, encoding=encoding, causal=True)
    x, grid = torch.randn(2, 9, 24), Grid.of(Layout.sequence(9), causal=True)
    q, k, v = (
        project(x).view(2, 9, 2, 6).transpose(1, 2)
        for project in (layer.query, layer.key, layer.value)
    )
    q = torch.stack([q[:, head // 2] for head in range(4)], dim=1)
    expected = attend_linear(q, k, v, grid, encoding).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x, grid.query), layer.output(expected))


def test_what_has_no_place_is_refused() -> None:
    layout = Layout.sequence(4)
    causal, both = Grid.of(layout, causal=True), Grid.of(layout)
    x = torch.randn(1, 2, 4, 8)
    rope = create("rope", head_dim=8)
    with pytest.raises(ArgumentError, match="score part, Alibi"):
        attend_linear(x, x, x, causal, create("alibi", heads=2))
    with pytest.raises(ArgumentError, match="window"):
        attend_linear(x, x, x, Grid.of(layout, causal=True, window=2), rope)
    with pytest.raises(ArgumentError, match="chunk"):
        attend_linear(x, x, x, causal, rope, chunk=0)
    with pytest.raises(ArgumentError, match="causal=False"):
        attend_linear(x, x, x, both, rope, state=LinearState())
    with pytest.raises(ArgumentError, match="Xpos"):
        attend_linear(x, x, x, causal, create("xpos", head_dim=8), state=LinearState())
    with pytest.raises(UnknownNameError, match="softmax"):
        attend_linear(x, x, x, causal, rope, features="softmx")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="kv_heads"):
        LinearAttention(dim=24, heads=4, kv_heads=3, encoding=rope)
