"""Recursive positions against step-by-step loops and PyTorch's own GRU cell."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from posenc import Layout
from posenc.encodings.common.recurrence import linear_orbit
from posenc.encodings.embedding.recursive import (
    ENTRY,
    FreeStep,
    GatedStep,
    LinearStep,
    Recursive,
    StepKind,
)
from posenc.encodings.embedding.sinusoidal import Sinusoidal
from posenc.testing import LAWS, Subject
from tests.testing.test_laws import OF_ATTENTION

KINDS: tuple[StepKind, ...] = ("linear", "free", "gru")


def make(kind: StepKind, *, dim: int = 6, noise: float = 0.2) -> Recursive:
    torch.manual_seed(3)
    encoding = Recursive(dim=dim, step=kind)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(noise * torch.randn(parameter.shape))
    return encoding.double()


def transition(step: LinearStep) -> Tensor:
    """A from the definition, by an explicit inverse."""
    dim = len(step.start)
    one = torch.eye(dim, dtype=step.weight.dtype)
    free = isinstance(step, FreeStep)
    begin = one.clone() if free else torch.zeros_like(one)
    for t in range(dim // 2):
        angle = 10000.0 ** (-2 * t / dim)
        if free:
            begin[2 * t, 2 * t] = begin[2 * t + 1, 2 * t + 1] = math.cos(angle)
        begin[2 * t, 2 * t + 1] = math.sin(angle) if free else math.tan(angle / 2)
        begin[2 * t + 1, 2 * t] = -begin[2 * t, 2 * t + 1]
    if free:
        return begin + step.weight
    skew = begin + step.weight - step.weight.T
    return (one + skew) @ torch.linalg.inv(one - skew)


def stepwise(encoding: Recursive) -> Iterator[Tensor]:
    """``p_0, p_1, …``, one step at a time."""
    step = encoding.recursion
    vector = step.start
    if isinstance(step, GatedStep):
        cell = nn.GRUCell(1, len(vector)).double()
        with torch.no_grad():
            cell.weight_ih.zero_()
        weights = {
            "weight_hh": step.recurrent,
            "bias_ih": step.input_bias,
            "bias_hh": step.state_bias,
        }
        while True:
            yield vector
            inputs = (vector.new_zeros(1), vector)
            vector = torch.func.functional_call(cell, weights, inputs)
    assert isinstance(step, LinearStep)
    A = transition(step)
    b = step.centre - A @ step.centre
    while True:
        yield vector
        vector = A @ vector + b


def first(encoding: Recursive, count: int) -> Tensor:
    vectors = stepwise(encoding)
    return torch.stack([next(vectors) for _ in range(count)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 2), (0, 33), (1, 1), (5, 9), (64, 65)])
def test_equals_step_by_step(kind: StepKind, start: int, length: int) -> None:
    encoding = make(kind, noise=0.05 if kind == "free" else 0.2)
    x = torch.randn(2, length, 6, dtype=torch.float64)
    got = encoding(x, Layout.sequence(length, start=start))
    expected = x + first(encoding, start + length)[start:]
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    weights = list(encoding.parameters())
    found, wanted = (
        torch.autograd.grad(side.sin().sum(), weights, materialize_grads=True, allow_unused=True)
        for side in (got, expected)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_irregular_positions_are_read_between_their_neighbours(kind: StepKind) -> None:
    encoding = make(kind, noise=0.05 if kind == "free" else 0.2)
    positions = torch.tensor([[0.0, 7.25, 3.0], [12.5, 11.0, 0.75]], dtype=torch.float64)
    got = encoding(torch.zeros(2, 3, 6, dtype=torch.float64), Layout.at(positions))
    vectors = first(encoding, 14)
    for row in range(2):
        for column in range(3):
            position = positions[row, column].item()
            low, share = math.floor(position), position % 1
            expected = (1 - share) * vectors[low] + share * vectors[low + 1]
            torch.testing.assert_close(got[row, column], expected, rtol=1e-9, atol=1e-9)


def test_far_apart_positions_need_no_table_between_them() -> None:
    encoding = make("linear")
    near = encoding.table(Layout.sequence(1, start=3_000_000))
    times = torch.tensor([0.0, 3_000_000.0, 17.0, 17.5], dtype=torch.float64)
    far = encoding.table(Layout.at(times))
    torch.testing.assert_close(far[:, 1:2], near, rtol=1e-7, atol=1e-7)
    vectors = first(encoding, 19)
    torch.testing.assert_close(far[0, 2], vectors[17], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(far[0, 3], (vectors[17] + vectors[18]) / 2, rtol=1e-8, atol=1e-8)


def test_position_carries_a_gradient() -> None:
    encoding = make("linear")
    positions = torch.tensor([[2.0, 4.5]], dtype=torch.float64, requires_grad=True)
    encoding.table(Layout.at(positions))[..., 0].sum().backward()
    vectors = first(encoding, 6)[:, 0]
    assert positions.grad is not None
    expected = torch.stack([vectors[3] - vectors[2], vectors[5] - vectors[4]])
    torch.testing.assert_close(positions.grad[0], expected)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        self.count += name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "matmul")
        return func(*args, **(kwargs or {}))


def test_65536_positions_take_under_20_products() -> None:
    encoding = make("linear")
    with torch.no_grad(), Products() as products:
        table = encoding.table(Layout.sequence(65536))
    assert table.shape == (1, 65536, 6)
    assert products.count == 16


def test_65536_positions_equal_step_by_step() -> None:
    encoding = make("linear").requires_grad_(False)
    got = encoding.table(Layout.sequence(65536))[0]
    vectors = stepwise(encoding)
    expected = torch.stack([next(vectors) for _ in range(65536)])
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


def test_a_number_by_hand() -> None:
    """A quarter turn about (1, 1): from (1, 0) to (0, 1), (1, 2), (2, 1), and round again."""
    start, centre = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    got = linear_orbit([start, centre, turn], 0, 6)
    assert got.tolist() == [[1, 0], [0, 1], [1, 2], [2, 1], [1, 0], [0, 1]]


@pytest.mark.parametrize("kind", ["linear", "free"])
@pytest.mark.parametrize("dim", [2, 6, 48])
def test_starts_as_the_sinusoidal_encoding(kind: StepKind, dim: int) -> None:
    layout = Layout.sequence(200, start=5000)
    got = Recursive(dim=dim, step=kind).table(layout)
    expected = Sinusoidal(dim=dim).table(layout.positions[..., 0].double())
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["linear", "free"])
def test_narrow_dtypes_do_not_round_the_initial_angles(kind: StepKind) -> None:
    """An angle kept in bfloat16 would be off by radians at position 5000."""
    encoding = Recursive(dim=16, step=kind)
    layout = Layout.sequence(3, start=5000)
    narrow = copy.deepcopy(encoding).bfloat16().table(layout)
    torch.testing.assert_close(narrow, encoding.table(layout), rtol=0, atol=0)


@pytest.mark.parametrize("dim", [1, 3, 7])
def test_odd_widths(dim: int) -> None:
    got = make("linear", dim=dim).table(Layout.sequence(40))
    torch.testing.assert_close(got[0], first(make("linear", dim=dim), 40), rtol=1e-9, atol=1e-9)


def test_stable_at_16_times_the_length_whatever_the_weights() -> None:
    """No training can make the vectors grow or fade: A stays a rotation."""
    for noise in (0.2, 3.0, 30.0):
        encoding = make("linear", dim=16, noise=noise).requires_grad_(False)
        step = encoding.recursion
        assert isinstance(step, LinearStep)
        A = transition(step)
        torch.testing.assert_close(A @ A.T, torch.eye(16, dtype=A.dtype), rtol=0, atol=1e-9)
        radius = (encoding.table(Layout.sequence(16 * 512))[0] - step.centre).norm(dim=-1)
        torch.testing.assert_close(radius, radius[0].expand_as(radius), rtol=1e-9, atol=1e-9)


def test_gradients_neither_grow_nor_vanish_with_the_position() -> None:
    encoding = make("linear", dim=8)
    far = encoding.table(Layout.sequence(1, start=16 * 512))
    sent = torch.randn_like(far)
    (gradient,) = torch.autograd.grad(far, [encoding.recursion.start], sent)
    torch.testing.assert_close(gradient.norm(), sent.norm())


def test_gru_stays_within_bounds() -> None:
    encoding = make("gru", noise=0.0).requires_grad_(False)
    assert encoding.table(Layout.sequence(4096)).abs().max().item() <= 1.0


def test_float32_parameters_are_exact_far_out() -> None:
    """Doubling in float32 would be off by a hundredth of a radian here."""
    encoding = make("linear", dim=16).float()
    exact = copy.deepcopy(encoding).double()
    layout = Layout.sequence(3, start=65536)
    x = torch.zeros(1, 3, 16)
    assert encoding(x, layout).dtype == torch.float32
    torch.testing.assert_close(
        encoding(x, layout).double(), exact(x.double(), layout), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        pytest.param(
            kind,
            law,
            marks=[pytest.mark.exhaustive]  # a product of matrices, as of the linear steps
            * (kind == "free" and law in {"compiles_once", "exports"}),
        )
        for kind in ("free", "gru")
        for law in LAWS
        if law not in OF_ATTENTION
    ],
)
def test_laws_of_the_other_steps(kind: StepKind, law: str) -> None:
    far_out = {
        "far_positions_are_exact",
        "half_precision_keeps_positions",
        "shift_is_as_claimed",
        "single_precision_is_double",
    }
    if kind == "free" and law in far_out:
        return  # with the laws' random weights a free A is as large as 10^100 at position 5000
    LAWS[law](Subject.of_entry("recursive", ENTRY, step=kind))


def test_padding_stands_nowhere() -> None:
    """Left padding is at negative positions, which do not exist; it reads position 0."""
    encoding = make("linear")
    layout = Layout.padded([2, 4], side="left")
    got = encoding.table(layout)
    torch.testing.assert_close(got[0, 2:], first(encoding, 2), rtol=1e-9, atol=1e-9)
