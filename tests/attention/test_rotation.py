"""Queries and keys rotated by the compiled kernel, against the definition."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Grid, Layout
from posenc.attention.backends.native import rotation as compiled
from posenc.encoding import Encoding, Pairing, QueryKeyTransform, Rotation, apply_rotation
from posenc.encodings.common.rotation import cos_sin
from tests.attention.comparing import built, compare, draw

pytestmark = built

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def kernel_for_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FEW", 0)


def factors(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.randn(shape, dtype=dtype)
    return 1.5 * angles.cos(), 1.5 * angles.sin()


@pytest.mark.parametrize("pairing", get_args(Pairing))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shared", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_equals_the_definition(
    pairing: Pairing, dtype: torch.dtype, shared: tuple[int, int]
) -> None:
    """Any strides, features beyond the pairs, and more tokens than one thread takes at once."""
    wide = torch.promote_types(dtype, torch.float32)
    q = torch.randn(2, 300, 3, 11).to(dtype).transpose(1, 2)
    k = torch.randn(2, 3, 11, 7).to(dtype).transpose(2, 3)
    rotation = Rotation(
        factors(*shared, 300, 5, dtype=wide), factors(*shared, 7, 5, dtype=wide), pairing
    )
    for found, expected in zip(compiled.rotate(rotation, q, k), rotation.apply(q, k), strict=True):
        assert found.dtype == expected.dtype
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("pairing", get_args(Pairing))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pairs", [64, 16, 5])
@pytest.mark.parametrize("streamed", [0, 2**40])
def test_writes_into_other_memory_and_in_place(
    pairing: Pairing, dtype: torch.dtype, pairs: int, streamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the caches too, into whole and odd rows, and at addresses that are not aligned."""
    monkeypatch.setattr(compiled, "STREAMED", streamed)
    turn = factors(1, 1, 1, pairs, dtype=torch.promote_types(dtype, torch.float32))
    x = torch.randn(2, 3, 300, 2 * pairs + 1).to(dtype)[..., 1:]
    for given in (x, x.contiguous()):
        expected = apply_rotation(given, *turn, pairing)
        room = torch.full((2, 3, 340, 2 * pairs), torch.nan, dtype=dtype)
        compiled.rotate_into(room[:, :, 17:317], given, turn, pairing)
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(room[:, :, 17:317], expected, atol=bound, rtol=bound)
        assert bool(room[:, :, :17].isnan().all() and room[:, :, 317:].isnan().all())
        version = given._version
        compiled.rotate_into(given, given, turn, pairing)
        assert given._version > version
        torch.testing.assert_close(given, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("pairing", get_args(Pairing))
def test_first_and_second_derivatives(pairing: Pairing) -> None:
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    turn = factors(1, 1, 3, 3, dtype=torch.float64)

    def queries(x: Tensor) -> Tensor:
        return compiled.rotate(Rotation(turn, turn, pairing), x, x)[0]

    assert torch.autograd.gradcheck(queries, (x,))
    assert torch.autograd.gradgradcheck(queries, (x,))


def test_no_tokens() -> None:
    turn = factors(1, 1, 0, 4, dtype=torch.float32)
    q, _ = compiled.rotate(Rotation(turn, turn, "half"), *(torch.ones(1, 2, 0, 8),) * 2)
    assert q.shape == (1, 2, 0, 8)


def test_factors_that_the_kernel_does_not_take() -> None:
    """Gradients of angles, factors of higher precision, and transforms of torch.func."""
    x = torch.randn(1, 2, 3, 8)
    wide = factors(1, 1, 3, 4, dtype=torch.float64)
    angles = torch.randn(1, 1, 3, 4, requires_grad=True)
    learned = (angles.cos(), angles.sin())
    for turn in (wide, learned):
        rotation = Rotation(turn, turn, "half")
        torch.testing.assert_close(compiled.rotate(rotation, x, x), rotation.apply(x, x))
    (gradient,) = torch.autograd.grad(
        compiled.rotate(Rotation(learned, learned, "half"), x, x)[0].sum(), angles
    )
    assert gradient.abs().max() > 0
    plain = Rotation((wide[0].float(), wide[1].float()), (wide[0].float(), wide[1].float()), "half")
    batched = torch.func.vmap(lambda x: compiled.rotate(plain, x, x)[0])(torch.stack([x, 2 * x]))
    torch.testing.assert_close(batched[1], plain.apply(2 * x, x)[0])


ADJACENT = "rope@pairing=adjacent@fraction=0.75"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, Layout.sequence(70)) for name in ("rope", ADJACENT, "rope+alibi", "fope", "xpos")),
        # With a score part beside it, documents are rotated before.
        *((name, Layout.packed([23, 47])) for name in ("rope", ADJACENT, "fope", "xpos")),
    ],
)
def test_kernels_rotate_as_they_read(
    name: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared keys, windows; no rotated queries or keys are written before."""
    encoding = posenc.create(name, heads=4, head_dim=24, max_length=64)
    grid = Grid.of(layout, causal=True, window=40)
    for module in ("", ".posing"):
        monkeypatch.setattr(f"posenc.attention.backends.native{module}.rotate", None)
    compare(draw(70, 70), grid, encoding, tolerance=1e-4)


class ByHead(QueryKeyTransform):
    """Every head of queries and of keys has frequencies of its own."""

    axes = (1,)

    def __init__(self, *heads: int) -> None:
        super().__init__()
        self.heads_of_sides = heads

    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        return self.lower(q, k, grid).apply(q, k)

    def lower(self, q: Tensor, k: Tensor, grid: Grid) -> Rotation:
        sides = zip((grid.query, grid.key), self.heads_of_sides, strict=True)
        angles = [
            0.1 * torch.arange(1, heads + 1).view(1, -1, 1, 1) * side.positions.unsqueeze(1)
            for side, heads in sides
        ]
        query, key = (cos_sin(x.expand(-1, -1, -1, q.shape[3] // 2)) for x in angles)
        return Rotation(query, key, "half")


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_of_keys_have_rotations_of_their_own(groups: int) -> None:
    grid = Grid.of(Layout.sequence(70), causal=True)
    inputs = [torch.randn(2, n, 70, 24, requires_grad=True) for n in (4, groups, groups)]
    compare(inputs, grid, Encoding(query_key=ByHead(4, groups)), tolerance=1e-4)


def test_keys_beside_few_queries_are_rotated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the kernel, which would rotate them for each of the query heads that share them."""
    calls: list[int] = []

    def counted(rotation: Rotation, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(q.shape[2])
        return compiled.rotate(rotation, q, k)

    monkeypatch.setattr("posenc.attention.backends.native.posing.rotate", counted)
    keys, encoding = Layout.sequence(300), posenc.create("rope", head_dim=8)
    k, v = torch.randn(2, 1, 2, 300, 8)
    for queries in (63, 64):
        grid = Grid(keys.slice(300 - queries, 300), keys, causal=True)
        q = torch.randn(1, 4, queries, 8)
        found = [posenc.attend(q, k, v, grid, encoding, backend=x) for x in ("native", "reference")]
        torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert calls == [63]
