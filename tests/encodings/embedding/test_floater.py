"""FLOATER against torchdiffeq at a tight tolerance, on the equation written out in loops."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torchdiffeq
from torch import Tensor

from posenc import Layout
from posenc.encodings.embedding import floater
from posenc.encodings.embedding.floater import ENTRY, Floater, Method
from posenc.encodings.embedding.sinusoidal import Sinusoidal
from posenc.errors import ArgumentError
from posenc.models import Decoder, DecoderConfig
from posenc.testing import LAWS, Subject
from tests.encodings.floaters import count_evaluations, make
from tests.support.exhaustive import in_turn

METHODS: tuple[Method, ...] = ("rk4", "dopri5")


def equation(encoding: Floater, time: float, p: list[float]) -> list[float]:
    """h(t, p), one product at a time."""
    flow, dim = encoding.flow, len(p)
    first, first_bias, second, second_bias = (w.tolist() for w in encoding.dynamics())
    told = [*p, flow.unit * time]
    hidden = []
    for row, bias in zip(first, first_bias, strict=True):
        value = bias + sum(weight * feature for weight, feature in zip(row, told, strict=True))
        hidden.append(math.tanh(value) if flow.activation == "tanh" else max(value, 0.0))
    told = [*hidden, flow.unit * time]
    change = []
    for row, bias in zip(second, second_bias, strict=True):
        value = bias + sum(weight * feature for weight, feature in zip(row, told, strict=True))
        change.append(flow.unit * value)
    if flow.rotary:
        for t in range(dim // 2):
            rate = 10000.0 ** (-2 * t / dim)
            change[2 * t] += rate * p[2 * t + 1]
            change[2 * t + 1] -= rate * p[2 * t]
    return change


def exact(encoding: Floater, times: list[float]) -> Tensor:
    """p at ascending times from 0, by another method at a tight tolerance."""

    def field(time: Tensor, p: Tensor) -> Tensor:
        return torch.tensor(equation(encoding, time.item(), p.tolist()), dtype=torch.float64)

    start = encoding.start.detach()
    asked = torch.tensor(times, dtype=torch.float64)
    found: Tensor = torchdiffeq.odeint(field, start, asked, method="dopri8", rtol=1e-8, atol=1e-8)
    return found


def test_times_are_not_rounded_as_features_are() -> None:
    """bfloat16 has even numbers alone between 256 and 512."""
    times, x = torch.tensor([257.0, 300.5]), torch.zeros(1, 2, 6)
    encoding = make(dim=6, step=32.0).requires_grad_(requires_grad=False)
    expected = encoding(x.double(), Layout.at(times.double()))
    rounded = encoding(x.double(), Layout.at(times.bfloat16().double()))
    assert ((rounded - expected).abs().amax(-1) > 0.3).all()
    for layout in (Layout.at(times), Layout.at(times.double())):
        found = encoding.bfloat16()(x.bfloat16(), layout)
        torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("dim", "start", "activation"),
    [
        (1, "sinusoidal", "tanh"),
        (5, "sinusoidal", "relu"),
        (6, "sinusoidal", "tanh"),
        (5, "random", "tanh"),
        (6, "random", "relu"),
    ],
)
def test_equals_the_equation_solved_tightly(dim: int, start: str, activation: str) -> None:
    times = [0.0, 0.5, 0.75, 2.0, 3.3]
    x = torch.randn(1, 5, dim, dtype=torch.float64)
    layout = Layout.at(torch.tensor(times, dtype=torch.float64))
    by_steps = make(dim=dim, start=start, activation=activation, step=0.05)
    adaptive = make(dim=dim, start=start, activation=activation, method="dopri5", tolerance=1e-8)
    expected = exact(by_steps, times)
    for encoding in (by_steps, adaptive):
        got = encoding(x, layout) - x
        torch.testing.assert_close(got[0], expected, rtol=1e-4, atol=1e-4)


def test_a_number_by_hand() -> None:
    """``dp/dt = p`` by Euler's steps of a half: 1, 1.5, 2.25; and a quarter step between them."""
    encoding = Floater(
        dim=1, start="random", activation="relu", method="euler", step=0.5, unit=0.5
    ).requires_grad_(False)
    for parameter, values in (
        (encoding.start, [1.0]),
        (encoding.dynamics.first_weight, [[1.0, 0.0]]),
        (encoding.dynamics.second_weight, [[2.0, 0.0]]),
    ):
        parameter.copy_(torch.tensor(values))
    path = encoding.path(torch.tensor([[0.0, 0.5, 1.0, 0.75]]))
    assert path.flatten().tolist() == [1.0, 1.5, 2.25, 1.875]


@pytest.mark.parametrize(("method", "dim"), in_turn(1, METHODS, [2, 8, 48]))
def test_starts_as_the_sinusoidal_encoding(method: Method, dim: int) -> None:
    times = torch.tensor([[0.0, 0.25, 1.0, 37.5, 511.0, -3.0]], dtype=torch.float64)
    got = Floater(dim=dim, method=method).path(times)
    torch.testing.assert_close(got, Sinusoidal(dim=dim).table(times), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "order", "start"),
    in_turn(1, [("euler", 1), ("midpoint", 2), ("rk4", 4)], ["sinusoidal", "random"]),
)
def test_order_of_the_solver_shows(method: Method, order: int, start: str) -> None:
    """Halving the step divides the error by 2^order, at knots and between them."""
    times = torch.tensor([[1.0, 2.0, 1.3]], dtype=torch.float64)
    reference = make(start=start, method="rk4", step=1 / 256).path(times)
    errors = []
    for step in (1 / 8, 1 / 16):
        path = make(start=start, method=method, step=step).path(times)
        errors.append((path - reference).abs().amax(-1))
    rates = torch.log2(errors[0] / errors[1])
    assert rates[..., :2].sub(order).abs().max().item() < 0.4
    assert rates[..., 2].item() > order - 1


@pytest.mark.parametrize("method", METHODS)
def test_a_position_does_not_depend_on_which_others_are_asked(method: Method) -> None:
    encoding = make(method=method, tolerance=1e-3, unit=0.05)
    times = torch.tensor([[0.0, 3.5, 63.9, 64.0, 70.25, 130.0, -2.5, -65.0]], dtype=torch.float64)
    together = encoding.path(times)
    for index in range(times.shape[1]):
        alone = encoding.path(times[:, index : index + 1])
        torch.testing.assert_close(alone, together[:, index : index + 1], rtol=1e-12, atol=1e-12)
    among_others = encoding.path(torch.cat([times, torch.rand(1, 9) * 200], dim=1))
    torch.testing.assert_close(among_others[:, :8], together, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("step", [0.3, 1.0, 4.0])
def test_the_path_is_continuous_where_steps_meet(step: float) -> None:
    encoding = make(step=step)
    knots = step * torch.arange(-3, 4, dtype=torch.float64).unsqueeze(0)
    at, before, after = (encoding.path(knots + by) for by in (0.0, -1e-9, 1e-9))
    torch.testing.assert_close(before, at, rtol=0, atol=1e-7)
    torch.testing.assert_close(after, at, rtol=0, atol=1e-7)


def test_times_before_0_are_solved_backwards() -> None:
    """From p(-2) the equation leads to p(0)."""
    encoding = make(method="dopri5", tolerance=1e-8, unit=0.1)
    earlier = encoding.path(torch.tensor([[-2.0]])).flatten()

    def field(time: Tensor, p: Tensor) -> Tensor:
        return torch.tensor(equation(encoding, time.item(), p.tolist()), dtype=torch.float64)

    times = torch.tensor([-2.0, 0.0], dtype=torch.float64)
    end = torchdiffeq.odeint(field, earlier.detach(), times, rtol=1e-8, atol=1e-8)[-1]
    torch.testing.assert_close(end, encoding.start.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_cost_does_not_grow_with_rows_or_batches(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_evaluations(monkeypatch)
    encoding = make(method=method, tolerance=1e-3)
    counts = []
    for rows in (1, 50):
        for _ in range(2):
            calls.clear()
            encoding(torch.zeros(rows, 9, 6), Layout.at(torch.arange(9.0).expand(rows, 9)))
            counts.append(len(calls))
    assert max(counts) == counts[0]
    calls.clear()
    encoding(torch.zeros(50, 9, 6), Layout.at(torch.rand(50, 9) * 8))
    assert len(calls) <= counts[0] + 4, "450 distinct times take one shorter step more"


@pytest.mark.parametrize("method", METHODS)
def test_adjoint_gradients_are_the_direct_ones(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At several times in a segment and past it, of segments of two tokens."""
    monkeypatch.setattr(floater, "SEGMENT", 2)
    times = torch.tensor([[0.0, 0.5, 1.25, 2.5, -0.5]], dtype=torch.float64)
    found = []
    for gradient in ("direct", "adjoint"):
        encoding = make(method=method, step=0.05, tolerance=1e-7, gradient=gradient)
        path = encoding.path(times)
        found.append((path, *torch.autograd.grad(path.sin().sum(), list(encoding.parameters()))))
    for direct, adjoint in zip(*found, strict=True):
        torch.testing.assert_close(adjoint, direct, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("start", ["sinusoidal", "random"])
def test_time_carries_a_gradient(start: str) -> None:
    encoding = make(start=start, method="dopri5", tolerance=1e-3)
    times = torch.tensor([[0.0, 2.5, 2.5]], dtype=torch.float64, requires_grad=True)
    path = encoding.path(times)
    path.sum().backward()
    assert times.grad is not None
    for index in range(3):
        p = path[0, index].tolist()
        expected = sum(equation(encoding, times[0, index].item(), p))
        assert times.grad[0, index].item() == pytest.approx(expected, abs=1e-9)


def test_enters_every_block() -> None:
    config = DecoderConfig(vocabulary=11, dim=8, layers=3, heads=2, encoding="floater")
    torch.manual_seed(0)
    model = Decoder(config).eval()
    tokens = torch.arange(5).unsqueeze(0)
    before = model(tokens)
    for encoding in model.encodings:
        assert isinstance(encoding.embedding, Floater)
        kept = encoding.embedding.start.detach().clone()
        with torch.no_grad():
            encoding.embedding.start.add_(1.0)
            assert not torch.allclose(model(tokens), before, atol=1e-4)
            encoding.embedding.start.copy_(kept)
    torch.testing.assert_close(model(tokens), before)


def test_random_start_has_the_official_initial_values() -> None:
    torch.manual_seed(0)
    encoding = Floater(dim=200, start="random")
    assert encoding.dynamics.first_weight.std().item() == pytest.approx((2 / 401) ** 0.5, rel=0.02)
    assert encoding.dynamics.second_weight.std().item() == pytest.approx((2 / 401) ** 0.5, rel=0.02)
    assert encoding.dynamics.first_bias.abs().max().item() == 0.0
    assert encoding.start.abs().max().item() <= (6 / 201) ** 0.5
    assert encoding.start.abs().max().item() > 0.9 * (6 / 201) ** 0.5


@pytest.mark.parametrize(
    "law", ["cached_is_full", "packed_is_separate", "padded_is_unpadded", "rows_are_independent"]
)
def test_laws_of_the_adaptive_method(law: str) -> None:
    LAWS[law](Subject.of_entry("floater", ENTRY, method="dopri5", tolerance=1e-3))


def test_without_torchdiffeq_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ArgumentError, match=r"pip install 'posenc\[ode\]'"):
        Floater(dim=4)


@pytest.mark.parametrize("method", ["euler", "midpoint", "rk4"])
def test_autograd_saves_no_state_of_fixed_steps(method: Method) -> None:
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        make(dim=4, method=method, start="random").path(torch.tensor([[640.0]]).double())
    assert sum(saved) < 100  # of indexing, casting and the rotation
