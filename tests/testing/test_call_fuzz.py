"""A share of the fuzz of invalid calls, and the calls that were once accepted or raw."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import posenc
from posenc import Attention, Encoding, Grid, Layout
from posenc.errors import ArgumentError
from tests.testing.call_fuzz import Call, calls, run

LINE = Layout.sequence(4)
NUMBERS = torch.arange(4.0).reshape(1, 4, 1)
ORDER = torch.arange(4).reshape(1, 4)
Q = torch.ones(1, 2, 4, 8)


def test_invalid_calls_are_refused_by_name_each_time() -> None:
    """In a process of their own, which a read out of bounds would end."""
    command = [sys.executable, "-m", "tests.testing.call_fuzz", "--count", "1000", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"


@pytest.mark.skipif(os.name != "posix", reason="pages are protected on POSIX alone")
def test_reads_behind_guarded_tensors_end_the_process() -> None:
    lines = (
        "import ctypes, torch",
        "from tests.support.guarded import guarded",
        "x = guarded(torch.arange(7.0, dtype=torch.float64))",
        "assert x.tolist() == [0, 1, 2, 3, 4, 5, 6]",
        "print('read', flush=True)",
        "ctypes.string_at(x.data_ptr() + x.nbytes, 1)",
        "print('read on', flush=True)",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("read\n", -signal.SIGSEGV)


def test_the_fuzz_makes_each_call_three_times() -> None:
    """So that a call which is refused only once is found."""
    met: list[object] = []

    def take(size: object) -> None:
        met.append(size)
        if len(met) < 3:
            raise ArgumentError("size", expected="a size", got=size, remedy="See there.")

    finding = run(Call("take", take, dict, {}), {"size": "wrong"})
    assert finding is not None
    assert "is accepted" in finding.problem
    assert len(met) == 3


@pytest.mark.parametrize("call", calls(), ids=lambda call: call.name)
def test_the_calls_are_valid_but_for_what_is_drawn(call: Call) -> None:
    """Otherwise an error could be of something else than what the fuzz has put in."""
    if call.name in ("load", "register"):
        return  # of a folder that is not there, and for good
    call.function(**call.valid())


def test_the_fuzz_finds_what_is_accepted_raw_or_named_otherwise() -> None:
    def take(size: object) -> object:
        if size == "raw":
            return size + 1  # type: ignore[operator]
        if size == "other":
            raise ArgumentError("colour", expected="a size", got=size, remedy="See there.")
        return size

    call = Call("take", take, dict, {})
    for size, words in (("fine", "is accepted"), ("raw", "TypeError"), ("other", "names 'colour'")):
        finding = run(call, {"size": size})
        assert finding is not None
        assert words in finding.problem
        assert "take(size=" in str(finding)


WRONG: dict[str, tuple[str, Callable[[], object]]] = {
    "causal a text": ("causal", lambda: Grid.of(LINE, causal="yes")),  # type: ignore[arg-type]
    "causal a number": ("causal", lambda: Grid.of(LINE, causal=1)),  # type: ignore[arg-type]
    "window true": ("window", lambda: Grid.of(LINE, window=True)),
    "window a text": ("window", lambda: Grid.of(LINE, window="3")),  # type: ignore[arg-type]
    "no layouts": ("query", lambda: Grid(Q, Q)),  # type: ignore[arg-type]
    "extent a text": ("extent", lambda: Layout(NUMBERS, ORDER, extent="x")),  # type: ignore[arg-type]
    "extent of a line": ("extent", lambda: Layout(NUMBERS, ORDER, extent=(2, 2))),
    "start of others": ("start", lambda: Layout(NUMBERS, ORDER, start=7)),
    "start of other orders": ("start", lambda: Layout(NUMBERS, ORDER + 1, start=0)),
    "start of some rows": (
        "start",
        lambda: Layout(torch.cat([NUMBERS, NUMBERS + 1]), ORDER, start=0),
    ),
    "gaps": ("consecutive", lambda: Layout(2 * NUMBERS, ORDER, consecutive=True)),
    "gaps in a document": (
        "consecutive",
        lambda: Layout(NUMBERS, ORDER[:, [0, 2, 3, 1]], ORDER // 2, consecutive=True),
    ),
    "gaps in a document that returns": (
        "consecutive",
        lambda: Layout(NUMBERS % 2, ORDER, ORDER % 2, consecutive=True),
    ),
    "start NaN": ("start", lambda: Layout.sequence(4, start=float("nan"))),  # type: ignore[arg-type]
    "start far": ("start", lambda: Layout.sequence(4, start=2**63)),
    "start true": ("start", lambda: Layout.sequence(4, start=True)),
    "long": ("length", lambda: Layout.sequence(2**53)),
    "long document": ("lengths", lambda: Layout.packed([2**63])),
    "long documents": ("lengths", lambda: Layout.packed([2**52, 2**52])),
    "long rows": ("length", lambda: Layout.padded([3], 2**50)),
    "large image": ("height", lambda: Layout.image(2**30, 2**30)),
    "complex times": ("times", lambda: Layout.at(torch.ones(4) * 1j)),
    "sparse times": ("times", lambda: Layout.at(torch.eye(4).to_sparse())),
    "sparse queries": ("q", lambda: posenc.attend(Q.to_sparse(), Q, Q, Grid.of(LINE), Encoding())),
    "another width": (
        "x",
        lambda: Attention(dim=16, heads=2, encoding=Encoding())(torch.ones(1, 4, 12), LINE),
    ),
    "width of a context": (
        "context",
        lambda: Attention(dim=16, heads=2, encoding=Encoding())(
            torch.ones(1, 4, 16), LINE, context=torch.ones(1, 4, 12), context_layout=LINE
        ),
    ),
    "other rows": ("layout", lambda: Layout.padded([3, 4]).concat(Layout.padded([1, 2, 3]))),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    argument, call = WRONG[name]
    with pytest.raises(ArgumentError) as refused:
        call()
    assert refused.value.argument == argument


def test_what_layouts_are_is_accepted() -> None:
    """By the constructor, with what posenc's own have."""
    for layout in (
        Layout.sequence(5, start=3),
        Layout.sequence(3, start=2**30),
        Layout.packed([3, 1, 2]),
        Layout.padded([3, 5, 0]),
        Layout.padded([3, 5], 7, side="left"),
        Layout.image(2, 3),
        Layout.image(2, 3, prefix=2),
        Layout.packed([3, 2]).slice(1, 4),
        Layout.image(2, 3, valid=torch.rand(2, 2, 3) < 0.5),
    ):
        names = ("positions", "order", "document", "valid", "special", "signal")
        claims = ("start", "extent", "consecutive")
        given = {name: getattr(layout, name) for name in (*names, *claims)}
        again = Layout(**given)
        assert all(getattr(again, name) == given[name] for name in claims)


def test_whole_numbers_of_other_libraries_are_taken() -> None:
    import numpy as np

    assert Layout.sequence(np.int64(3), np.int32(2)).start == 2
    assert Layout.packed(torch.tensor([3, 2])).length == 5
    assert Layout.padded(np.array([3, 2])).batch == 2
    assert Grid.of(LINE, window=np.int64(3)).window == 3
    assert Grid.of(LINE, window=sys.maxsize).window is None
