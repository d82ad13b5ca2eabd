"""Whatever a method makes, it makes on the device of what it is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
        made.append(encoding.value(weights, grid))
    assert {each.device.type for each in made} == {"meta"}
