"""The fused backend: by PyTorch's kernel, never a Q×K bias, and refuses the rest.

The laws of backends and ``attention_fuzz`` hold it to the definition.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import posenc
from posenc import Encoding, Grid, Layout, ScoreTerm, attend, explain
from posenc.attention.backends.sdpa import _drop_negligible
from posenc.attention.problem.problem import Problem
from posenc.encoding import LowRank, StructuredScore
from posenc.errors import BackendRefusal
from tests.attention.comparing import draw_for
from tests.support.exhaustive import in_turn
from tests.support.watching import LargestTensor

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"

GRIDS = {
    "dense": Grid.of(Layout.sequence(65)),
    "causal": Grid.of(Layout.sequence(65), causal=True),
    "chunk": Grid(Layout.sequence(9, start=56), Layout.sequence(65), causal=True),
    "fewer keys": Grid(Layout.sequence(65), Layout.sequence(9), causal=True),
    "causal window": Grid.of(Layout.sequence(150), causal=True, window=7),
    "padded left": Grid.of(Layout.padded([9, 65], side="left")),
    "packed": Grid.of(Layout.packed([30, 35]), causal=True),
}


LAST_OF_MANY = Grid(Layout.sequence(60, 2940), Layout.sequence(3000), causal=True)


def inputs(grid: Grid, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return draw_for(grid, width=16, dtype=dtype)


class Slope(ScoreTerm):
    """``s_ij += w · p_i · p_j / 10⁴``: of low rank, for the tests."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def _factors(self, grid: Grid) -> tuple[Tensor, Tensor]:
        sides = (side.positions.double().unsqueeze(1) / 100 for side in (grid.query, grid.key))
        q, k = sides
        return q * self.weight, k

    def forward(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
        left, right = self._factors(grid)
        return (left @ right.mT).to(q.dtype)

    def lower(
        self, q: Tensor, k: Tensor, grid: Grid, *, scale: float
    ) -> tuple[StructuredScore, ...] | None:
        return (LowRank(*self._factors(grid)),)


T5 = {
    causal: posenc.create("t5", heads=4, causal=causal).requires_grad_(False)
    for causal in (False, True)
}

ENCODINGS = {
    "nope": posenc.create("nope"),
    "rope": posenc.create("rope", head_dim=16),
    "alibi": posenc.create("alibi", heads=4),
    "frozen t5": T5[False],
    "low rank": Encoding(score=Slope()),
}


def made_for(name: str, grid: Grid) -> Encoding:
    """The encoding, made for the grid's mask."""
    return T5[grid.causal] if name == "frozen t5" else ENCODINGS[name]


@pytest.mark.parametrize(
    ("name", "grid", "dtype"),
    in_turn(
        3,
        ["nope", "rope", "alibi", "frozen t5", "low rank"],
        ["dense", "causal", "chunk", "causal window"],
        [torch.float32, torch.float64, torch.bfloat16],
    ),
)
def test_the_fused_kernel_runs(name: str, grid: str, dtype: torch.dtype) -> None:
    where = GRIDS[grid]
    q, k, v = inputs(where, dtype=dtype)
    if name == "low rank" and dtype == torch.bfloat16:
        with pytest.raises(BackendRefusal, match="would be rounded"):
            attend(q, k, v, where, made_for(name, where), backend="sdpa")
        return
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        attend(q, k, v, where, made_for(name, where), backend="sdpa")
    names = {event.name for event in seen.events()}
    assert FLASH in names
    assert "aten::softmax" not in names


@pytest.mark.parametrize("name", ["nope", "frozen t5"])
@pytest.mark.parametrize("band", [(-700, 0), (-30, 40), (3, 700)])
def test_blocks_of_queries_see_every_key_of_theirs(name: str, band: tuple[int, int]) -> None:
    """Of 1,100 queries 512 are computed at a time, with the keys that any of them sees."""
    grid = Grid.of(Layout.sequence(1100), window=band)
    q, k, v = draw_for(grid, heads=4, groups=4, rows=1, width=16, dtype=torch.float64)
    outputs = [
        attend(q, k, v, grid, made_for(name, grid), backend=backend)
        for backend in ("sdpa", "reference")
    ]
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("name", ["alibi", "frozen t5"])
@pytest.mark.parametrize("causal", [False, True])
def test_no_bias_of_size_q_by_k(name: str, causal: bool) -> None:
    length = 1536
    grid = Grid.of(Layout.sequence(length), causal=causal)
    q, k, v = inputs(grid, dtype=torch.float32)
    encoding = made_for(name, grid)
    with LargestTensor() as memory:
        attend(q, k, v, grid, encoding, backend="sdpa").sum().backward()
    assert memory.most <= max(q.numel(), 8 * length)
    assert memory.most < length * length
    with LargestTensor() as memory:
        attend(q, k, v, grid, encoding, backend="reference")
    assert memory.most >= length * length


REFUSALS = [
    (posenc.create("shaw", head_dim=16), GRIDS["causal"], {}, "value part"),
    (Encoding(score=posenc.create("shaw", head_dim=16).score), GRIDS["causal"], {}, "neither"),
    (posenc.create("t5", heads=4, causal=True), GRIDS["causal"], {}, "without gradient"),
    (posenc.create("alibi", heads=4), GRIDS["padded left"], {}, "structured form"),
    (T5[GRIDS["packed"].causal], GRIDS["packed"], {}, "regular layouts"),
    (posenc.create("nope"), GRIDS["causal"], {"dropout": 0.1}, "dropout"),
]


@pytest.mark.parametrize(("encoding", "grid", "options", "reason"), REFUSALS)
def test_refuses_with_the_reason(
    encoding: Encoding, grid: Grid, options: dict[str, float], reason: str
) -> None:
    q, k, v = inputs(grid)
    with pytest.raises(BackendRefusal, match=reason):
        attend(q, k, v, grid, encoding, backend="sdpa", **options)  # type: ignore[arg-type]
    told = explain(q, k, v, grid, encoding, **options)  # type: ignore[arg-type]
    assert told.backend != "sdpa"
    assert reason in str(told)


def test_weights_that_cannot_matter_are_left_out() -> None:
    """Subnormal weights slow the kernel down; what is dropped is far below rounding."""
    grid = LAST_OF_MANY
    q, k, v = (x.detach().float() for x in inputs(grid))
    encoding = posenc.create("alibi", heads=4)
    exact = attend(q.double(), k.double(), v.double(), grid, encoding, backend="reference")
    error = {
        backend: (attend(q, k, v, grid, encoding, backend=backend) - exact).abs().max()
        for backend in ("sdpa", "reference")
    }
    assert error["sdpa"] <= 2 * error["reference"]
    line = -0.25 * torch.arange(-2999.0, 60.0).abs().unsqueeze(0)
    problem = Problem(q, k, v, grid, encoding, 0.25, 0.0, None)
    kept = _drop_negligible(line, q, k, problem)
    assert 0.5 < kept.isinf().float().mean().item() < 1.0
    huge = _drop_negligible(line, 10 * q, 10 * k, problem)
    assert huge.isinf().sum() == 0  # such products could outweigh the whole line


def falling(by: float) -> Encoding:
    """``by`` less from the logit of every pair but those of a token with itself."""
    score = posenc.create("t5", heads=4, causal=True, buckets=2, max_distance=2).score
    assert score is not None
    with torch.no_grad():
        for table in score.parameters():
            table.copy_(torch.tensor([0.0, -by]).expand_as(table))
    return Encoding(score=score.requires_grad_(False))


def both_ways(grid: Grid, encoding: Encoding, *, dtype: torch.dtype) -> list[Tensor]:
    """The output where logits differ by the encoding alone; values are 1, the last token's 0."""
    q, k, v = (torch.zeros_like(x, dtype=dtype).detach() for x in inputs(grid))
    v[:, :, :-1] = 1
    return [attend(q, k, v, grid, encoding, backend=way) for way in ("sdpa", "reference")]


def test_far_keys_that_outweigh_near_ones_are_kept() -> None:
    """The product of a query is as far below 0 with its own key as above it with the first."""
    q, k, v = (x.detach().float() for x in inputs(LAST_OF_MANY))
    sign = torch.full((k.shape[2], 1), -1.0)
    sign[0] = 1
    direction, encoding = torch.ones(q.shape[3]) * 60**0.5 / q.shape[3] ** 0.25, falling(110)
    given = direction.expand_as(q), (direction * sign).expand_as(k), v
    got, expected = (
        attend(*given, LAST_OF_MANY, encoding, backend=way) for way in ("sdpa", "reference")
    )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    first = v[:, :, :1].repeat_interleave(2, dim=1)
    assert (expected - first).abs().max() < 0.01


def test_many_small_weights_are_kept() -> None:
    """Each of 3,000 weights is below the rounding of 1, their sum is not."""
    got, expected = both_ways(LAST_OF_MANY, falling(16.5), dtype=torch.float32)
    assert expected[0, 0, -1, 0].item() > 1e-4
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)


def test_queries_without_their_own_position_keep_all() -> None:
    """Keys far below a position that is not there matter all the same."""
    got, expected = both_ways(GRIDS["fewer keys"], falling(200), dtype=torch.float64)
    assert expected[0, 0, -1, 0].item() == pytest.approx(8 / 9)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("length", [5, 16, 41])
@pytest.mark.parametrize(("name", "options"), [("nope", {}), ("alibi", {"heads": 2})])
@pytest.mark.parametrize("backend", ["sdpa", "native", "blockwise"])
def test_queries_of_nan_that_see_no_key_give_zeros(
    backend: str, name: str, options: dict[str, int], length: int
) -> None:
    """And NaN where they see a key, in the LSE too."""
    query, key = Layout.sequence(length), Layout.sequence(length, start=2)
    q, k, v = torch.randn(3, 1, 2, length, 8)
    q[:, :, ::4] = torch.nan
    for layout in (query, replace(query, valid=torch.ones(1, length, dtype=torch.bool))):
        arguments = (q, k, v, Grid(layout, key, causal=True), posenc.create(name, **options))
        expected = attend(*arguments, backend="reference", return_lse=True)
        try:
            found = attend(*arguments, backend=backend, return_lse=True)
        except BackendRefusal:
            continue
        assert found[0][:, :, 0].eq(0).all()
        assert found[0][:, :, 4].isnan().all()
        torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-5, rtol=1e-4)
