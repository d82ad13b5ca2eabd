"""Prebuilt kernels: which variant is chosen, how it is named, and the threads that it runs on."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hatch_build import KernelsHook

import posenc
from posenc import Encoding, Grid, Layout, attend, explain
from posenc.attention import dispatch
from posenc.attention.backends import native
from posenc.attention.backends.native import build, variants
from posenc.attention.backends.native.library import KERNELS
from posenc.attention.backends.native.variants import instruction_sets

needs_kernels = pytest.mark.skipif(
    build.missing() is not None, reason=f"kernels are not built; {build.COMMAND}"
)
V3, V4, AMX = (frozenset(variants.NEEDS[name]) for name in ("v3", "v4", "amx"))


@pytest.fixture
def file() -> Path:
    """The kernels that this machine uses."""
    name = build.choose().name
    return build.path() if name == "build" else variants.file_of(name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of prebuilt variants, on a processor with everything that any needs."""
    monkeypatch.setattr(variants, "PREBUILT", tmp_path)
    monkeypatch.setattr(variants, "instruction_sets", lambda: AMX | {"asimd"})
    monkeypatch.setattr(variants, "_tiles_permitted", lambda: True)
    monkeypatch.delenv("POSENC_KERNELS", raising=False)
    monkeypatch.delenv("POSENC_KERNEL_FLAGS", raising=False)
    build.choose.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    build.choose.cache_clear()


def _ship(*names: str) -> None:
    for name in names:
        variants.file_of(name).touch()


@pytest.mark.parametrize(
    ("sets", "tiles", "chosen", "reason"),
    [
        (AMX, True, "amx", ""),
        (AMX, False, "v4", "amx needs tile registers, which this system does not give"),
        (V4, True, "v4", "amx needs amx_bf16, amx_tile, avx512_bf16"),
        (V4 - {"avx512vl"}, True, "v3", "v4 needs avx512vl"),
        (V3 - {"fma"}, True, "build", "v3 needs fma, which this processor or system lacks"),
    ],
)
def test_the_best_variant_that_the_machine_supports_is_chosen(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    sets: frozenset[str],
    tiles: bool,
    chosen: str,
    reason: str,
) -> None:
    _ship("v3", "v4", "amx")
    monkeypatch.setattr(variants, "instruction_sets", lambda: sets)
    monkeypatch.setattr(variants, "_tiles_permitted", lambda: tiles)
    choice = build.choose()
    assert choice.name == chosen
    assert reason in choice.reason
    assert bool(reason) == bool(choice.reason)


@pytest.mark.parametrize(
    ("value", "name", "reason"),
    [
        ("v3", "v3", "POSENC_KERNELS is 'v3'"),
        ("build", "build", "POSENC_KERNELS is 'build'"),
        ("none", "none", "POSENC_KERNELS is 'none'"),
        ("amx", "none", "'amx', which did not come with posenc"),
        ("neon", "none", "'neon', which needs asimd"),
        ("v5", "none", "'v5', not one of amx, v4, v3, neon, build, none"),
    ],
)
def test_a_variable_overrides_the_choice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: str, name: str, reason: str
) -> None:
    _ship("v3", "v4", "neon")
    monkeypatch.setattr(variants, "instruction_sets", lambda: V4)
    monkeypatch.setenv("POSENC_KERNELS", value)
    choice = build.choose()
    assert choice.name == name
    assert reason in choice.reason
    if name == "none":
        assert build.missing() == choice.reason


def test_processors_of_apple_have_what_neon_needs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ship("neon")
    monkeypatch.setattr(variants, "instruction_sets", instruction_sets.__wrapped__)
    monkeypatch.setattr(variants.platform, "machine", lambda: "arm64")
    assert build.choose() == ("neon", "")


def test_variants_of_other_sources_are_not_taken(folder: Path) -> None:
    assert "none came with this installation" in build.choose().reason
    build.choose.cache_clear()
    (folder / "v3-0123456789abcdef.so").touch()
    assert build.choose().name == "build"
    assert "of other sources" in build.choose().reason


def test_the_hash_follows_from_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(variants.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(variants, "SOURCES", copy)
    compute = variants.sources_hash.__wrapped__
    assert compute() == variants.sources_hash()
    for file in copy.iterdir():
        before = compute()
        file.write_bytes(file.read_bytes() + b"\n")
        assert compute() != before
    monkeypatch.setattr(variants, "TERMS", "left,right")
    assert compute() != before


def test_importing_reads_no_sources() -> None:
    program = "import posenc; from posenc.attention.backends.native import variants as v; "
    program += "print(v.sources_hash.cache_info().currsize, v.choose.cache_info().currsize)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "0 0\n", done.stderr


def _call(encoding: Encoding, length: int = 300) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, length, 16, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, Grid.of(Layout.sequence(length)), encoding, backend="native")
    inputs = [q, k, v, *encoding.parameters()]
    return out, *torch.autograd.grad(out.square().sum(), inputs)


def _same(x: tuple[torch.Tensor, ...], y: tuple[torch.Tensor, ...]) -> bool:
    return all(map(torch.equal, x, y))


@needs_kernels
def test_a_prebuilt_variant_needs_no_home_and_is_named(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = posenc.create("t5", heads=2)
    shutil.copy(file, variants.file_of("v3"))
    build.choose.cache_clear()
    monkeypatch.setattr(build, "path", lambda: pytest.fail("it asks for the cache folder"))
    assert len(_call(encoding)) == 5
    q = torch.randn(1, 2, 300, 16)
    text = str(explain(q, q, q, Grid.of(Layout.sequence(300)), encoding))
    assert text.startswith("native ")
    assert "; kernels: v3, prebuilt." in text
    assert build.build() == variants.file_of("v3")


def test_a_damaged_variant_is_reported(folder: Path) -> None:
    variants.file_of("v3").write_text("not a library")
    reason = build.missing()
    assert reason is not None
    assert "cannot be loaded" in reason
    assert f"POSENC_KERNELS=build {build.COMMAND}" in reason


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.levelname}: {record.getMessage()}")


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Records]:
    monkeypatch.setattr(dispatch, "_WARNED", set())
    handler = _Records()
    dispatch.LOG.addHandler(handler)
    yield handler
    dispatch.LOG.removeHandler(handler)


def _attend(encoding: Encoding, length: int) -> None:
    q = torch.randn(1, 2, length, 16)
    attend(q, q, q, Grid.of(Layout.sequence(length)), encoding)


def test_missing_kernels_are_logged_once_where_they_would_serve(
    folder: Path, records: _Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSENC_KERNELS", "v3")
    monkeypatch.setattr(native, "slow_mkl", lambda: False)
    t5 = posenc.create("t5", heads=2)
    _attend(t5, 20)  # too few logits for them
    _attend(Encoding(), 300)  # PyTorch's kernel is as fast
    assert records.messages == []
    for _ in range(3):
        _attend(t5, 300)
    (message,) = records.messages
    assert message.startswith("WARNING: attention is slower than with the backend 'native', but ")
    assert "did not come with posenc" in message


def test_kernels_that_are_switched_off_are_not_logged(
    folder: Path, records: _Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSENC_KERNELS", "none")
    _attend(posenc.create("t5", heads=2), 300)
    assert records.messages == []


@needs_kernels
@pytest.mark.parametrize(
    ("name", "options"),
    [("t5", {"heads": 2}), ("dape", {"heads": 2, "hidden": 4}), ("rope", {"head_dim": 16})],
)
def test_any_number_of_threads_gives_the_same_bits(
    name: str, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    encoding, threads = posenc.create(name, **options), torch.get_num_threads()
    expected = _call(encoding)
    try:
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            assert _same(_call(encoding), expected)
        monkeypatch.setattr(build.library(), "_parallel", None)  # as without a runtime of threads
        assert _same(_call(encoding), expected)
    finally:
        torch.set_num_threads(threads)


@needs_kernels
def test_kernels_run_on_the_threads_of_the_runtime_that_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here one that counts its calls, and gives a single thread of those asked for."""
    encoding, threads, asked = posenc.create("t5", heads=2), torch.get_num_threads(), list[int]()
    expected = _call(encoding)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(function: int, argument: int, count: int, flags: int) -> None:
        asked.append(count)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)

    address = ctypes.cast(parallel, ctypes.c_void_p).value
    monkeypatch.setattr(build.library(), "_parallel", address)
    torch.set_num_threads(3)
    try:
        assert _same(_call(encoding), expected)
    finally:
        torch.set_num_threads(threads)
    assert set(asked) == {3}


OUT_OF_MEMORY = """
import resource, sys, torch, posenc
from posenc import Grid, Layout, attend
from posenc.attention.backends.native import build

torch.set_num_threads(2)
encoding, length = posenc.create("alibi", heads=2), 300_000
q, k, keys = torch.zeros(2, 2, 65, 20), torch.zeros(2, 2, length, 20), Layout.sequence(length)
attend(q, q, q, Grid.of(Layout.sequence(65)), encoding, backend="native")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 50_000_000, -1))
for build.library()._parallel in (build.library()._parallel, None):
    try:
        grid = Grid(keys.slice(length - 65, length), keys)
        attend(q, k, k, grid, encoding, backend="native")
    except MemoryError as error:
        print(error)
"""


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_memory_that_runs_out_on_a_thread_is_an_error_of_the_call() -> None:
    command = [sys.executable, "-c", OUT_OF_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == 2 * "no memory for the scratch of posenc's forward kernel\n", done.stderr


@needs_kernels
@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("nm") is None, reason="it reads ELF files by nm"
)
def test_the_library_exports_its_functions_alone_and_brings_no_openmp(file: Path) -> None:
    assert build.library()._parallel is not None, "PyTorch's runtime is not found"
    symbols = subprocess.run(["nm", "-D", file], capture_output=True, text=True, check=True).stdout
    rows = [line.split()[-2:] for line in symbols.splitlines()]
    exported = [symbol for kind, symbol in rows if kind not in ("U", "w")]
    assert len(exported) == 2 * len(KERNELS) + 1
    assert all(symbol.startswith("posenc_") for symbol in exported)
    assert not [symbol for _, symbol in rows if symbol.startswith(("GOMP", "omp", "__kmp"))]


def test_wheels_for_a_platform_hold_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = KernelsHook.__new__(KernelsHook)
    data: dict[str, object] = {"force_include": {}}
    hook.initialize("standard", data)
    assert data == {"force_include": {}}
    (tmp_path / "v3-ab.so").touch()
    (tmp_path / "v3-ab-float32.o").touch()
    monkeypatch.setenv("POSENC_WHEEL_PLATFORM", "manylinux_2_28_x86_64")
    monkeypatch.setenv("POSENC_WHEEL_KERNELS", str(tmp_path))
    hook.initialize("standard", data)
    assert data == {
        "pure_python": False,
        "tag": "py3-none-manylinux_2_28_x86_64",
        "force_include": {
            str(tmp_path / "v3-ab.so"): "posenc/attention/backends/native/prebuilt/v3-ab.so"
        },
    }
