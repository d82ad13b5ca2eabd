"""Enformer's and Borzoi's features and logits against loops from their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.enformer import Enformer
from posenc.errors import ArgumentError
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, inputs

LENGTH = 40


def make(basis: str, **options: int) -> Enformer:
    torch.manual_seed(3)
    given = {"heads": 6, "head_dim": 8, "features": 12, "length": LENGTH} | options
    part = posenc.create("enformer", basis=basis, **given).score
    assert isinstance(part, Enformer)
    return part.double().requires_grad_(False)


def gamma_density(x: float, mean: float, deviation: float) -> float:
    shape, rate = (mean / deviation) ** 2, mean / deviation**2
    if x == 0:
        return 1e-8
    logarithm = (shape - 1) * math.log(x) - rate * x
    return math.exp(logarithm - math.lgamma(shape) + shape * math.log(rate)) + 1e-8


def features_of(offset: float, basis: str, count: int, length: int) -> Tensor:
    """r(Δ) from the equations, number by number."""
    x, of_kind = abs(offset), count // 6
    values: list[float] = []
    if basis == "borzoi":
        rate = (length + 1) ** (2 / count)
        values = [float(x < rate**t - 1) for t in range(1, count // 2 + 1)]
    else:
        longest, deviation = math.log2(length), 3 * length / count
        for t in range(of_kind):
            part = t / (of_kind - 1) if of_kind > 1 else 0.0
            values.append(0.5 ** (x / 2 ** (3 + part * (longest - 3))))
        values += [float(x < 2**t - 1) for t in range(1, of_kind + 1)]
        for t in range(of_kind):
            part = t / (of_kind - 1) if of_kind > 1 else 0.0
            mean = 2 * deviation + part * (length - 2 * deviation)
            most = max(gamma_density(y, mean, deviation) for y in range(length))
            values.append(gamma_density(x, mean, deviation) / most)
    sign = (offset > 0) - (offset < 0)
    return torch.tensor(values + [sign * value for value in values], dtype=torch.float64)


@pytest.mark.parametrize("basis", ["enformer", "borzoi"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops(grid: Grid, basis: str) -> None:
    q, k, v = inputs(grid)
    part = make(basis)
    u, w = part.biases.content, part.biases.position

    def logit(query: Tensor, key: Tensor, h: int, at: float, to: float) -> Tensor:
        row = part.weight[h] @ features_of(to - at, basis, 12, LENGTH)
        scaled = query / math.sqrt(8)
        return (scaled + u[h]) @ key + (scaled + w[h]) @ row

    expected = attention_by_loops(q, k, v, grid, logit=logit)
    got = attend(q, k, v, grid, Encoding(score=part), backend="reference")
    torch.testing.assert_close(got, expected)


def test_a_number_by_hand() -> None:
    # Borzoi, C = 2, n = 8: one mask, 1 where |Δ| < 8. q = 2, k = 3, u = 4, w = 5, W = (6, 7).
    part = make("borzoi", heads=1, head_dim=1, features=2, length=8)
    part.biases.content.fill_(4.0)
    part.biases.position.fill_(5.0)
    part.weight.copy_(torch.tensor([[[6.0, 7.0]]]))
    q, k = torch.tensor([[[[2.0]]]]).double(), torch.tensor([[[[3.0]]]]).double()

    def score(query: int, key: int) -> float:
        grid = Grid(Layout.sequence(1, start=query), Layout.sequence(1, start=key))
        return float(part(q, k, grid, scale=0.5))

    # q·k is attention's own; u·k = 12; (0.5 · 2 + 5) · (6 ± 7), both zero from 8 positions on.
    assert score(3, 5) == pytest.approx(12 + 6 * 13)
    assert score(5, 3) == pytest.approx(12 + 6 * -1)
    assert score(5, 5) == pytest.approx(12 + 6 * 6)
    assert score(0, 8) == pytest.approx(12)


def test_gammas_are_largest_at_their_modes() -> None:
    """(a - 1) / b = μ - σ²/μ, rounded to a position; the division makes each largest value 1."""
    part = make("enformer", features=24, length=96)
    _, even = part.odd_even(torch.arange(96.0))
    gammas, deviation = even[:, -4:], 3 * 96 / 24
    torch.testing.assert_close(gammas.amax(0), torch.ones(4, dtype=torch.float64))
    for t, mean in enumerate((24.0, 48.0, 72.0, 96.0)):
        mode = mean - deviation**2 / mean
        assert abs(float(gammas[:, t].argmax()) - min(mode, 95)) <= 1


def test_trained_length_shapes_the_features_whatever_is_read() -> None:
    part, longer = make("enformer"), make("enformer", length=80)
    offsets = torch.arange(4.0)
    assert not torch.equal(part.odd_even(offsets)[1], longer.odd_even(offsets)[1])
    far = part.odd_even(torch.tensor([float(100 * LENGTH)]))[1]
    assert far.max() < 1e-5


@pytest.mark.parametrize("features", [10, 7, 0])
def test_features_that_kinds_cannot_share_are_refused(features: int) -> None:
    with pytest.raises(ArgumentError, match="features"):
        make("enformer", features=features)


@pytest.mark.parametrize("basis", ["enformer", "borzoi"])
def test_equals_the_package(basis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "modeling_enformer" if basis == "enformer" else "pytorch_borzoi_transformer"
    theirs = pytest.importorskip(f"{basis}_pytorch.{module}", reason=f"needs {basis}-pytorch")
    heads, width, count = 2, 6, 32
    torch.manual_seed(0)
    layer = theirs.Attention(
        24, num_rel_pos_features=12, heads=heads, dim_key=width, dim_value=width
    )
    layer.eval().requires_grad_(False)
    torch.nn.init.normal_(layer.to_out.weight)
    if basis == "enformer":  # as in the published model, not by the largest at each distance

        def gammas(positions: Tensor, features: int, length: int, **_: object) -> Tensor:
            mean = torch.linspace(length / features, length, features)
            deviation = length / (2 * features)
            shape, rate = (mean / deviation) ** 2, mean / deviation**2
            densities = theirs.gamma_pdf(positions.abs()[:, None], shape, rate) + 1e-8
            return densities / densities.amax(0)

        monkeypatch.setattr(theirs, "get_positional_features_gamma", gammas)
    trained = count if basis == "enformer" else 4096
    options = {"features": 12, "length": trained, "basis": basis}
    encoding = posenc.create("enformer", heads=heads, head_dim=width, **options)
    encoding.score.biases.content.data.copy_(layer.rel_content_bias[0, :, 0])
    encoding.score.biases.position.data.copy_(layer.rel_pos_bias[0, :, 0])
    encoding.score.weight.data.copy_(layer.to_rel_k.weight.unflatten(0, (heads, width)))
    x = torch.randn(3, count, 24)
    projections = (layer.to_q, layer.to_k, layer.to_v)
    q, k, v = (f(x).unflatten(-1, (heads, width)).transpose(1, 2) for f in projections)
    layout = Layout.sequence(count)
    mixed = attend(q, k, v, Grid(layout, layout), encoding)
    got = layer.to_out(mixed.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(got, layer(x), atol=1e-5, rtol=1e-4)
