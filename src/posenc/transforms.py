"""The same tokens at other positions: what training for longer contexts does to a layout.

Each function takes a layout of one axis (``fitted``: an image's two) and returns one with the same
order, documents and padding.
Queries and keys that share a layout share its new positions.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.layout.integers import exact_floats

__all__ = ["fitted", "interpolated", "randomized", "restarted", "skipped"]


def randomized(
    layout: Layout, *, max_length: int, generator: torch.Generator | None = None
) -> Layout:
    """Randomized positions: places in a longer range, drawn without replacement and sorted.

    A token at integer position p gets the p-th smallest of a random subset of 0 … max_length - 1,
    the same subset for all rows, so that order is kept while distances vary.

    Args:
        layout: at integer positions 0 … n - 1.
        max_length: the range drawn from; at least n.
        generator: makes it reproducible.

    Raises:
        ArgumentError: on positions that are no integers from 0, or a range too short.

    Reference: Ruoss et al. 2023, "Randomized Positional Encodings Boost Length Generalization of
    Transformers".
    """
    places, count = _integer_positions(layout)
    if max_length < count:
        raise ArgumentError(
            "max_length",
            expected=f"at least {count}, the positions in use",
            got=max_length,
            remedy="Draw from the longest context you want to reach.",
        )
    drawn = torch.randperm(max_length, generator=generator)[:count].sort().values
    return _moved(layout, drawn.to(places.device)[places])


def skipped(
    layout: Layout,
    *,
    max_length: int,
    chunks: int = 2,
    generator: torch.Generator | None = None,
) -> Layout:
    """PoSE: a sequence is cut into chunks, and each but the first skips ahead by a random amount.

    A token at integer position p of chunk c gets ``p + u_c`` with
    ``0 = u_0 ≤ u_1 ≤ … ≤ max_length - n``; where the cuts are is random too. Distances within a
    chunk stay short, those between chunks reach up to ``max_length``.

    Args:
        layout: at integer positions 0 … n - 1.
        max_length: the context length to train for; at least n.
        chunks: how many (2 in the paper); at most n.
        generator: makes it reproducible.

    Raises:
        ArgumentError: on positions that are no integers from 0, or arguments out of their domain.

    Reference: Zhu et al. 2024, "PoSE: Efficient Context Window Extension of LLMs via Positional
    Skip-wise Training".
    """
    places, count = _integer_positions(layout)
    if max_length < count:
        raise ArgumentError(
            "max_length",
            expected=f"at least {count}, the positions in use",
            got=max_length,
            remedy="Give the context length to train for.",
        )
    if not 1 <= chunks <= count:
        raise ArgumentError(
            "chunks", expected=f"1 to {count}", got=chunks, remedy="The paper has 2."
        )
    cuts = 1 + torch.randperm(count - 1, generator=generator)[: chunks - 1]
    skips = torch.randint(max_length - count + 1, (chunks - 1,), generator=generator)
    skip = torch.zeros(count, dtype=torch.int64)
    for cut, by in zip(cuts.sort().values.tolist(), skips.sort().values.tolist(), strict=True):
        skip[cut:] = by
    return _moved(layout, (torch.arange(count) + skip).to(places.device)[places])


def interpolated(layout: Layout, *, factor: float) -> Layout:
    """Position interpolation: all positions divided by ``factor``, to fit into a trained range.

    Raises:
        ArgumentError: when ``factor`` is not positive and finite.

    Reference: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    Interpolation".
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ArgumentError(
            "factor", expected="a positive number", got=factor, remedy="2 halves the positions."
        )
    return layout.with_positions(layout.positions / factor)


def fitted(layout: Layout, *, cells: tuple[int, int]) -> Layout:
    """An image of any size, put on the cells of another: position interpolation on two axes.

    The image's edges meet the edges of the other, as where tables are resampled:
    ``p' = (p + ½) · cells / extent - ½``, kept within the cells' centres.

    Args:
        layout: of a whole image (``Layout.image``).
        cells: (rows, columns) that positions are brought onto.

    Raises:
        ArgumentError: on another layout, or fewer than one row or column.
    """
    if layout.extent is None:
        raise ArgumentError(
            "layout",
            expected="a whole image (Layout.image)",
            got=f"{layout.length} tokens of no image",
            remedy="Fit the layout before it is sliced or joined.",
        )
    if len(cells) != 2 or min(cells) < 1:
        raise ArgumentError(
            "cells", expected="(rows, columns) from 1", got=cells, remedy="Use the trained size."
        )
    size = layout.positions.new_tensor(cells)
    factor = size / layout.positions.new_tensor(layout.extent)
    centred = (layout.positions + 0.5) * factor - 0.5
    return layout.with_positions(centred.clamp(min=0).minimum(size - 1))


def restarted(layout: Layout) -> Layout:
    """Positions that begin at 0 in each document, and go on by the steps they had.

    Raises:
        ArgumentError: when the layout has no documents.
    """
    if layout.document is None:
        raise ArgumentError(
            "layout",
            expected="documents",
            got="none",
            remedy="Use Layout.packed, or give Layout(document=…).",
        )
    rows = max(layout.positions.shape[0], layout.document.shape[0])
    positions = layout.positions[..., 0].expand(rows, -1)
    document = layout.document.expand(rows, -1)
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    index = torch.arange(document.shape[1], device=document.device).expand_as(document)
    first = torch.where(begins, index, 0).cummax(dim=1).values
    return layout.with_positions((positions - positions.gather(1, first)).unsqueeze(-1))


def _integer_positions(layout: Layout) -> tuple[Int[Tensor, "b L"], int]:
    """Positions of real tokens as integers (0 for padding), and how many there are."""
    if layout.axes != 1:
        raise ArgumentError(
            "layout", expected="one axis", got=layout.axes, remedy="These are for sequences."
        )
    positions = layout.positions[..., 0]
    if layout.valid is not None:
        positions = positions.masked_fill(~layout.valid, 0.0)
    places = positions.long()
    if bool((places != positions).any()) or bool((places < 0).any()):
        raise ArgumentError(
            "layout",
            expected="integer positions from 0",
            got="others",
            remedy="Begin from Layout.sequence, Layout.packed or Layout.padded.",
        )
    return places, int(places.max()) + 1


def _moved(layout: Layout, places: Int[Tensor, "b L"]) -> Layout:
    positions = exact_floats(places)
    dtype = torch.promote_types(positions.dtype, layout.positions.dtype)
    return layout.with_positions(positions.to(dtype).unsqueeze(-1))
