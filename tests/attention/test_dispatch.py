"""The rules by which ``auto`` orders backends, each on both sides of its bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from posenc import Encoding, Grid, Layout
from posenc.attention import dispatch
from posenc.attention.backends import native
from posenc.attention.backends.native import build
from posenc.attention.dispatch import FEW, SMALL, preference
from posenc.attention.problem.problem import Problem
from posenc.encoding import BucketedTerms, LowRank, Rotation, StructuredScore, TokenTableProduct

CPU = torch.device("cpu")


def problem(
    queries: int,
    keys: int,
    *,
    heads: int = 4,
    lowered: tuple[StructuredScore, ...] | None = (),
    layout: Layout | None = None,
    causal: bool = True,
) -> Problem:
    """Zeros of width 8 that take no memory."""
    q, k = (torch.zeros(()).expand(1, heads, n, 8) for n in (queries, keys))
    key = Layout.sequence(keys) if layout is None else layout
    grid = Grid(key.slice(keys - queries, keys), key, causal)
    return Problem(q, k, k, grid, Encoding(), 1.0, 0.0, lowered)


def half(case_problem: Problem) -> Problem:
    """The problem with queries in bfloat16."""
    return replace(case_problem, q=case_problem.q.to(torch.bfloat16))


def graded(case_problem: Problem) -> Problem:
    """The problem with queries that want gradients."""
    return replace(case_problem, q=case_problem.q.clone().requires_grad_())


def columns(count: int) -> LowRank:
    zeros = torch.zeros(1, 1, 1, count)
    return LowRank(zeros, zeros)


TABLE = BucketedTerms(bucket=lambda offsets: offsets[..., 0].long(), table=torch.zeros(1, 1))


def one_query(**options: Any) -> Problem:
    """One query of four heads with sinks."""
    return replace(problem(1, 2**15), **({"sinks": torch.zeros(4)} | options))


def shared(case_problem: Problem, *, groups: int = 1) -> Problem:
    """The problem with as many heads of keys."""
    return replace(case_problem, k=case_problem.k[:, :groups], v=case_problem.v[:, :groups])


RIGHT = replace(TABLE, right=TokenTableProduct(torch.zeros(1, 4, 1, 8), torch.zeros(1, 1, 8)))
COLUMN = replace(TABLE, column=torch.zeros(1, 4, 600))
SIDE = 512
"""Queries and keys of four heads with just ``SMALL`` logits; ``FEW`` are a quarter of a head."""

CASES = {
    "few": (problem(SIDE // 4, SIDE, heads=1), "few logits"),
    "one more": (problem(SIDE, SIDE, causal=False), "no terms by offset, not many"),
    "masked, few": (problem(256, 256), "no terms by offset, not many"),
    "masked": (problem(256, 257), "masked pairs, not many"),
    "masked, small heads": (problem(128, 256, heads=16), "no terms by offset, not many"),
    "masked, larger heads": (problem(128, 257, heads=16), "masked pairs, not many"),
    "narrow, few": (graded(half(problem(SIDE // 4, SIDE, heads=1))), "few logits"),
    "narrow": (graded(half(problem(SIDE // 4, SIDE + 1, heads=1))), "masked pairs, not many"),
    "narrow, no gradients": (
        half(problem(SIDE // 4, SIDE, heads=2)),
        "no terms by offset, not many",
    ),
    "many": (problem(SIDE, SIDE + 1), "masked pairs"),
    "many, all visible": (problem(SIDE, SIDE + 1, causal=False), "no terms by offset"),
    "many, narrow": (graded(half(problem(SIDE, SIDE + 1, causal=False))), "masked pairs"),
    "one more head": (problem(SIDE, SIDE, heads=5), "masked pairs"),
    "packed, few": (problem(100, 100, layout=Layout.packed([40, 60])), "few logits"),
    "packed, not many": (
        problem(300, 300, layout=Layout.packed([100, 200])),
        "documents or padding, not many",
    ),
    "packed": (problem(600, 600, layout=Layout.packed([100, 500])), "documents or padding"),
    "as many columns as features": (
        problem(600, 600, lowered=(columns(3), columns(5)), causal=False),
        "no terms by offset",
    ),
    "more columns": (problem(600, 600, lowered=(columns(4), columns(5))), "more extra columns"),
    "table": (problem(600, 8192, lowered=(TABLE,)), "terms by offset"),
    "table, few queries": (problem(4, 8192, lowered=(TABLE,)), "few queries, not many"),
    "table, few queries, fewer keys": (problem(16, 1023, lowered=(TABLE,)), "few logits"),
    "column, few queries": (problem(4, 8192, lowered=(COLUMN,)), "terms by offset, not many"),
    "products with keys, few queries": (
        problem(4, 8192, lowered=(RIGHT,)),
        "terms by offset, not many",
    ),
    "columns, few queries": (
        problem(4, 8192, lowered=(columns(1),)),
        "no terms by offset, not many",
    ),
    "few queries": (problem(4, 8192), "few queries, not many"),
    "few queries, not so many keys": (problem(4, 8191), "no terms by offset, not many"),
    "few queries, fewer rows": (problem(4, 8192, heads=3), "no terms by offset, not many"),
    "few queries, fewer keys, half": (half(problem(16, 2048)), "few queries, not many"),
    "few queries, hardly more keys": (half(problem(16, 255, heads=17)), "no terms, not many"),
    "few queries, gradients": (graded(problem(4, 8192)), "no terms by offset, not many"),
    "few queries, shared keys": (
        shared(half(problem(16, 2048)), groups=1),
        "few queries, not many",
    ),
    "few queries, shared by too many": (
        shared(half(problem(16, 2048, heads=5))),
        "no terms by offset, not many",
    ),
    "not so few queries": (half(problem(17, 2048)), "no terms by offset, not many"),
    "masked, not so few": (problem(17, 8192), "masked pairs, not many"),
    "few logits, few queries": (half(problem(1, 64)), "few queries, not many"),
    "few logits, shared keys": (shared(problem(2, 64)), "few logits, shared"),
    "table beside columns": (problem(600, 600, lowered=(columns(1), TABLE)), "terms by offset"),
    "long without table": (problem(600, 8192, lowered=(columns(1),)), "masked pairs"),
    "table, not many": (problem(SIDE, SIDE, lowered=(TABLE,)), "terms by offset, not many"),
    "column": (problem(600, 600, lowered=(COLUMN,)), "terms by offset"),
    "column in bfloat16": (half(problem(600, 600, lowered=(COLUMN,))), "terms by offset"),
    "unstructured": (problem(600, 8192, lowered=None), "a score part without"),
    "unstructured, packed": (
        problem(600, 600, lowered=None, layout=Layout.packed([100, 500])),
        "a score part without",
    ),
    "unstructured, few": (problem(64, 65, lowered=None), "a score part without, few"),
    "one query": (one_query(), "few queries, not many"),
    "one query, cap": (one_query(sinks=None, softcap=1.0), "few queries, not many"),
    "one query, cap, gradients": (
        graded(one_query(sinks=None, softcap=1.0)),
        "sinks or a cap, not many",
    ),
    "one query, dropout": (one_query(dropout=0.1), "sinks or a cap, not many"),
    "unstructured, fewer": (problem(64, 64, lowered=None), "few logits"),
}
ORDER = {
    "sinks or a cap, not many": ["native", "sdpa", "reference"],
    "few queries, not many": ["native", "sdpa", "reference"],
    "few logits": ["sdpa", "reference"],
    "few logits, shared": ["sdpa", "native", "reference"],
    "no terms, not many": ["sdpa", "native", "reference"],
    "no terms by offset": ["sdpa", "native", "blockwise", "reference"],
    "no terms by offset, not many": ["sdpa", "native", "reference"],
    "terms by offset, not many": ["native", "sdpa", "reference"],
    "masked pairs, not many": ["native", "sdpa", "reference"],
    "documents or padding, not many": ["native", "sdpa", "reference"],
    "a score part without, few": ["native", "sdpa", "reference"],
}


@pytest.mark.parametrize("name", CASES)
def test_rules_on_the_cpu(name: str) -> None:
    assert 4 * SIDE * SIDE == SMALL
    assert SIDE * SIDE // 4 == FEW
    case_problem, expected = CASES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "slow_mkl", lambda: False)
        rule, order = preference(CPU, case_problem)
    assert rule.name.startswith(expected.partition(",")[0])
    assert order == ORDER.get(expected, ["native", "sdpa", "blockwise", "reference"])


@pytest.mark.parametrize(
    ("queries", "keys", "first"), [(128, 128, "native"), (16, 512, "native"), (15, 2000, "sdpa")]
)
def test_kernels_come_first_without_terms_where_they_are_faster(
    queries: int, keys: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "slow_mkl", lambda: True)
    monkeypatch.setattr(dispatch, "FEW", 0)
    case_problem = problem(queries, keys, causal=False)
    assert preference(CPU, case_problem)[1][0] == first


@pytest.mark.parametrize(
    ("maker", "vectors", "mkl", "slow"),
    [
        ("AuthenticAMD", "AVX512", True, True),
        ("AuthenticAMD", "AVX2", True, False),
        ("AuthenticAMD", "AVX512", False, False),
        ("GenuineIntel", "AVX512", True, False),
    ],
)
def test_mkl_is_slow_where_it_leaves_vectors_unused(
    maker: str, vectors: str, mkl: bool, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "processor", lambda: (maker, "25"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    assert build.slow_mkl.__wrapped__() is slow


@pytest.mark.parametrize("wide", [False, True])
def test_what_is_only_rotated_goes_by_the_vectors(
    wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "AVX512", wide)
    monkeypatch.setattr(native, "serves_inside", lambda *_: True)
    monkeypatch.setattr(native, "slow_mkl", lambda: False)
    queries, keys = (torch.ones(1, 1, SIDE + more, 4) for more in (0, 1))
    rotation = Rotation((queries, 0 * queries), (keys, 0 * keys), "half")
    case_problem = replace(problem(SIDE, SIDE + 1, causal=False), rotation=rotation)
    rule, order = preference(CPU, case_problem)
    assert (rule.name == "nothing but a rotation", order[0] == "native") == (wide, wide)


@pytest.mark.parametrize(
    ("wide", "queries", "dtype", "first"),
    [
        (True, 17, torch.bfloat16, "native"),
        (False, 17, torch.bfloat16, "sdpa"),
        (True, 17, torch.float32, "sdpa"),
    ],
)
def test_bfloat16_goes_by_the_vectors(
    wide: bool, queries: int, dtype: torch.dtype, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "AVX512", wide)
    monkeypatch.setattr(native, "slow_mkl", lambda: False)
    plain = problem(queries, SMALL // queries, causal=False)
    case_problem = replace(plain, q=plain.q.to(dtype))
    assert preference(CPU, case_problem)[1][0] == first


def test_few_logits_under_a_transform_go_by_definition() -> None:
    found: list[tuple[str, list[str]]] = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        rule, order = preference(CPU, problem(3, 3))
        found.append((rule.name, order))
        return x

    torch.func.vmap(ask)(torch.zeros(2))
    assert found == [("few logits, under a transform of torch.func", ["reference"])]


@pytest.mark.parametrize("device", ["cuda", "mps", "meta"])
def test_constant_tables_on_accelerators_go_to_flex(device: str) -> None:
    learned = replace(TABLE, table=torch.zeros(1, 1, requires_grad=True))
    for lowered, first in (
        ((TABLE,), "flex"),
        ((learned,), "triton"),
        ((), "triton"),
        (None, "triton"),
    ):
        case_problem = problem(600, 600, lowered=lowered)
        rule, order = preference(torch.device(device), case_problem)
        assert rule.name.startswith("on an accelerator")
        assert order[:2] == ["sdpa", first]
        assert order[-2:] == ["blockwise", "reference"]
        assert "triton" in order
    with torch.no_grad():
        _, order = preference(torch.device(device), problem(9, 9, lowered=(learned,)))
    assert order[1] == "flex"
