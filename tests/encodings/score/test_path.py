"""PaTH against products of Householder matrices, written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.path import Path
from tests.encodings.grids import GRIDS

CAUSAL = {name: grid for name, grid in GRIDS.items() if grid.causal}
DIM, HEADS, WIDTH, SCALE = 12, 3, 4, 0.5


def make(kernel: int = 3) -> Path:
    torch.manual_seed(8)
    path = Path(dim=DIM, heads=HEADS, head_dim=WIDTH, rank=5, kernel=kernel).double()
    for parameter in path.parameters():
        torch.nn.init.normal_(parameter)
    return path


def observe(path: Path, grid: Grid) -> tuple[Grid, Tensor]:
    x = torch.randn(2, grid.key.length, DIM, dtype=torch.float64)
    return replace(grid, key=path.observe(x, grid.key)), x


def heads(length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, HEADS, length, WIDTH, generator=generator, dtype=torch.float64)


def by_loops(path: Path, x: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    """The whole logit: ``scale · q H_i … H_{j+1} k``, one matrix at a time."""
    output = q.new_zeros(*q.shape[:3], k.shape[2])
    for b in range(len(q)):
        visible = grid.visible[min(b, len(grid.visible) - 1), 0]
        order = grid.key.order[min(b, len(grid.key.order) - 1)].tolist()
        order_q = grid.query.order[min(b, len(grid.query.order) - 1)].tolist()
        document = [0] * len(order)
        if grid.key.document is not None:
            document = grid.key.document[min(b, len(grid.key.document) - 1)].tolist()
        real = [True] * len(order)
        if grid.key.valid is not None:
            real = grid.key.valid[min(b, len(grid.key.valid) - 1)].tolist()
        tokens = sorted((t for t in range(len(order)) if real[t]), key=lambda t: order[t])
        for h in range(HEADS):
            matrices = {
                t: householder(path, x[b], h, [s for s in tokens if document[s] == document[t]], t)
                for t in tokens
            }
            for i in range(q.shape[2]):
                for j in range(k.shape[2]):
                    if not visible[i, j]:
                        continue
                    moved = k[b, h, j]
                    for t in tokens:
                        same = document[t] == document[j]
                        if same and order[j] < order[t] <= order_q[i]:
                            moved = matrices[t] @ moved
                    output[b, h, i, j] = SCALE * (q[b, h, i] @ moved)
    return output


def householder(path: Path, x: Tensor, h: int, tokens: list[int], t: int) -> Tensor:
    part = slice(h * WIDTH, (h + 1) * WIDTH)
    vector = x.new_zeros(WIDTH)
    place = tokens.index(t)
    for back in range(1 if path.taps is None else len(path.taps)):
        if place >= back:
            each = (path.wide.weight @ (path.narrow.weight @ x[tokens[place - back]]))[part]
            vector = vector + (each if path.taps is None else each * path.taps[back, part])
    if path.taps is not None:
        vector = vector * torch.sigmoid(vector)
    vector = vector / (vector @ vector + 1e-6).sqrt()
    strength = 2 * torch.sigmoid(path.strength.weight[h] @ x[t] + path.strength.bias[h])
    return torch.eye(WIDTH, dtype=x.dtype) - strength * torch.outer(vector, vector)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "window"])
def test_equals_loops_gradients_too(name: str, kernel: int) -> None:
    path = make(kernel)
    grid, x = observe(path, CAUSAL[name])
    q, k = heads(grid.query.length, 1).requires_grad_(), heads(grid.key.length, 2).requires_grad_()
    got = (SCALE * q @ k.mT + path(q, k, grid, scale=SCALE)).masked_fill(~grid.visible, 0.0)
    expected = by_loops(path, x, q, k, grid)
    torch.testing.assert_close(got, expected)
    learned = [q, k, *path.parameters()]
    found, wanted = (
        torch.autograd.grad(side.sin().sum(), learned, retain_graph=True)
        for side in (got, expected)
    )
    torch.testing.assert_close(found, wanted)


def test_a_number_by_hand() -> None:
    # One head of width 2. Every w is (1, 0) and β = 2 σ(log 3) = 3/2: H = diag(-1/2, 1).
    # Two steps on, (1, 1) has become (1/4, 1); with q = (4, 1) that is 2.
    path = Path(dim=1, heads=1, head_dim=2, rank=1, kernel=1).double()
    with torch.no_grad():
        path.narrow.weight.fill_(1.0)
        path.wide.weight.copy_(torch.tensor([[1e6], [0.0]]))
        path.strength.weight.zero_()
        path.strength.bias.copy_(torch.tensor([3.0]).log())
    key = path.observe(torch.ones(1, 3, 1, dtype=torch.float64), Layout.sequence(3))
    q = torch.tensor([4.0, 1.0], dtype=torch.float64).expand(1, 1, 3, 2)
    k = torch.ones(1, 1, 3, 2, dtype=torch.float64)
    logits = q @ k.mT + path(q, k, Grid(key, key, causal=True), scale=1.0)
    assert logits[0, 0, 2].tolist() == pytest.approx([2.0, -1.0, 5.0], rel=1e-6)


def test_full_reflections_keep_lengths() -> None:
    """β = 2 gives true reflections: the product is orthogonal."""
    path = make(kernel=1)
    with torch.no_grad():
        path.strength.weight.zero_()
        path.strength.bias.fill_(60.0)
        path.wide.weight.mul_(1e4)
    grid, _ = observe(path, Grid.of(Layout.sequence(40), causal=True))
    q = torch.eye(WIDTH, dtype=torch.float64).expand(2, HEADS, -1, -1)
    k = heads(40, 2)
    last = replace(grid, query=Layout(torch.full((1, WIDTH, 1), 39.0), torch.full((1, WIDTH), 39)))
    moved = q @ k.mT + path(q, k, last, scale=1.0)
    torch.testing.assert_close(moved.norm(dim=-2), k.norm(dim=-1))


def test_with_no_strength_it_is_attention_without_positions() -> None:
    path = make()
    with torch.no_grad():
        path.strength.weight.zero_()
        path.strength.bias.fill_(-1e4)
    grid, _ = observe(path, CAUSAL["causal"])
    q = k = v = heads(7, 1)
    torch.testing.assert_close(
        attend(q, k, v, grid, Encoding(score=path)), attend(q, k, v, grid, Encoding())
    )


def test_windows_see_the_same_products() -> None:
    path = make()
    whole, _ = observe(path, Grid.of(Layout.sequence(8), causal=True))
    window = replace(whole, window=3)
    q, k = heads(8, 1), heads(8, 2)
    torch.testing.assert_close(path(q, k, window, scale=1.0), path(q, k, whole, scale=1.0))


def test_gradients_of_packed_documents_are_those_of_each() -> None:
    """fla #837: gradients of PaTH over documents of different lengths."""
    path = make()
    layer = posenc.Attention(dim=DIM, heads=HEADS, encoding=Encoding(score=path), causal=True)
    layer = layer.double()
    x = torch.randn(1, 9, DIM, dtype=torch.float64)
    packed = layer(x, Layout.packed([4, 5])).sin().sum()
    alone = sum(
        layer(x[:, part], Layout.sequence(part.stop - part.start)).sin().sum()
        for part in (slice(0, 4), slice(4, 9))
    )
    learned = list(layer.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(packed, learned), torch.autograd.grad(alone, learned)
    )


def test_long_products_stay_finite_in_float32() -> None:
    path = make().float()
    x = torch.randn(1, 600, DIM)
    key = path.observe(x, Layout.sequence(600))
    q = torch.randn(1, HEADS, 600, WIDTH)
    grid = Grid(key, key, causal=True)
    exact = copy_of(path)(q.double(), q.double(), grid, scale=1.0)
    got = path(q, q, grid, scale=1.0)
    seen = grid.visible.expand_as(got)
    torch.testing.assert_close(got[seen].double(), exact[seen], rtol=1e-3, atol=1e-3)


def copy_of(path: Path) -> Path:
    other = Path(dim=DIM, heads=HEADS, head_dim=WIDTH, rank=5).double()
    other.load_state_dict(path.state_dict())
    return other
