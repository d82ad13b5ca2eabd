"""Blocks: memory, compiling, what each of them looks at, far keys and fine tables.

The laws of backends and ``attention_fuzz`` hold them to the definition.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention.backends import blockwise
from posenc.attention.backends.native.build import missing
from posenc.encodings.score.t5 import T5
from posenc.errors import BackendRefusal
from tests.attention.comparing import compare, draw_for, results
from tests.support.watching import LargestTensor

CAUSAL = Grid.of(Layout.sequence(97), causal=True)


def make(name: str) -> Encoding:
    torch.manual_seed(1)
    encoding = posenc.create(name, dim=48, heads=6, head_dim=8, max_length=200, causal=True)
    with torch.no_grad():
        for parameter in encoding.double().parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=parameter.dtype))
    return encoding


def inputs(grid: Grid, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return draw_for(grid, heads=6, groups=3, width=8, dtype=dtype)


@pytest.mark.parametrize("name", ["t5", "shaw", "deberta", "cope", "path"])
def test_memory_does_not_grow_with_the_square(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length = 1500
    monkeypatch.setattr(blockwise, "BUDGET", 2**18)
    layout, encoding = Layout.sequence(length), make(name).float()
    if name == "path":
        layout = encoding.observe(torch.randn(1, length, 48), layout)
    grid = Grid.of(layout, causal=True)
    tensors = [x[:1].detach().requires_grad_() for x in inputs(grid, dtype=torch.float32)]
    with LargestTensor() as memory:
        attend(*tensors, grid, encoding, backend="blockwise").sum().backward()
    assert memory.most <= 2**20
    assert memory.most < 6 * length * length / 10


def test_the_same_twice() -> None:
    for name in ("t5", "shaw", "transformer_xl"):
        encoding, tensors = make(name), inputs(CAUSAL)
        first, second = (
            results(tensors, CAUSAL, encoding, "blockwise", lse=False) for _ in range(2)
        )
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)


def test_auto_takes_it_where_the_definition_would_take_too_much() -> None:
    encoding = posenc.create("shaw", head_dim=8)
    many, packed_by = ("blockwise", "sdpa") if missing() else ("native", "native")
    for length, backend in ((60, "reference"), (2048, many)):
        grid = Grid.of(Layout.sequence(length), causal=True)
        told = explain(*inputs(grid, dtype=torch.float32), grid, encoding)
        assert told.backend == backend
    packed = Grid.of(Layout.packed([1000, 1048]), causal=True)
    told = explain(*inputs(packed, dtype=torch.float32), packed, posenc.create("rope", head_dim=8))
    assert told.backend == packed_by


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("shift", [-40, -7, 0, 4, 25])
def test_a_block_looks_at_the_keys_that_it_sees(
    causal: bool, window: int | None, shift: int
) -> None:
    queries, keys = 23, 31
    grid = Grid(Layout.sequence(queries, 50), Layout.sequence(keys, 50 + shift), causal, window)
    for begin in range(0, queries, 8):
        rows = slice(begin, min(queries, begin + 8))
        seen = blockwise.seen_keys(grid.slice(rows.start, rows.stop), rows, grid)
        places = grid.visible[0, 0, rows].any(0).nonzero().flatten()
        assert seen.stop > seen.start
        if len(places):
            assert (seen.start, seen.stop) == (int(places[0]), int(places[-1]) + 1)


@pytest.mark.parametrize("first", [1, 57, 64, 90])
@pytest.mark.parametrize("name", ["path", "forgetting", "grape_additive"])
def test_sums_up_to_queries_after_a_past(
    name: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose own keys lie in any block of PaTH's transforms."""
    monkeypatch.setattr(blockwise, "BUDGET", 3000)
    encoding = make(name)
    x = torch.randn(2, 97, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    key = encoding.observe(x, CAUSAL.key)
    grid = Grid(key.slice(first, 97), key, causal=True)
    compare(inputs(grid), grid, encoding, "blockwise", tolerance=1e-6)


def test_refuses_to_be_compiled() -> None:
    grid, encoding = Grid.of(Layout.sequence(7), causal=True), Encoding()
    q, k, v = inputs(grid)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, grid, encoding, backend="blockwise")

    compiled = torch.compile(step, backend="eager")
    with pytest.raises(BackendRefusal, match="compiled graph"):
        compiled(q, k, v)


def test_sums_over_many_tokens_are_not_rounded() -> None:
    """Logarithms of gates add up: 1000 tokens on, float32 is 100 times less exact."""
    torch.manual_seed(3)
    encoding = posenc.create("forgetting", dim=48, heads=6)
    layout = encoding.observe(torch.randn(2, 1000, 48), Layout.sequence(1000))
    grid = Grid.of(layout, causal=True)
    q, k, v = (x.detach().float() for x in inputs(grid))
    exact = attend(q.double(), k.double(), v.double(), grid, encoding, backend="reference")
    got = attend(q, k, v, grid, encoding, backend="blockwise")
    torch.testing.assert_close(got.double(), exact, atol=2e-6, rtol=0)


def close(got: Tensor, expected: Tensor, within: float = 1e-6) -> None:
    torch.testing.assert_close(got, expected, atol=within, rtol=within, check_dtype=False)


def draw(length: int, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, length, 8, generator=generator, dtype=torch.float64)
    return q, k, v


def frozen_table(values: Tensor) -> Encoding:
    """A causal T5 table ``[1, 8]`` whose last bucket begins at a distance of 16."""
    score = T5(heads=1, causal=True, buckets=8, max_distance=16).to(values.dtype)
    with torch.no_grad():
        next(score.parameters()).copy_(values.view_as(next(score.parameters())))
    return Encoding(score=score.requires_grad_(False))


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_far_keys_that_matter(backend: str) -> None:
    """One far key outweighs all near ones, though the table takes 290 from its logit.

    Queries and keys of length √150 along one axis: near products are -150, that one is 150.
    """
    table = torch.zeros(8, dtype=torch.float64)
    table[-1] = -290
    q, k, v = draw(64, heads=1)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[..., 0] = 150**0.5, -(150**0.5)
    k[..., 0, 0] *= -1
    grid, encoding = Grid.of(Layout.sequence(64), causal=True), frozen_table(table)
    got, expected = (
        attend(q, k, v, grid, encoding, backend=way, scale=1.0) for way in (backend, "reference")
    )
    close(got, expected)


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_fine_differences(backend: str) -> None:
    """Table entries that differ by less than half precision can tell."""
    values = 100 + torch.linspace(0, 2, 8)
    q, k, v = (x.bfloat16() for x in draw(40, heads=1))
    grid, encoding = Grid.of(Layout.sequence(40), causal=True), frozen_table(values)
    got = attend(q, k, v, grid, encoding, backend=backend)
    wide = (x.double() for x in (q, k, v))
    close(got, attend(*wide, grid, encoding, backend="reference"), 0.02)
