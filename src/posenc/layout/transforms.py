"""Transforms of positions used in training for longer contexts.

Each takes a layout of one axis (``fitted``: two) and returns one with the same order, documents and
padding. Apply them once to a layout that queries and keys share.
"""

from __future__ import annotations

from typing import Annotated

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.arguments import EXACT, Count, Interval, Rate, check
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.layout.integers import exact_floats


def randomized(
    layout: Layout, *, max_length: int, generator: torch.Generator | None = None
) -> Layout:
    """Randomized positions: a sorted random subset of a longer range.

    A token at integer position p gets the p-th smallest of a random subset of 0 … max_length - 1,
    the same subset for all rows: order is kept, distances vary.

    Args:
        layout: at integer positions 0 … n - 1.
        max_length: the range drawn from; at least n.
        generator: for reproducible draws.

    Raises:
        ArgumentError: for positions other than integers from 0, or a range too short.

    Reference: Ruoss et al. 2023, "Randomized Positional Encodings Boost Length Generalization of
    Transformers".
    """
    positions, count = _integer_positions(layout, max_length)
    drawn = torch.randperm(max_length, generator=generator)[:count].sort().values
    return _at(layout, drawn.to(positions.device)[positions])


def skipped(
    layout: Layout, *, max_length: int, chunks: int = 2, generator: torch.Generator | None = None
) -> Layout:
    """PoSE: positions of each chunk after the first skip ahead by a random amount.

    A token at integer position p of chunk c gets ``p + u_c`` with
    ``0 = u_0 ≤ u_1 ≤ … ≤ max_length - n``; the cuts between chunks are random too.

    Args:
        layout: at integer positions 0 … n - 1.
        max_length: the context length to train for; at least n.
        chunks: number of chunks (2 in the paper); at most n.
        generator: for reproducible draws.

    Raises:
        ArgumentError: for positions other than integers from 0, or arguments out of range.

    Reference: Zhu et al. 2024, "PoSE: Efficient Context Window Extension of LLMs via Positional
    Skip-wise Training".
    """
    positions, count = _integer_positions(layout, max_length)
    check("chunks", Annotated[int, Interval(1, count, remedy="The paper uses 2.")], chunks)
    cuts = 1 + torch.randperm(count - 1, generator=generator)[: chunks - 1]
    skips = torch.randint(max_length - count + 1, (chunks - 1,), generator=generator)
    skip = torch.zeros(count, dtype=torch.int64)
    for cut, by in zip(cuts.sort().values.tolist(), skips.sort().values.tolist(), strict=True):
        skip[cut:] = by
    return _at(layout, (torch.arange(count) + skip).to(positions.device)[positions])


def interpolated(layout: Layout, *, factor: float) -> Layout:
    """Position interpolation: all positions divided by ``factor``.

    Raises:
        ArgumentError: unless ``factor`` is positive and finite.

    Reference: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    Interpolation".
    """
    return layout.with_positions(layout.positions / check("factor", Rate, factor))


def fitted(layout: Layout, *, cells: tuple[int, int]) -> Layout:
    """Position interpolation of an image onto a grid of another size.

    The edges of both align, as in resampling a table: ``p' = (p + ½) · cells / extent - ½``,
    clamped to the cells' centres.

    Args:
        layout: of a whole image (``Layout.image``).
        cells: (rows, columns) of the target grid.

    Raises:
        ArgumentError: for another layout, or fewer than one row or column.
    """
    if layout.extent is None:
        raise ArgumentError(
            "layout",
            expected="a whole image (Layout.image)",
            got=f"{layout.length} tokens that are not an image",
            remedy="Fit the layout before it is sliced or joined.",
        )
    size = layout.positions.new_tensor(check("cells", tuple[Count, Count], cells))
    factor = size / layout.positions.new_tensor(layout.extent)
    centred = (layout.positions + 0.5) * factor - 0.5
    return layout.with_positions(centred.clamp(min=0).minimum(size - 1))


def _integer_positions(layout: Layout, max_length: int) -> tuple[Int[Tensor, "b L"], int]:
    """Positions as integers (0 for padding), and the largest plus 1, at most ``max_length``."""
    if layout.axes != 1:
        raise ArgumentError(
            "layout", expected="one axis", got=layout.axes, remedy="Use a layout of a sequence."
        )
    positions = layout.positions[..., 0]
    if layout.valid is not None:
        positions = positions.masked_fill(~layout.valid, 0.0)
    integers = positions.long()
    if bool((integers != positions).any()) or bool((integers < 0).any()):
        raise ArgumentError(
            "layout",
            expected="integer positions from 0",
            got="other positions",
            remedy="Start from Layout.sequence, Layout.packed or Layout.padded.",
        )
    count = int(integers.max()) + 1
    in_use = Interval(count, EXACT, remedy="Give the longest context that you train for.")
    check("max_length", Annotated[int, in_use], max_length)
    return integers, count


def _at(layout: Layout, integers: Int[Tensor, "b L"]) -> Layout:
    positions = exact_floats(integers)
    dtype = torch.promote_types(positions.dtype, layout.positions.dtype)
    return layout.with_positions(positions.to(dtype).unsqueeze(-1))
