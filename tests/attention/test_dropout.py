"""Dropout drops weights, a share of them, each for itself, and the same ones backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, create
from posenc.attention.backends import blockwise
from posenc.extension import extend
from tests.attention.comparing import compare_dropped, draw_for

HEADS, WIDTH, DIM = 4, 16, 32

CASES = [
    *(("native", name) for name in ("shaw", "fire", "cope", "dape", "grape_additive", "path")),
    *(("native", name) for name in ("stick_breaking", "irpe", "bands")),
    *(("blockwise", name) for name in ("t5", "shaw", "deberta", "cope", "path", "bands")),
    *((backend, "sinks and a cap") for backend in ("native", "blockwise")),
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "BUDGET", 3000)


def made(name: str) -> tuple[Encoding, Grid]:
    """The encoding with parameters that matter, and a grid of 65 tokens or 5×6 cells."""
    torch.manual_seed(3)
    if name == "bands":
        encoding = extend(create("rope", head_dim=WIDTH), "rerope", length=65, window=12.5)
    elif name == "sinks and a cap":
        encoding = Encoding()
    else:
        options: dict[str, Any] = {"on": "qkv"} if name == "irpe" else {"causal": True}
        name = name.partition(",")[0]
        encoding = create(name, dim=DIM, heads=HEADS, head_dim=WIDTH, **options)
    encoding = encoding.double()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    layout = Layout.image(5, 6) if name == "irpe" else Layout.sequence(65)
    x = torch.randn(2, layout.length, DIM, dtype=torch.float64)
    return encoding, Grid.of(encoding.observe(x, layout), causal=name != "irpe")


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_weights_are_dropped_and_the_same_ones_backward(backend: str, name: str) -> None:
    encoding, grid = made(name)
    extras: dict[str, Any] = {}
    if name == "sinks and a cap":
        sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64).requires_grad_()
        extras = {"sinks": sinks, "softcap": 0.7}
    inputs = draw_for(grid, width=WIDTH, dtype=torch.float64)
    compare_dropped(inputs, grid, encoding, backend, **extras)


def masks(backend: str, encoding: Encoding, grid: Grid, dropout: float) -> Tensor:
    """Factors of the weights of three heads of two rows, a row a query."""
    q, k = (torch.zeros(2, 3, side.length, 8) for side in (grid.query, grid.key))
    v = torch.eye(grid.key.length).expand(2, 3, -1, -1)
    weights = attend(q, k, v, grid, encoding, backend="reference")
    dropped = attend(q, k, v, grid, encoding, backend=backend, dropout=dropout)
    return (dropped / weights).flatten(0, 2)


@pytest.mark.parametrize("backend", ["native", "blockwise", "reference"])
@pytest.mark.parametrize("dropout", [0.1, 0.7])
def test_dropout_keeps_its_share_of_all_weights(backend: str, dropout: float) -> None:
    torch.manual_seed(3)
    call = backend, Encoding(), Grid(Layout.sequence(150), Layout.sequence(600)), dropout
    mask = masks(*call)
    kept = mask != 0
    torch.testing.assert_close(mask[kept], torch.full((), 1 / (1 - dropout)).expand(kept.sum()))
    deviation = (dropout * (1 - dropout) / kept.numel()) ** 0.5
    assert abs(1 - kept.double().mean() - dropout) < 5 * deviation
    assert (mask != masks(*call)).any()
    torch.manual_seed(3)
    torch.testing.assert_close(mask, masks(*call))


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *((backend, "nope") for backend in ("native", "blockwise", "reference")),
        *((backend, "path") for backend in ("native", "blockwise")),
        ("blockwise", "cope"),
    ],
)
def test_masks_of_dropout_are_independent(backend: str, name: str) -> None:
    """Of all rows and columns."""
    torch.manual_seed(4)
    encoding = create(name, dim=24, heads=3, head_dim=8)
    for parameter in encoding.parameters():
        torch.nn.init.zeros_(parameter)
    key = encoding.observe(torch.randn(2, 600, 24), Layout.sequence(600))
    grid = Grid(Layout.sequence(80, start=520), key, causal=name in ("path", "cope"))
    mask = masks(backend, encoding, grid, 0.5)[:, :520]
    for lines in (mask, mask.mT):
        assert torch.corrcoef(lines).fill_diagonal_(0).abs().max() < 0.4


def test_dropout_of_what_is_left_of_sticks() -> None:
    grid = Grid.of(Layout.sequence(60), causal=True)
    mask = masks("native", create("stick_breaking"), grid, 0.5)
    assert 0.45 < (mask[:, 0] != 0).float().mean() < 0.55


@pytest.mark.parametrize("name", ["shaw", "cope"])
def test_dropout_is_the_same_for_any_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, grid = made(name)
    inputs, outputs = draw_for(grid, width=WIDTH, dtype=torch.float64), []
    for budget in (3000, 2**22):
        monkeypatch.setattr(blockwise, "BUDGET", budget)
        torch.manual_seed(0)
        outputs.append(attend(*inputs, grid, encoding, backend="blockwise", dropout=0.3))  # type: ignore[misc]
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("layout", [Layout.sequence(12), Layout.padded([12, 4])])
def test_dropout_does_not_change_the_lse(layout: Layout, backend: str) -> None:
    encoding, grid = made("t5")[0], Grid.of(layout, causal=True)
    inputs = draw_for(grid, width=WIDTH, dtype=torch.float64)
    sums = [
        attend(*inputs, grid, encoding, backend=x, dropout=dropout, return_lse=True)[1]  # type: ignore[misc, call-overload]
        for x, dropout in (("reference", 0.0), (backend, 0.5))
    ]
    torch.testing.assert_close(*sums, atol=1e-5, rtol=1e-5)
