"""TUPE's logits against loops over the paper's equations, special tokens included."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend
from posenc.encoding import BucketedTerms, StructuredScore
from posenc.encodings.score.tupe import Tupe
from posenc.testing.oracles import attention_by_loops, t5_bucket_by_loops
from tests.encodings.grids import GRIDS, inputs
from tests.support.exhaustive import in_turn

WIDTHS = {"dim": 10, "heads": 6, "head_dim": 8, "max_length": 5100}


def make(**options: object) -> Tupe:
    torch.manual_seed(3)
    part = Tupe(**(WIDTHS | options)).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_(std=0.6)
    return part


def vectors(part: Tupe, at: float) -> tuple[Tensor, Tensor]:
    """p_i U_Q and p_i U_K, each ``[H, D]``, one position at a time."""
    below, share = int(at), at - int(at)
    row = part.positions[below] * (1 - share)
    if share:
        row = row + part.positions[below + 1] * share
    row = (row - row.mean()) / (row.var(unbiased=False) + part.norm.eps).sqrt()
    row = row * part.norm.weight + part.norm.bias
    return part.query(row).view(part.heads, -1), part.key(row).view(part.heads, -1)


@pytest.mark.parametrize(
    ("grid", "causal", "buckets"), in_turn(2, GRIDS, [False, True], [None, 32])
)
def test_equals_loops(grid: Grid, causal: bool, buckets: int | None) -> None:
    grid = replace(grid, causal=causal)
    q, k, v = inputs(grid)
    part = make(causal=causal, buckets=buckets).requires_grad_(False)
    of = functools.cache(functools.partial(vectors, part))

    def logit(query: Tensor, key: Tensor, h: int, at: float, to: float) -> Tensor:
        total = (query @ key + of(at)[0][h] @ of(to)[1][h]) / math.sqrt(16)
        if part.relative is None:
            return total
        bucket = t5_bucket_by_loops(int(to - at), causal=causal)
        if 0 < to - at < 1 and not causal:
            bucket = 16  # the first of the buckets ahead
        return total + part.relative.table[h, bucket]

    expected = attention_by_loops(q, k, v, grid, logit=logit)
    got = attend(q, k, v, grid, Encoding(score=part), backend="reference")
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_a_number_by_hand() -> None:
    # C = 2, H = D = 1. Normalised, (0, 2) is (-1, 1) and (6, 2) is (1, -1), but for epsilon.
    part = make(dim=2, heads=1, head_dim=1, max_length=2)
    assert part.relative is not None
    with torch.no_grad():
        part.positions.copy_(torch.tensor([[0.0, 2.0], [6.0, 2.0]]))
        part.norm.reset_parameters()
        part.norm.eps = 0.0
        part.query.weight.copy_(torch.tensor([[3.0, 5.0]]))
        part.key.weight.copy_(torch.tensor([[1.0, 4.0]]))
        part.query.bias.zero_()
        part.key.bias.fill_(1.0)
        part.relative.table.copy_(torch.arange(32.0)[None])
    # U_Q gives 2 and -2, U_K 3 + 1 and -3 + 1; buckets 0, 17 ahead and 1 behind.
    zero = torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    scores = part(zero, zero, Grid.of(Layout.sequence(2)), scale=0.5)[0, 0]
    torch.testing.assert_close(scores, torch.tensor([[4.0, 15.0], [-3.0, 2.0]]).double())


def special(layout: Layout, marks: list[list[bool]]) -> Layout:
    return replace(layout, special=torch.tensor(marks))


CLASS = special(Layout.sequence(6), [[True] + [False] * 5])
SPECIAL = {
    "class token": Grid.of(CLASS),
    "causal": Grid.of(CLASS, causal=True),
    "queries without it": Grid(CLASS.slice(2, 6), CLASS),
    "only in the queries": Grid(CLASS, Layout.sequence(5)),
    "other places a row": Grid.of(
        special(Layout.sequence(4), [[True, False, False, True], [False, True, False, False]])
    ),
    "all": Grid.of(special(Layout.sequence(3), [[True, True, True]])),
    "of no position": Grid.of(
        special(
            Layout.at(torch.tensor([-1e9, 0.0, 1.0, 2.5]).double()), [[True, False, False, False]]
        )
    ),
}


@pytest.mark.parametrize("buckets", [None, 32])
@pytest.mark.parametrize("grid", SPECIAL.values(), ids=SPECIAL)
def test_rows_and_columns_of_special_tokens_are_two_values(grid: Grid, buckets: int | None) -> None:
    """Section 3.2: θ_1 wherever the query is special, θ_2 wherever only the key is."""
    part = make(buckets=buckets)
    q, k, _ = inputs(grid)
    k = k.repeat_interleave(2, dim=1)
    scores = part(q, k, grid, scale=0.25)
    for b in range(scores.shape[0]):
        for i in range(scores.shape[2]):
            for j in range(scores.shape[3]):
                at, to = (side.positions[0, n, 0].item() for side, n in _pair(grid, i, j))
                if _is_special(grid.query, b, i):
                    expected = part.special[0]
                elif _is_special(grid.key, b, j):
                    expected = part.special[1]
                else:
                    expected = (vectors(part, at)[0] * vectors(part, to)[1]).sum(-1) / 4
                    if part.relative is not None:
                        bucket = t5_bucket_by_loops(int(to - at), causal=False)
                        expected = expected + part.relative.table[:, bucket]
                torch.testing.assert_close(scores[b, :, i, j], expected, atol=1e-6, rtol=1e-6)


def _pair(grid: Grid, i: int, j: int) -> tuple[tuple[Layout, int], tuple[Layout, int]]:
    return (grid.query, i), (grid.key, j)


def _is_special(layout: Layout, b: int, i: int) -> bool:
    marks = layout.special
    return marks is not None and bool(marks[min(b, marks.shape[0] - 1), i])


def dense(terms: tuple[StructuredScore, ...], grid: Grid) -> Tensor:
    total = torch.zeros(1)
    for term in terms:
        if isinstance(term, BucketedTerms):
            assert term.table is not None
            total = total + term.table[:, term.bucket(grid.offset)].transpose(0, 1)
        else:
            total = total + term.query @ term.key.mT
    return total


@pytest.mark.parametrize("buckets", [None, 32])
@pytest.mark.parametrize("grid", SPECIAL.values(), ids=SPECIAL)
def test_special_tokens_lower_to_extra_columns(grid: Grid, buckets: int | None) -> None:
    part = make(buckets=buckets)
    q, k, _ = inputs(grid)
    k = k.repeat_interleave(2, dim=1)
    terms = part.lower(q, k, grid, scale=0.25)
    assert terms is not None
    got, expected = dense(terms, grid), part(q, k, grid, scale=0.25)
    torch.testing.assert_close(got.expand_as(expected), expected)
    weight = torch.randn_like(expected)
    leaves = list(part.parameters())
    for ours, theirs in zip(
        torch.autograd.grad((got * weight).sum(), leaves, materialize_grads=True),
        torch.autograd.grad((expected * weight).sum(), leaves, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_trained_class_token_runs_on_the_fused_kernel() -> None:
    part = make().requires_grad_(False)
    grid = SPECIAL["class token"]
    q, k, v = inputs(grid)
    outputs = [
        attend(q, k, v, grid, Encoding(score=part), backend=backend)
        for backend in ("sdpa", "reference")
    ]
    torch.testing.assert_close(*outputs)


def test_too_many_special_tokens_are_not_lowered() -> None:
    part = make()
    grid = Grid.of(special(Layout.sequence(9), [[True] * 9]))
    q, k, _ = inputs(grid)
    assert part.lower(q, k.repeat_interleave(2, dim=1), grid, scale=1.0) is None


def test_equals_the_authors_form_of_the_special_values() -> None:
    """Their θ_1 = p'·p' of a further position and a bucket no offset has; θ_2 likewise."""
    part = make()
    assert part.relative is not None
    further = torch.randn(2, 10, dtype=torch.float64)
    normal = part.norm(further)
    queries = part.query(normal).view(2, 6, 8)
    products = 0.25 * (queries * part.key(normal).view(2, 6, 8)).sum(-1)
    others = part.relative.table[:, 16], torch.randn(6, dtype=torch.float64)
    with torch.no_grad():
        part.special.copy_(products + torch.stack(others))
    q = torch.zeros(1, 6, 6, 8, dtype=torch.float64)
    scores = part(q, q, SPECIAL["class token"], scale=0.25)[0]
    torch.testing.assert_close(scores[:, 0], (products[0] + others[0])[:, None].expand(6, 6))
    torch.testing.assert_close(scores[:, 1:, 0], (products[1] + others[1])[:, None].expand(6, 5))
    assert not (part.relative.bucket(torch.arange(-300.0, 300).unsqueeze(-1)) == 16).any()
