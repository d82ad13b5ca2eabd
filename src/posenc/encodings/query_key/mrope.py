"""Rotary positions of text, images and video in one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Base, Count, Interval
from posenc.encoding import Entry, Pairing
from posenc.encodings.common.precision import geometric_angles
from posenc.encodings.common.rotation import Rotary
from posenc.errors import ArgumentError
from posenc.layout import Layout

Arrangement = Literal["contiguous", "interleaved"]

IN_PAIRS = "Features are rotated in pairs, at least one pair per axis."


def default_sections(pairs: int, arrangement: Arrangement) -> tuple[int, int, int]:
    """Numbers of pairs for time, height and width in the ratio of the published models.

    16:24:24 of 64 if contiguous (Qwen2-VL), 24:20:20 if interleaved (Qwen3-VL); height and width
    are rounded down, to at least 1.
    """
    of_64 = 24 if arrangement == "contiguous" else 20
    plane = max(1, pairs * of_64 // 64)
    return pairs - 2 * plane, plane, plane


class Mrope(Rotary):
    """M-RoPE: RoPE with each pair assigned to the time, height or width axis.

    Pair t is rotated by ``p_axis(t) · θ_t``, ``θ_t = base^(-2t/D)``, t = 0 … D/2 - 1. With sections
    (T, H, W), the first T pairs belong to time, the next H to height, the last W to width
    (``"contiguous"``); or (``"interleaved"``) pairs 1, 4, 7, … to height and 2, 5, 8, … to width
    up to their section's count, and all others to time.

    ``p`` is a position on three axes, any reals: equal on all axes for a text token (where M-RoPE
    is RoPE); for an image's cells, row and column counted from one past the largest earlier
    position; the next token is one past the largest of these (``Layout.following``). Differs from
    the paper in nothing. θ decreases with t, so contiguous width pairs are all slow; interleaving
    gives every axis fast and slow pairs.

    Args:
        head_dim: width D of a head.
        base: sets the slowest frequency.
        sections: pairs of time, height and width, D/2 in total; by default in the published ratio
            (``default_sections``).
        arrangement: ``"contiguous"`` (Qwen2-VL) or ``"interleaved"`` (Qwen3-VL).
        pairing: ``"half"`` pairs feature t with t + D/2, ``"adjacent"`` 2t with 2t + 1.

    Raises:
        ArgumentError: when ``head_dim`` is odd or below 6, ``base`` is not above 1, or
            ``sections`` are not three counts of 1 or more that fit D/2 pairs.
        UnknownNameError: for another ``arrangement`` or ``pairing``.

    Reference: Wang et al. 2024, "Qwen2-VL: Enhancing Vision-Language Model's Perception of the
    World at Any Resolution", https://arxiv.org/abs/2409.12191; interleaved: Qwen Team 2025,
    "Qwen3-VL Technical Report".

    >>> import posenc, torch
    >>> time_row_column = torch.tensor([[[0, 0, 0], [1, 1, 1], [1, 1, 2]]])
    >>> grid = posenc.Grid.of(posenc.Layout.at(time_row_column))
    >>> q = torch.randn(1, 2, 3, 16)
    >>> posenc.create("mrope", head_dim=16).query_key(q, q, grid)[0].shape
    torch.Size([1, 2, 3, 16])
    """

    axes = (3,)

    head_dim: Annotated[int, Interval(6, 2**20, multiple=2, remedy=IN_PAIRS)]
    base: Base = 1e6
    sections: Sequence[Count] | None = None
    arrangement: Arrangement = "contiguous"
    pairing: Pairing = "half"

    def __post_init__(self) -> None:
        pairs = self.head_dim // 2
        if self.sections is None:
            self.sections = default_sections(pairs, self.arrangement)
        self._axis_of_pair = _assign(self.sections, pairs, self.arrangement)

    def angles(self, layout: Layout) -> Float[Tensor, "b L T"]:
        by_pair = layout.positions[..., list(self._axis_of_pair)]
        return geometric_angles(by_pair, self.head_dim // 2, self.head_dim, self.base)


def _assign(sections: Sequence[int], pairs: int, arrangement: Arrangement) -> tuple[int, ...]:
    """The axis of every pair.

    Raises:
        ArgumentError: when the sections do not fit.
    """
    if len(sections) == 3 and min(sections) >= 1 and sum(sections) == pairs:
        if arrangement == "contiguous":
            return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
        axes = tuple(t % 3 if t < 3 * sections[t % 3] else 0 for t in range(pairs))
        if all(axes.count(axis) == count for axis, count in enumerate(sections)):
            return axes
    raise ArgumentError(
        "sections",
        expected=f"three counts of 1 or more that add up to head_dim / 2 = {pairs}"
        + (", time's no smaller than the others" if arrangement == "interleaved" else ""),
        got=sections,
        remedy="Omit sections for the published ratio.",
    )


ENTRY = Entry(
    factory=Mrope,
    summary="Rotates some pairs by time, some by height, some by width.",
    relative=True,
    trainable=False,
    extrapolates="As RoPE; images use few positions, so longer inputs fit the trained range.",
    cost="(Q + K)·D·H",
    sharing="layers",
)
