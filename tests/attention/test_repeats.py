"""Calls like earlier ones are computed by what those prepared, and no others are."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posenc
from posenc import Encoding, Grid, Layout, Prepared, attend
from posenc.attention import dispatch
from posenc.attention.backends import native
from posenc.attention.backends.common.base import Attend, Backend, Plan, Refusal
from posenc.attention.backends.native.build import missing
from posenc.attention.problem.problem import Problem

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason="needs the compiled kernels"),
    pytest.mark.usefixtures("entered"),
]

PREPARED = ("nope", "rope", "xpos", "alibi", "t5", "kerple", "fire", "sandwich")
PREPARED += ("shaw", "deberta", "tupe")


def make(name: str) -> Encoding:
    torch.manual_seed(0)
    return posenc.create(name, dim=32, heads=4, max_length=256, causal=True)


def tensors(length: int = 16, seed: int = 1, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 4, length, 8, generator=generator).to(**options) for _ in range(3))
    return q, k, v


def grid(length: int = 16, start: int = 0) -> Grid:
    return Grid.of(Layout.sequence(length, start), causal=True)


def test_grids_of_other_keys_are_told_apart() -> None:
    """The last queries see all keys, of which there are more, then fewer than before."""
    encoding, (q, k, v) = make("alibi"), tensors(10)
    for keys in (5, 5, 8, 8, 5):
        given = q, k[:, :, :keys], v[:, :, :keys]
        seen = Grid(Layout.sequence(10), Layout.sequence(keys), causal=True)
        output = attend(*given, seen, encoding, backend="native")
        expected = attend(*given, seen, encoding, backend="reference")
        torch.testing.assert_close(output, expected, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("name", [*PREPARED, "transformer_xl", "cope"])
def test_repeated_calls_equal_the_definition(name: str, planned: list[None]) -> None:
    encoding, length = make(name), 64
    with torch.no_grad():
        for seed in range(5):
            q, k, v = tensors(length, seed)
            output, lse = attend(q, k, v, grid(length), encoding, return_lse=True)
            before = len(planned)
            expected = attend(q, k, v, grid(length), encoding, return_lse=True, backend="reference")
            del planned[before:]
            torch.testing.assert_close((output, lse), expected, atol=3e-6, rtol=1e-5)
    assert len(planned) == (1 if name in PREPARED else 5)


def compare_calls(
    name: str,
    *,
    queries: int = 140,
    causal: bool = False,
    groups: int = 4,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    features_apart: bool = False,
    scale: float | None = None,
) -> None:
    """Four calls of 140 keys, more logits than few, equal the definition."""
    encoding, keys = make(name), Layout.sequence(140)
    seen = Grid(keys.slice(140 - queries, 140), keys, causal, window)
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    with torch.no_grad():
        for seed in range(4):
            q, k, v = tensors(140, seed, dtype=dtype)
            q, k, v = q[:, :, :queries], k[:, :groups].clone(), v[:, :groups, :, :width].clone()
            q = q.mT.contiguous().mT if features_apart else q
            found, wanted = (
                attend(q, k, v, seen, encoding, backend=x, scale=scale, return_lse=True)
                for x in ("auto", "reference")
            )
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backends that prepared calls, in turn."""
    found: list[str] = []

    def watch(backend: Backend) -> None:
        make_plan = backend.plan

        def planning(problem: Problem) -> Plan | Refusal:
            plan = make_plan(problem)
            if isinstance(plan, Refusal):
                return plan

            def naming() -> Attend | None:
                attend = plan.prepare()
                found.extend([backend.name] * (attend is not None))
                return attend

            return replace(plan, prepare=naming)

        monkeypatch.setattr(backend, "plan", planning)

    for backend in (dispatch.BACKENDS["native"], dispatch.BACKENDS["sdpa"]):
        watch(backend)
    monkeypatch.setattr(native, "slow_mkl", lambda: False)
    return found


FEW: dict[str, Any] = {"queries": 3, "causal": True}
"""Queries for which keys are read once."""


@pytest.mark.parametrize(
    ("name", "options", "by"),
    [
        ("nope", {}, ["sdpa"]),
        ("nope", {"causal": True, "groups": 2}, ["sdpa"]),
        ("nope", {"width": 5}, []),
        ("nope", {"features_apart": True}, []),
        ("nope", {"scale": 0.2}, ["sdpa"]),
        ("nope", {"causal": True, "window": 9}, []),
        ("rope", {"causal": True}, ["native"]),
        ("rope", {"scale": 0.2}, ["native"]),
        ("alibi", {}, ["native"]),
        *((name, FEW | {"groups": 2}, ["native"]) for name in ("nope", "t5", "shaw")),
        *((name, FEW | {"width": 5}, ["native"]) for name in ("alibi", "rope")),
    ],
)
def test_the_fastest_backend_prepares_a_call(
    name: str, options: dict[str, Any], by: list[str], prepared: list[str]
) -> None:
    compare_calls(name, **options)
    assert prepared == by


@pytest.mark.parametrize(("wide", "by"), [(True, ["native"]), (False, ["sdpa"])])
def test_the_kernels_prepare_bfloat16_where_they_are_faster(
    wide: bool, by: list[str], prepared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "AVX512", wide)
    compare_calls("nope", dtype=torch.bfloat16)
    assert prepared == by


def test_each_result_has_its_own_memory() -> None:
    encoding, found = make("t5"), []
    with torch.no_grad():
        for seed in range(4):
            q, k, v = tensors(seed=seed)
            found.append((attend(q, k, v, grid(), encoding), (q, k, v)))
    for output, (q, k, v) in found:
        expected = attend(q, k, v, grid(), encoding, backend="reference")
        torch.testing.assert_close(output, expected, atol=3e-6, rtol=1e-5)


def test_calls_are_planned_while_all_modules_are_observed(planned: list[None]) -> None:
    encoding, (q, k, v) = make("t5"), tensors()
    with torch.no_grad():
        for _ in range(3):
            attend(q, k, v, grid(), encoding)
        del planned[:]
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            attend(q, k, v, grid(), encoding)
            attend(q, k, v, grid(), encoding)
        finally:
            handle.remove()
    assert len(planned) == 2


def test_threads_may_repeat_a_call_at_once(entered: Prepared) -> None:
    encoding = make("shaw")
    given = [tensors(64, seed) for seed in range(24)]

    def run(qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            return attend(*qkv, grid(64), encoding)

    expected = [run(qkv) for qkv in given]
    with ThreadPoolExecutor(4, initializer=entered.__enter__) as pool:
        for _ in range(4):
            for output, wanted in zip(pool.map(run, given), expected, strict=True):
                torch.testing.assert_close(output, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["alibi", "t5", "rope", "cope"])
def test_encodings_of_few_calls_leave_nothing(name: str, entered: Prepared) -> None:
    """As in models whose terms are made anew in each call."""
    sizes = []
    with torch.no_grad():
        for number in range(60):
            encoding = make(name)
            for _ in range(number % 3):
                attend(*tensors(), grid(), encoding)
            sizes.append(len(entered._slots))
    assert max(sizes[30:]) <= max(sizes[:30])


def test_an_encoding_owns_what_its_calls_prepare(entered: Prepared, planned: list[None]) -> None:
    encoding, arguments = make("alibi"), (*tensors(), grid())
    entered.__exit__()
    with torch.no_grad():
        for _ in range(4):
            attend(*arguments, encoding)
        assert len(planned) == 1
        attend(*arguments, copy.deepcopy(encoding))  # copies are empty
    assert len(planned) == 2


def test_a_layer_repeats_its_attention(planned: list[None]) -> None:
    layer = posenc.Attention(dim=32, heads=4, encoding=make("rope"), causal=True).eval()
    x = torch.randn(2, 16, 32)
    with torch.no_grad():
        outputs = [layer(x, Layout.sequence(16)) for _ in range(4)]
    assert len(planned) == 1
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=1e-5, rtol=1e-5)
    assert isinstance(layer, nn.Module)


def test_padded_calls_are_planned_each(planned: list[None]) -> None:
    valid = torch.arange(16).expand(2, -1) >= torch.tensor([[0], [7]])
    layout, encoding = replace(Layout.sequence(16), valid=valid), make("alibi")
    with torch.no_grad():
        for seed in range(3):
            q, k, v = tensors(16, seed)
            found = attend(q, k, v, Grid.of(layout, causal=True), encoding)
            expected = attend(q, k, v, Grid.of(layout, causal=True), encoding, backend="reference")
            torch.testing.assert_close(found, expected, atol=3e-6, rtol=1e-5)
    assert len(planned) == 6
