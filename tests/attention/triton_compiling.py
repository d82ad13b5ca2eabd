"""The kernels of the Triton backend compiled for a CUDA device that is not there, and not run.

Not collected by itself: ``test_triton.py`` runs it in a process without ``TRITON_INTERPRET``. It
finds what the interpreter lets through: types, shapes and constants that the compiler refuses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from benchmarks import kernels_static
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention.backends.triton import Triton, form, launch, sums_launch
from posenc.attention.backends.triton.kernels import configs
from posenc.attention.backends.triton.kernels.forward import forward_kernel, split_kernel
from posenc.attention.backends.triton.kernels.gradients import gradients_kernel, offsets_kernel
from posenc.attention.backends.triton.kernels.sums import carries_kernel, sums_forward_kernel
from posenc.attention.backends.triton.kernels.sums_gradients import (
    sums_keys_kernel,
    sums_queries_kernel,
)
from tests.support.versions import fault_before

WIDTH = 16


class Absent:
    """The driver that Triton needs, for a device of a compute capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Names of the kernels that have been compiled, and the shared memory that they take."""
    found: dict[str, int] = {}
    run: Callable[..., Any] = JITFunction.run

    def compile_only(kernel: Any, *given: Any, warmup: bool, **named: Any) -> Any:
        result = run(kernel, *given, warmup=True, **named)
        name = kernel.fn.__name__
        found[name] = max(found.get(name, 0), result.metadata.shared)
        # By the launch: the defaults of Triton's versions differ.
        assert named["enable_fp_fusion"] is result.metadata.enable_fp_fusion is True
        return result

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", Absent(80))
    monkeypatch.setattr(form, "INTERPRETED", True)
    monkeypatch.setattr(configs, "DIAGONAL_BLOCKS", (16, 16))
    small = triton.Config({"block_x": 16, "block_y": 16}, num_warps=4, num_stages=1)
    for kernel in (forward_kernel, gradients_kernel):
        monkeypatch.setattr(kernel, "configs", [small])
    smallest = triton.Config({"block_x": 16, "block_y": 16}, num_warps=4, num_stages=1)
    monkeypatch.setattr(sums_forward_kernel, "configs", [smallest])
    monkeypatch.setattr(sums_launch, "CARRY_KEYS", 16)
    small = triton.Config({"block_q": 16}, num_warps=4, num_stages=1)
    for kernel in (carries_kernel, sums_queries_kernel, sums_keys_kernel):
        monkeypatch.setattr(kernel, "configs", [small])
    for kernel in (offsets_kernel, split_kernel):
        monkeypatch.setattr(kernel, "configs", kernel.configs[:1])
    return found


def inputs(queries: int, keys: int, *, learned: bool, width: int = WIDTH) -> list[torch.Tensor]:
    sizes = ((4, queries), (2, keys), (2, keys))
    return [
        torch.randn(1, *size, width, dtype=torch.bfloat16).requires_grad_(learned) for size in sizes
    ]


def whole() -> Encoding:
    """Left, right and values, clipped within the grid."""
    score = posenc.create(
        "deberta", heads=4, head_dim=WIDTH, dim=4 * WIDTH, max_distance=4, buckets=4
    ).score
    value = posenc.create("shaw", head_dim=WIDTH, max_distance=4).value
    return Encoding(score=score, value=value)


def test_training(compiled: dict[str, int]) -> None:
    grid = Grid.of(Layout.packed([20, 13]), causal=True)
    output = attend(*inputs(33, 33, learned=True), grid, whole(), backend="triton", dropout=0.1)
    output.sum().backward()
    expected = {"forward_kernel", "gradients_kernel", "offsets_kernel"}
    assert expected | {"delta_kernel", "ends_kernel"} == set(compiled)
    assert max(compiled.values()) < 99 * 1024  # what the smallest devices of 8.0 and up have


def test_one_compilation_serves_lengths_that_are_tuned_apart(
    monkeypatch: pytest.MonkeyPatch, compiled: dict[str, int]
) -> None:
    keys, codes = set[int](), set[str]()
    run: Callable[..., Any] = JITFunction.run

    def noted(kernel: Any, *given: Any, **named: Any) -> Any:
        result = run(kernel, *given, **named)
        if kernel.fn.__name__ == "forward_kernel":
            keys.add(named["key"])
            codes.add(result.hash)
        return result

    monkeypatch.setattr(JITFunction, "run", noted)
    for length in (64, 4096):
        grid = Grid.of(Layout.sequence(length), causal=True)
        attend(*inputs(length, length, learned=False), grid, Encoding(), backend="triton")
    assert len(keys) == 2
    assert len(codes) == 1


def test_function_of_the_distance(
    compiled: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_active", Absent(100))
    encoding, grid = posenc.create("fire", heads=4), Grid.of(Layout.sequence(100), causal=True)
    given = inputs(100, 100, learned=True)
    attend(*given, grid, encoding, backend="triton").sum().backward()
    kernels = {"forward_kernel", "gradients_kernel", "offsets_kernel", "delta_kernel"}
    assert kernels == set(compiled)
    assert max(compiled.values()) < 99 * 1024


@pytest.mark.parametrize("tuned", [True, False])
def test_tile_sizes_are_measured_unless_on_trial(
    tuned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = dict[str, int]()

    def count(tuner: Any, *given: Any, **named: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, given, strict=False))
        counts[tuner.base_fn.__name__] = len(tuner.prune_configs(named))

    monkeypatch.setattr(Autotuner, "run", count)
    monkeypatch.setattr(JITFunction, "run", lambda *given, **named: None)
    monkeypatch.setattr(form, "INTERPRETED", True)
    backend = Triton() if tuned else Triton().untuned()
    grid = Grid.of(Layout.packed([20, 13]), causal=True)
    attend(*inputs(33, 33, learned=True), grid, whole(), backend=backend).sum().backward()
    assert set(counts) == {"forward_kernel", "gradients_kernel", "offsets_kernel"}
    assert min(counts.values()) > 1 if tuned else set(counts.values()) == {1}


def test_relative_logits(compiled: dict[str, int]) -> None:
    """Rows of another width than heads, in training and in decoding."""
    encoding = posenc.create("relative_logits", dim=8, heads=4, width=5, extent=20, floor=9.0)
    for queries, kernels in (
        (100, {"forward_kernel", "gradients_kernel", "offsets_kernel"}),
        (1, {"split_kernel", "combine_kernel"}),
    ):
        query = encoding.observe(
            torch.randn(1, queries, 8, dtype=torch.bfloat16),
            Layout.sequence(queries, 100 - queries),
        )
        grid = Grid(query, Layout.sequence(100), causal=True)
        compiled.clear()
        with torch.set_grad_enabled(queries > 1):
            output = attend(
                *inputs(queries, 100, learned=queries > 1), grid, encoding, backend="triton"
            )
        if queries > 1:
            output.sum().backward()
        assert kernels <= set(compiled)
        assert max(compiled.values()) < 99 * 1024


def test_decoding(compiled: dict[str, int]) -> None:
    grid = Grid(Layout.sequence(1, 99), Layout.sequence(100), causal=True)
    with torch.no_grad():
        attend(*inputs(1, 100, learned=False), grid, whole(), backend="triton")
    assert set(compiled) == {"split_kernel", "combine_kernel"}
    assert launch.PROGRAMS == 1024  # not that of the interpreter


def test_rotating(compiled: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest heads, in the widest tiles that they are tried in."""
    wide = triton.Config({"block_x": 64, "block_y": 64}, num_warps=8, num_stages=1)
    for kernel in (forward_kernel, gradients_kernel):
        monkeypatch.setattr(kernel, "configs", [wide])
    grid = Grid.of(Layout.sequence(256))
    given = inputs(256, 256, learned=True, width=256)
    encoding = posenc.create("rope", head_dim=256)
    assert "as they read them" in str(explain(*given, grid, encoding, backend="triton"))
    attend(*given, grid, encoding, backend="triton").sum().backward()
    assert {"forward_kernel", "gradients_kernel", "delta_kernel"} == set(compiled)
    assert max(compiled.values()) < 227 * 1024


@pytest.mark.parametrize(("pairing", "width"), [("half", 256), ("adjacent", 40)])
def test_rotating_while_decoding(compiled: dict[str, int], pairing: str, width: int) -> None:
    grid = Grid(Layout.sequence(1, 99), Layout.sequence(100), causal=True)
    encoding = posenc.create("rope", head_dim=width, pairing=pairing)
    with torch.no_grad():
        given = inputs(1, 100, learned=False, width=width)
        attend(*given, grid, encoding, backend="triton")
    assert set(compiled) == {"split_kernel", "combine_kernel"}
    assert max(compiled.values()) < 227 * 1024


@pytest.mark.parametrize(
    ("name", "capability", "dropout"), [("stick_breaking", 80, 0.1), ("cope", 90, 0.0)]
)
def test_sums(
    compiled: dict[str, int],
    name: str,
    capability: int,
    dropout: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "_active", Absent(capability))
    encoding = posenc.create(name, **({"head_dim": WIDTH} if name == "cope" else {}))
    grid = Grid.of(Layout.sequence(230), causal=True)
    given = inputs(230, 230, learned=True)
    attend(*given, grid, encoding, backend="triton", dropout=dropout).sum().backward()
    kernels = {"sums_forward_kernel", "carries_kernel", "sums_queries_kernel", "sums_keys_kernel"}
    assert kernels == set(compiled) - {"delta_kernel"}
    assert max(compiled.values()) < 99 * 1024


@fault_before("triton", "3.7", "a loop takes more instructions")
def test_loops_stay_within_their_limits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instructions and spilled registers, as cuobjdump and nvdisasm show them."""
    methods = ("none", "alibi", "shaw", "cope")
    options = ["--limits", "--only", *methods, "--width", "64"]
    monkeypatch.setattr(sys, "argv", ["kernels_static", *options])
    assert kernels_static.main() == 0, capsys.readouterr().err
    rows = capsys.readouterr().out
    for row in (
        "none | dropout | forward",
        "alibi | near | queries' gradients",
        "shaw | near | forward",
        "cope | near | keys' gradients",
    ):
        assert f"| {row} |" in rows
