"""Calls that differ from remembered ones in one thing alone are computed as that thing says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.attention.backends.native.build import missing
from posenc.encoding.prepared import Copies, are_known
from posenc.errors import ArgumentError
from posenc.registry import ENCODINGS
from posenc.testing import Subject
from tests.testing.tolerances import distance

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason="needs the compiled kernels"),
    pytest.mark.usefixtures("entered"),
]

LENGTH = 70

Given = dict[str, Any]


def given(**changes: Any) -> Given:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (3 * torch.randn(1, 4, LENGTH, 8, generator=generator) for _ in range(3))
    grid = Grid.of(Layout.sequence(LENGTH), causal=True)
    return {"q": q, "k": k, "v": v, "grid": grid, "scale": 0.5, "softcap": 5.0} | changes


def make(name: str = "t5") -> Encoding:
    torch.manual_seed(0)
    encoding = posenc.create(name, dim=32, heads=4, max_length=128, causal=True).eval()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    return encoding


def call(encoding: Encoding, arguments: Given, **options: Any) -> Tensor:
    taken = dict(arguments)
    autocast = taken.pop("autocast", None)
    with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        return attend(**taken, encoding=encoding, **options)  # type: ignore[no-any-return]


def apart(x: Tensor) -> Tensor:
    """The same numbers, the tokens of all heads side by side."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


GRID = given()["grid"]

CHANGES: dict[str, Callable[[Given], Given]] = {
    "scale": lambda x: {"scale": 0.1},
    "default scale": lambda x: {"scale": None},
    "cap": lambda x: {"softcap": 50.0},
    "no cap": lambda x: {"softcap": None},
    "strides of q": lambda x: {"q": apart(x["q"])},
    "strides of k": lambda x: {"k": apart(x["k"])},
    "strides of v": lambda x: {"v": apart(x["v"])},
    "features of k": lambda x: {"k": x["k"].mT.contiguous().mT},
    "features of v": lambda x: {"v": x["v"].mT.contiguous().mT},
    "width of v": lambda x: {"v": x["v"][..., :5].contiguous()},
    "groups": lambda x: {"k": x["k"][:, :2].contiguous(), "v": x["v"][:, :2].contiguous()},
    "dtype": lambda x: {name: x[name].double() for name in "qkv"},
    "autocast": lambda x: {"autocast": torch.bfloat16},
    "intervals": lambda x: {"grid": GRID.chunked(20)},
    "window": lambda x: {"grid": replace(GRID, window=9)},
    "causality": lambda x: {"grid": replace(GRID, causal=False)},
    "keys before": lambda x: {"grid": replace(GRID, key=Layout.sequence(LENGTH, -40))},
    "padding": lambda x: {
        "grid": Grid.of(replace(GRID.query, valid=torch.arange(LENGTH)[None] < 30), causal=True)
    },
    "padding before": lambda x: {
        "grid": Grid.of(
            replace(Layout.packed([40, LENGTH - 40]), valid=torch.arange(LENGTH)[None] >= 10),
            causal=True,
        )
    },
    "documents": lambda x: {
        "grid": Grid.of(replace(GRID.query, document=torch.arange(LENGTH)[None] // 30), causal=True)
    },
    "special tokens": lambda x: {
        "grid": Grid.of(replace(GRID.query, special=torch.arange(LENGTH)[None] < 30), causal=True)
    },
    "sinks": lambda x: {"sinks": torch.full((4,), 30.0)},
}


OFF = {torch.bfloat16: 5e-2, torch.float32: 2e-5, torch.float64: 1e-10}
"""What outputs may differ by."""


@torch.no_grad()
@pytest.mark.parametrize("name", ["alibi", "rope", "nope"])
@pytest.mark.parametrize("change", CHANGES)
def test_one_thing_is_changed(change: str, name: str) -> None:
    encoding, first = make(name), given()
    second = first | CHANGES[change](first)
    for arguments in (first, second, first):
        expected = call(encoding, arguments, backend="reference")
        for _ in range(3):
            output = call(encoding, arguments)
            assert output.dtype == expected.dtype
            off = OFF[output.dtype]
            torch.testing.assert_close(output, expected, atol=off, rtol=off)


def score_of(encoding: Encoding) -> Any:
    return encoding.score


CHANGED: dict[str, Callable[[Encoding], object]] = {
    "hook": lambda x: score_of(x).register_forward_hook(lambda *_: None),
    "hook before": lambda x: score_of(x).register_forward_pre_hook(lambda *_: None),
    "buffer": lambda x: score_of(x).register_buffer("more", torch.ones(2)),
    # as what patches single layers does
    "method": lambda x: vars(score_of(x)).update(lower=score_of(x).lower),
    "part": lambda x: setattr(x, "score", make("alibi").score),
    "setting": lambda x: setattr(score_of(x), "max_distance", 3),
    "weights": lambda x: [parameter.mul_(3.0) for parameter in x.parameters()],
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGED)
def test_changed_encodings_are_planned(change: str, planned: list[None]) -> None:
    encoding, arguments = make(), given()
    for _ in range(3):
        call(encoding, arguments)
    assert len(planned) == 1
    CHANGED[change](encoding)
    output = call(encoding, arguments)
    assert len(planned) == 2
    expected = call(encoding, arguments, backend="reference")
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


def create_fope() -> Encoding:
    """Of constant numbers alone, and a buffer."""
    encoding = posenc.create("fope", heads=4, head_dim=8, max_length=128).eval()
    return encoding.requires_grad_(False)


@torch.no_grad()
def test_written_buffers_are_read() -> None:
    encoding, arguments = create_fope(), given()
    (buffer,) = encoding.buffers()
    for at in range(3):
        for _ in range(3):
            output = call(encoding, arguments)
            expected = call(encoding, arguments, backend="reference")
            torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)
        buffer.data.view(-1)[at] += 1.0


def test_buffers_get_their_gradients_after_calls_without() -> None:
    encoding, arguments = create_fope(), given()
    (buffer,) = encoding.buffers()
    with torch.no_grad():
        for _ in range(3):
            call(encoding, arguments)
    buffer.requires_grad_()
    found = []
    for backend in ("auto", "reference"):
        output = call(encoding, arguments, backend=backend)
        found += torch.autograd.grad(output.sin().sum(), buffer)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["t5", "shaw"])
def test_parameters_get_their_gradients_after_calls_without(name: str) -> None:
    encoding, arguments = make(name), given()
    with torch.no_grad():
        for _ in range(3):
            call(encoding, arguments)
    output = call(encoding, arguments)
    wanted = torch.autograd.grad(output.sin().sum(), encoding.parameters())
    true = call(encoding, arguments, backend="reference")
    expected = torch.autograd.grad(true.sin().sum(), encoding.parameters())
    for gradient, other in zip(wanted, expected, strict=True):
        assert other.abs().max() > 1e-2
        torch.testing.assert_close(gradient, other, atol=1e-4, rtol=1e-3)


def test_positions_get_their_gradients_after_calls_without() -> None:
    encoding, arguments = make("rope"), given()
    positions = arguments["grid"].query.positions
    with torch.no_grad():
        for _ in range(3):
            call(encoding, arguments)
    positions.requires_grad_()
    outputs = (call(encoding, arguments, backend=backend) for backend in ("auto", "reference"))
    gradients = [torch.autograd.grad(x.sin().sum(), positions)[0] for x in outputs]
    assert gradients[1].abs().max() > 1e-2
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_weights_are_dropped_after_calls_without() -> None:
    encoding, arguments = make("alibi"), given()
    outputs = [call(encoding, arguments) for _ in range(3)][:1]
    outputs += [call(encoding, arguments, dropout=0.5) for _ in range(3)]
    for one, other in combinations(outputs, 2):
        assert distance(one, other) > 1e-2


WRONG: dict[str, Callable[[Given], Given]] = {
    "a shorter layout": lambda x: {"grid": Grid.of(Layout.sequence(50), causal=True)},
    "fewer keys": lambda x: {"k": x["k"][:, :, :50].contiguous()},
    "fewer values": lambda x: {"v": x["v"][:, :, :50].contiguous()},
    "wider keys": lambda x: {"k": torch.cat([x["k"], x["k"]], dim=-1)},
    "fewer heads": lambda x: {name: x[name][:, :3].contiguous() for name in "qkv"},
    "heads that do not divide": lambda x: {n: x[n][:, :3].contiguous() for n in "kv"},
    "other rows": lambda x: {"k": x["k"].expand(2, -1, -1, -1).contiguous()},
    "rows of the layout": lambda x: {"grid": Grid.of(_rows(GRID.query, 3, 1), causal=True)},
    "dtype of the keys": lambda x: {"k": x["k"].double()},
    "rows of positions": lambda x: {"grid": Grid.of(_rows(GRID.query, 1, 3), causal=True)},
    "scale of a truth": lambda x: {"scale": True},
    "dropout of a truth": lambda x: {"dropout": False},
    "scale of NaN": lambda x: {"scale": float("nan")},
    "cap of zero": lambda x: {"softcap": 0.0},
    "dropout of a word": lambda x: {"dropout": "no"},
    "no queries": lambda x: {"q": None},
    "no grid": lambda x: {"grid": None},
}


def _rows(layout: Layout, order: int, positions: int) -> Layout:
    """As many rows of each."""
    rows = {
        "order": layout.order.expand(order, -1),
        "positions": layout.positions.expand(positions, -1, -1),
    }
    return replace(layout, **rows)


@torch.no_grad()
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_calls_are_refused_each_time(wrong: str, after: int) -> None:
    encoding, arguments = make("alibi"), given(scale=1.0)
    for _ in range(after):
        call(encoding, arguments)
    for _ in range(3):
        with pytest.raises(ArgumentError):
            call(encoding, arguments | WRONG[wrong](arguments))


@torch.no_grad()
def test_bits_count_that_comparisons_of_numbers_do_not_see() -> None:
    weight = torch.zeros(3, 4)
    copies = Copies([weight])
    assert copies.hold([weight])
    weight[1, 2] = -0.0
    assert not copies.hold([weight])
    weight[1, 2] = torch.nan
    copies = Copies([weight])
    assert copies.hold([weight])
    ctypes.memset(weight.data_ptr() + 4, 1, 1)
    assert not copies.hold([weight])


@pytest.mark.parametrize("name", [name for name in ENCODINGS if name != "floater"])
def test_states_of_encodings_can_be_compared(name: str) -> None:
    """Otherwise nothing would be kept of them."""
    encoding = Subject.of_entry(name, ENCODINGS[name]).make().eval()
    modules = list(encoding.modules())
    assert are_known(modules)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [("transformer_xl", "base", 100.0), ("deberta", "lookup", "released"), ("xlnet", "base", 50.0)],
)
@pytest.mark.parametrize("backend", ["auto", "blockwise"])
def test_settings_are_read_after_warm_calls(
    name: str, setting: str, value: object, backend: str
) -> None:
    encoding, arguments = make(name), given(softcap=None)
    for _ in range(3):
        before = call(encoding, arguments, backend=backend)
    setattr(encoding.score, setting, value)
    expected = call(encoding, arguments, backend="reference")
    output = call(encoding, arguments, backend=backend)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    assert (output - before).abs().max() > 1e-2
