"""Methods on devices: what they make stays there, and in numbers that the device has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posenc import runtime
from posenc.attention import attend
from posenc.encoding import ValueTransform
from posenc.errors import BackendRefusal
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.registry import ENCODINGS
from posenc.testing import Subject
from posenc.testing.subject import DIM, HEAD_DIM, HEADS, LENGTH

READS_VALUES = ("floater", "recursive")
"""How many steps they take depends on what the positions are, which the meta device has not."""


@pytest.mark.parametrize("name", [name for name in ENCODINGS if name not in READS_VALUES])
def test_parts_stay_on_their_device(name: str) -> None:
    """positional-encodings #33. A tensor made on the CPU does not mix with those of the meta
    device, where values are neither there nor waited for, as on an accelerator they should not be.
    """
    subject = Subject.of_entry(name, ENCODINGS[name])
    with torch.device("meta"):
        encoding, projection = subject.make().eval(), nn.Linear(DIM, DIM)
        x, q = torch.empty(2, LENGTH, DIM), torch.empty(2, HEADS, LENGTH, HEAD_DIM)
        tokens = torch.zeros(2, LENGTH, dtype=torch.long)
        weights = torch.empty(2, HEADS, LENGTH, LENGTH)
    for part in encoding.parts():
        part.attach(projection, projection)
    layout = subject.place(Layout.sequence(LENGTH, device="meta"))
    x = encoding.embed(x, layout, tokens=tokens)
    grid = Grid.of(encoding.observe(x, layout), causal=True)
    made = [x]
    if encoding.query_key is not None:
        made += encoding.query_key(q, q, grid)
    if encoding.score is not None:
        made.append(encoding.score(q, q, grid, scale=1.0))
        encoding.score.lower(q, q, grid, scale=1.0)
    if encoding.value is not None:
        turns = isinstance(encoding.value, ValueTransform)
        made.append(encoding.value(q, grid.key) if turns else encoding.value(weights, grid))
    assert {each.device.type for each in made} == {"meta"}


class WithoutFloat64(TorchDispatchMode):
    """The meta device as one that has no float64, as Apple's has none."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.is_meta and x.dtype == torch.float64:
                raise TypeError(f"float64 out of {func}")
        return output


@pytest.mark.parametrize("name", [name for name in ENCODINGS if name not in READS_VALUES])
def test_devices_without_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method runs there, forward and backward, in tiles too."""
    monkeypatch.setattr(runtime, "WITHOUT_FLOAT64", {"meta"})
    subject, served = Subject.of_entry(name, ENCODINGS[name]), set()
    with torch.device("meta"):
        encoding, projection = subject.make().eval(), nn.Linear(DIM, DIM)
        tokens = torch.zeros(2, LENGTH, dtype=torch.long)
        q, k, v = (torch.empty(2, HEADS, LENGTH, HEAD_DIM).requires_grad_() for _ in range(3))
    for part in encoding.parts():
        part.attach(projection, projection)
    layout = subject.place(Layout.sequence(LENGTH, device="meta"))
    with WithoutFloat64():
        for backend in ("reference", "sdpa", "blockwise", "auto"):
            x = encoding.embed(torch.empty(2, LENGTH, DIM, device="meta"), layout, tokens=tokens)
            grid = Grid.of(encoding.observe(x, layout), causal=True)
            try:
                output = attend(q, k, v, grid, encoding, backend=backend)
            except BackendRefusal:
                continue
            output.sum().backward()
            served.add(backend)
    assert served >= {"reference", "blockwise", "auto"}
