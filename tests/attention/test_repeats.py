"""Calls like earlier ones are computed by what those prepared, and no others are."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from posenc.errors import ArgumentError

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
@pytest.mark.parametrize("length", [1, 5, 64])
def test_repeated_calls_equal_the_definition(name: str, length: int, planned: list[None]) -> None:
    encoding = make(name)
    with torch.no_grad():
        for seed in range(5):
            q, k, v = tensors(length, seed)
            output, lse = attend(q, k, v, grid(length), encoding, return_lse=True)
            before = len(planned)
            expected = attend(q, k, v, grid(length), encoding, return_lse=True, backend="reference")
            del planned[before:]
            torch.testing.assert_close((output, lse), expected, atol=3e-6, rtol=1e-5)
    assert len(planned) == (1 if name in PREPARED else 5)


def call(
    name: str,
    *,
    queries: int = 140,
    causal: bool = False,
    groups: int = 4,
    width: int = 8,
    **options: Any,
) -> Any:
    """Outputs of four calls of 140 keys and what the definition gives, more logits than few.

    Args:
        options: of ``attend``; ``dtype``, ``window``, and ``features_apart`` for queries.
    """
    encoding, dtype = make(name), options.pop("dtype", torch.float32)
    keys, window = Layout.sequence(140), options.pop("window", None)
    seen = Grid(keys.slice(140 - queries, 140), keys, causal, window)
    features_apart = options.pop("features_apart", False)
    outputs = []
    with torch.no_grad():
        for seed in range(4):
            q, k, v = tensors(140, seed, dtype=dtype)
            q, k, v = q[:, :, :queries], k[:, :groups].clone(), v[:, :groups, :, :width].clone()
            q = q.mT.contiguous().mT if features_apart else q
            options["return_lse"] = True
            found = attend(q, k, v, seen, encoding, **options)
            wanted = attend(q, k, v, seen, encoding, backend="reference", **options)
            outputs.append((found, wanted))
    return outputs


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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "options", "by"),
    [
        ("nope", {}, ["sdpa"]),
        ("rope", {}, ["native"]),
        ("nope", {"groups": 2}, ["sdpa"]),
        ("nope", {"width": 5}, []),
        ("nope", {"features_apart": True}, []),
        ("nope", {"scale": 0.2}, ["sdpa"]),
        ("rope", {"scale": 0.2}, ["native"]),
        ("alibi", {}, ["native"]),
    ],
)
def test_the_fastest_backend_prepares_a_call(
    name: str, options: dict[str, Any], by: list[str], causal: bool, prepared: list[str]
) -> None:
    for found, wanted in call(name, causal=causal, **options):
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=1e-5)
    assert prepared == by


@pytest.mark.parametrize(
    ("name", "groups", "width"),
    [("nope", 2, 8), ("alibi", 4, 5), ("t5", 2, 8), ("rope", 4, 8), ("rope", 2, 5), ("shaw", 2, 8)],
)
def test_few_queries_are_prepared_by_what_reads_keys_once(
    name: str, groups: int, width: int, prepared: list[str]
) -> None:
    for found, wanted in call(name, queries=3, causal=True, groups=groups, width=width):
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=1e-5)
    assert prepared == ["native"]


def test_windows_are_left_to_the_plan_of_each_call(prepared: list[str]) -> None:
    for found, wanted in call("nope", causal=True, window=9):
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=1e-5)
    assert prepared == []


@pytest.mark.parametrize(("wide", "by"), [(True, ["native"]), (False, ["sdpa"])])
def test_the_kernels_prepare_bfloat16_where_they_are_faster(
    wide: bool, by: list[str], prepared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "AVX512", wide)
    for found, wanted in call("nope", dtype=torch.bfloat16):
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
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


@pytest.mark.parametrize(
    "change",
    [
        {"length": 17},
        {"start": 5},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
        {"scale": 0.5},
        {"softcap": 20.0},
        {"window": 3},
        {"graded": True},
        {"strides": True},
        {"dropout": 0.5},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_calls_are_planned(change: dict[str, Any], planned: list[None]) -> None:
    encoding = make("alibi")
    q, k, v = tensors()
    with torch.no_grad():
        for _ in range(4):
            attend(q, k, v, grid(), encoding)
    assert len(planned) == 1
    length, dtype = change.get("length", 16), change.get("dtype", torch.float32)
    q, k, v = tensors(length, 7, dtype=dtype)
    if "strides" in change:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    layout = Layout.sequence(length, change.get("start", 0))
    other = Grid.of(layout, causal=True, window=change.get("window"))
    options = {n: x for n, x in change.items() if n in ("scale", "softcap", "dropout")}
    q.requires_grad_("graded" in change)
    with torch.set_grad_enabled("graded" in change):
        output = attend(q, k, v, other, encoding, **options)
    assert len(planned) == 2
    if "dropout" not in change:
        expected = attend(q, k, v, other, encoding, backend="reference", **options)
        off = 2e-2 if dtype == torch.bfloat16 else 3e-6
        torch.testing.assert_close(output, expected, atol=off, rtol=off)


def hooked(encoding: Encoding) -> None:
    assert encoding.score is not None
    encoding.score.register_forward_hook(lambda *_: None)


def replaced(encoding: Encoding) -> None:
    encoding.score = make("alibi").score


def other_setting(encoding: Encoding) -> None:
    encoding.score.max_distance = 3  # type: ignore[union-attr]


def other_weights(encoding: Encoding) -> None:
    for parameter in encoding.parameters():
        parameter.mul_(3.0)


@pytest.mark.parametrize("change", [hooked, replaced, other_setting, other_weights])
def test_changed_encodings_are_planned(
    change: Callable[[Encoding], None], planned: list[None]
) -> None:
    encoding = make("t5")
    q, k, v = tensors()
    with torch.no_grad():
        for _ in range(3):
            attend(q, k, v, grid(), encoding)
        change(encoding)
        del planned[:]
        output = attend(q, k, v, grid(), encoding)
        assert len(planned) == 1
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


@pytest.mark.parametrize("wrong", [{"dropout": None}, {"scale": True}, {"grid": None}, {"q": None}])
def test_wrong_arguments_are_named_after_right_ones(wrong: dict[str, Any]) -> None:
    q, k, v = tensors()
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "grid": grid(), "encoding": make("nope")}
    with torch.no_grad():
        for _ in range(3):
            attend(**given, scale=1.0)
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            attend(**({"scale": 1.0} | given | wrong))


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


@pytest.mark.parametrize("slow", [False, True])
def test_explain_says_that_calls_are_repeated(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "slow_mkl", lambda: slow)
    q, k, v = tensors()
    with torch.no_grad():
        assert "prepared once" in str(posenc.explain(q, k, v, grid(), make("shaw")))
        assert "prepared once" not in str(posenc.explain(q, k, v, grid(), make("cope")))
        many = (*tensors(140), grid(140))
        # Where PyTorch's products are slow, the kernels compute the first such call too.
        rope = posenc.explain(*many, make("rope"))
        assert rope.backend == ("native" if slow else "sdpa")
        assert ("prepared once" in str(rope)) == (not slow)
        assert "prepared once" not in str(posenc.explain(*many, make("alibi")))
    assert "prepared once" not in str(posenc.explain(q, k, v, grid(), make("shaw")))


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


def test_positions_with_gradients_are_planned_each() -> None:
    layout, encoding = Layout.sequence(16), make("rope")
    layout.positions.requires_grad_()
    for seed in range(3):
        output = attend(*tensors(16, seed), Grid.of(layout, causal=True), encoding)
        (gradient,) = torch.autograd.grad(output.sin().sum(), layout.positions)
        assert gradient.abs().sum() > 0
