"""Positions, axes and sizes that an encoding does not have are refused, never clamped."""

from __future__ import annotations

import pytest
import torch

from posenc import Encoding, Grid, Layout, attend, create
from posenc.errors import ArgumentError, LengthError

CELL = torch.tensor([[[0.0, 0.0]]])

REFUSED = [
    *(
        ("learned", layout, r"0 to 9.*interpolate")
        for layout in (Layout.sequence(11), Layout.sequence(2, -1), Layout.at(torch.tensor([9.5])))
    ),
    *(
        ("learned2d@size=4,6", layout, "interpolate")
        for layout in (Layout.image(5, 6), Layout.image(4, 7), Layout.at(CELL - 0.5))
    ),
    ("learned2d@size=4,6@special=1", Layout.image(1, 2, prefix=2), "special=2"),
    ("learned2d@size=4,6", Layout.sequence(4), "2 axes"),
    ("row_column@size=2,3", Layout.image(3, 3), "interpolate"),
    ("row_column@size=2,3", Layout.image(2, 4), "interpolate"),
    ("row_column@size=2,3", Layout.sequence(4), "2 axes"),
    ("hierarchical", Layout.sequence(101), "0 to 99"),
    ("multiplicative", Layout.sequence(11), "0 to 9"),
    ("radix@digits=2", Layout.sequence(101), "0 to 99"),
    ("recursive", Layout.sequence(2, -1), "0 or more"),
    ("recursive", Layout.at(torch.tensor([0.0, -0.5])), "0 or more"),
    ("recursive@step=gru", Layout.sequence(1, 2**20 + 1), "0 to 1048576"),
    # Seconds since 1970 would take 1.7 billion steps.
    ("floater", Layout.sequence(2, 1_700_000_000), r"up to 1048576 steps.*Subtract"),
    ("fourier", Layout.image(2, 3), "axes=2"),
    ("gaussian_fourier", Layout.image(2, 3), "axes=2"),
    ("conv", Layout.image(3, 3), "layout"),
    ("conv@axes=2", Layout.sequence(9), "layout"),
    ("conv@axes=2", Layout.image(3, 3).slice(0, 6), "layout"),
    ("sine2d", Layout.image(3, 3).slice(0, 4), "layout"),
    ("sine2d", Layout.sequence(4), "layout"),
    *(
        ("swin@window=2,4", layout, "2 by 4 cells")
        for layout in (Layout.image(3, 4), Layout.image(2, 5), Layout.image(3, 4).slice(0, 12))
    ),
    ("swin@window=2,4", Layout.at(torch.cat([CELL, CELL + 2.6], 1)), "2 by 4 cells"),
    ("decomposed2d@size=3,5", Layout.image(4, 5), r"3 by 5 cells.*posenc\.extension"),
    ("decomposed2d@size=3,5", Layout.image(3, 6).slice(0, 18), r"3 by 5 cells"),
    ("tupe", Layout.sequence(11), "max_length"),
    ("tupe", Layout.at(torch.tensor([0.0, 9.5])), "max_length"),
    ("rope2d", Layout.sequence(3), "2 axes"),
    ("axial_rope@pairs=2,1,1", Layout.image(2, 3), "3 axes"),
    ("axial_rope", Layout.at(torch.zeros(1, 3, 5)), "1 or 2 or 3 or 4 axes"),
]


def used(encoding: Encoding, layout: Layout) -> None:
    """Embed tokens and attend."""
    encoding.embed(torch.zeros(1, layout.length, 8), layout)
    q = torch.zeros(1, 2, layout.length, 8)
    attend(q, q, q, Grid.of(layout), encoding)


@pytest.mark.parametrize(("name", "layout", "message"), REFUSED)
def test_positions_and_axes(name: str, layout: Layout, message: str) -> None:
    with pytest.raises((ArgumentError, LengthError), match=message):
        used(create(name, dim=8, heads=2, head_dim=8, max_length=10), layout)


@pytest.mark.parametrize(
    ("name", "heads", "width", "message"),
    [
        ("rope", 2, 4, "head width 8"),
        ("rope_mixed", 4, 8, "heads 2, as the encoding has"),
        ("rope_pp", 3, 8, "repeat_interleave"),
    ],
)
def test_heads_and_widths(name: str, heads: int, width: int, message: str) -> None:
    transform = create(name, heads=2, head_dim=8).query_key
    x = torch.randn(1, heads, 4, width)
    assert transform is not None
    with pytest.raises(ArgumentError, match=message):
        transform(x, x, Grid.of(Layout.image(2, 2) if name == "rope_mixed" else Layout.sequence(4)))


@pytest.mark.parametrize("name", ["sinusoidal", "conv"])
def test_another_width_of_tokens(name: str) -> None:
    with pytest.raises(ArgumentError, match="width 8"):
        create(name, dim=8).embedding(torch.zeros(1, 2, 6), Layout.sequence(2))  # type: ignore[misc]
