"""RePo against loops from its equations."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.query_key.repo import Repo
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, agree_with_gradients, inputs

HEADS, WIDTH = 6, 8


def make(**options: object) -> tuple[Encoding, Repo]:
    torch.manual_seed(0)
    encoding = posenc.create("repo", dim=12, heads=HEADS, head_dim=WIDTH, width=4, **options)
    part = encoding.double().query_key
    assert isinstance(part, Repo)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_()
    return encoding, part


def predicted(part: Repo, x: Tensor, head: int) -> Tensor:
    """The position of one token for a head."""
    total = x.new_zeros(())
    for unit in range(4):
        gate, content = part.gate.weight[unit] @ x, part.content.weight[unit] @ x
        total = total + part.assign.weight[head, unit] * gate * gate.sigmoid() * content
    return total


def turned(x: Tensor, z: Tensor, base: float, adjacent: bool) -> Tensor:
    """A vector with its pairs rotated."""
    rotated: list[Tensor] = [x.new_zeros(())] * WIDTH
    for t in range(WIDTH // 2):
        a, b = (2 * t, 2 * t + 1) if adjacent else (t, t + WIDTH // 2)
        angle = z * base ** (-2 * t / WIDTH)
        rotated[a] = x[a] * angle.cos() - x[b] * angle.sin()
        rotated[b] = x[a] * angle.sin() + x[b] * angle.cos()
    return torch.stack(rotated)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("name", ["causal", "both ways", "more keys", "padded", "packed"])
def test_equals_loops(name: str, pairing: str) -> None:
    """Outputs and the gradients of all weights, which flow through the positions."""
    grid = GRIDS[name]
    q, k, v = inputs(grid, heads=HEADS, width=WIDTH)
    encoding, part = make(base=30.0, pairing=pairing)
    x, xq = (torch.randn(2, side.length, 12).double() for side in (grid.key, grid.query))
    if grid.query is grid.key:
        xq = x

    def rotated(x: Tensor, features: Tensor) -> Tensor:
        return torch.stack(
            [
                torch.stack(
                    [
                        torch.stack(
                            [
                                turned(
                                    x[b, h, i],
                                    predicted(part, features[b, i], h),
                                    30.0,
                                    pairing == "adjacent",
                                )
                                for i in range(x.shape[2])
                            ]
                        )
                        for h in range(HEADS)
                    ]
                )
                for b in range(2)
            ]
        )

    keys = k.repeat_interleave(2, dim=1)
    expected = attention_by_loops(rotated(q, xq), rotated(keys, x), v.repeat_interleave(2, 1), grid)
    sides = [encoding.observe(y, side) for y, side in ((xq, grid.query), (x, grid.key))]
    if grid.query is grid.key:
        sides[1] = sides[0]
    got = attend(q, k, v, replace(grid, query=sides[0], key=sides[1]), encoding)
    agree_with_gradients(got, expected, list(part.parameters()), rtol=1e-6, atol=1e-7)


def test_by_hand() -> None:
    """One feature, x = ln 3, weights of 1: z = silu(x) x = ¾ x²; the first pair turns by it."""
    encoding = posenc.create("repo", dim=1, heads=1, head_dim=2, width=1)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.fill_(1.0)
    layout = encoding.observe(torch.full((1, 1, 1), math.log(3)), Layout.sequence(1))
    z = 0.75 * math.log(3) ** 2
    assert layout.signal.item() == pytest.approx(z)
    q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    rotated, _ = encoding.query_key(q, q, Grid.of(layout))
    assert complex(*rotated.flatten().tolist()) == pytest.approx(cmath.exp(1j * z))


def test_width_is_an_eighth() -> None:
    part = posenc.create("repo", dim=64, heads=2, head_dim=8).query_key
    assert part.content.weight.shape == (8, 64)
