"""KERPLE against loops over the paper's kernels."""

from __future__ import annotations

import math

import pytest
import torch

from posenc import Grid, Layout
from posenc.encodings.score.kerple import Kerple
from posenc.errors import ArgumentError

R1, R2 = [0.5, 1.5, 0.02], [0.3, 0.9, 2.0]


def make(kernel: str) -> Kerple:
    kerple = Kerple(heads=3, kernel=kernel)  # type: ignore[arg-type]
    kerple.set_kernel(torch.tensor(R1), torch.tensor(R2))
    return kerple


@pytest.mark.parametrize("kernel", ["log", "power"])
@pytest.mark.parametrize(
    "grid",
    [
        Grid.of(Layout.sequence(7)),
        Grid(Layout.sequence(3, start=900), Layout.sequence(5)),
        Grid.of(Layout.at(torch.tensor([[0.0, 0.25, 7.5], [3.0, 1.0, -40.0]]))),
    ],
)
def test_equals_loops(kernel: str, grid: Grid) -> None:
    q = torch.zeros(1, 3, grid.query.length, 8)
    k = torch.zeros(1, 3, grid.key.length, 8)
    got = make(kernel)(q, k, grid, scale=1.0)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in got.shape)).tolist():
        distance = abs(float(grid.offset[b, i, j, 0]))
        if kernel == "log":
            expected = -R1[h] * math.log(1 + R2[h] * distance)
        else:
            expected = -R1[h] * distance ** R2[h]
        assert got[b, h, i, j].item() == pytest.approx(expected, rel=5e-5, abs=1e-6)


def test_a_number_by_hand() -> None:
    # -0.5 · log(1 + 0.3 · 10) = -0.5 · log 4 = -log 2
    value = make("log").bias(torch.tensor([-10.0]))[0, 0]
    assert value.item() == pytest.approx(-math.log(2), rel=1e-6)


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_stays_in_its_domain_whatever_the_step(kernel: str) -> None:
    kerple = make(kernel)
    with torch.no_grad():
        for parameter in kerple.parameters():
            parameter.sub_(50.0)
    far = kerple.requires_grad_(False).bias(torch.tensor([-1.0, -1000.0]))
    assert (far <= 0).all()
    assert far.isfinite().all()


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_initial_values_are_in_the_domain_of_the_paper(kernel: str) -> None:
    kerple = Kerple(heads=500, kernel=kernel)  # type: ignore[arg-type]
    kerple.requires_grad_(False)
    scale = kerple.raw_scale.exp()
    shape = kerple.raw_shape.exp() if kernel == "log" else 2 * kerple.raw_shape.sigmoid()
    most = (2.0, 1.0) if kernel == "log" else (1.0, 2.0)
    for values, limit in ((scale, most[0]), (shape, most[1])):
        assert float(values.min()) >= 0.0099
        assert 0.95 * limit < float(values.max()) <= limit * 1.001


def test_shapes_outside_their_domain() -> None:
    with pytest.raises(ArgumentError, match="up to 2"):
        Kerple(heads=1, kernel="power").set_kernel(torch.ones(1), torch.tensor([2.5]))
