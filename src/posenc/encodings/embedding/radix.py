"""Positions as digits in a given base."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.arguments import EXACT, Count, Interval, Length, Width
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.table import draw_rows, fuse, real_positions, require_inside
from posenc.errors import ArgumentError
from posenc.layout import Layout

Join = Literal["sum", "concatenate"]

REMEDY = "Create it with more digits, or a larger base (posenc.extension: radix_base)."


class Radix(EmbeddingEncoding):
    """Radix positions: the position's digits in base β, each place with its own trained table.

    ``x + Σ_t T_t[⌊p / β^t⌋ mod β]``, t = 0 … m - 1 (or the parts concatenated).

    ``p`` = 0 … β^m - 1 in tokens; ``T_t`` ``[β, C]`` (``[β, C/m]`` if concatenated). Fractional
    positions are interpolated linearly. Changing RoPE's base corresponds to a change of this radix.

    Args:
        dim: width C.
        base: β, 2 or more.
        digits: m; by default the least for ``max_length``, or 4.
        max_length: number of positions to cover.
        join: ``"sum"`` or ``"concatenate"``.

    Raises:
        ArgumentError: when an option is out of its domain, digits cover fewer positions than
            ``max_length``, or C is no multiple of the digits to be concatenated.
        UnknownNameError: for another ``join``.
        LengthError: in ``forward``, for a token at β^m or beyond.

    Reference: Su 2023, "Transformer upgrade road 10: RoPE is a β-ary encoding",
    https://kexue.fm/archives/9675.

    >>> import posenc, torch
    >>> encoding = posenc.create("radix", dim=4, base=10, digits=3)
    >>> encoding.embedding.digits_of(torch.tensor([507.0])).tolist()
    [[7, 0, 5]]
    """

    dim: Width
    base: Annotated[int, Interval(2, 2**16)] = 10
    digits: Count | None = None
    max_length: Length | None = None
    join: Join = "sum"

    def __post_init__(self) -> None:
        default = 4 if self.max_length is None else places(self.max_length, self.base)
        self.places = self.digits or default
        written = f"{self.places} in base {self.base}"
        if self.max_length is not None and self.base**self.places < self.max_length:
            raise ArgumentError(
                "digits",
                expected="enough for max_length",
                got=f"{written} for {self.max_length} positions",
                remedy="Raise digits or base.",
            )
        if self.base ** (self.places - 1) >= EXACT:
            raise ArgumentError(
                "digits",
                expected="a largest place below 2^53, the limit of exact positions",
                got=written,
                remedy="Lower digits or base.",
            )
        width = self.dim
        if self.join == "concatenate":
            width, rest = divmod(self.dim, self.places)
            if rest:
                raise ArgumentError(
                    "dim",
                    expected=f"a multiple of the {self.places} digits",
                    got=self.dim,
                    remedy="Use join='sum', or another number of digits.",
                )
        self.tables = nn.Parameter(torch.empty(self.places, self.base, width))

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        draw_rows(self.tables)

    def digits_of(self, positions: Float[Tensor, "*dims"]) -> Int[Tensor, "*dims m"]:
        """Digits of the integer part of each position, the lowest place first."""
        powers = self.base ** torch.arange(self.places, device=positions.device)
        return positions.floor().long().unsqueeze(-1) // powers % self.base

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        covered = self.base**self.places
        holder = f"{self.places} digits in base {self.base}"
        require_inside(layout, covered, holder, remedy=REMEDY)
        positions = real_positions(layout)
        below = positions.floor().clamp(0, covered - 1)
        share = (positions - below).unsqueeze(-1)
        vectors = self._read(below)
        if layout.start is None:
            above = self._read((below + 1).clamp(max=covered - 1))
            vectors = torch.lerp(vectors.to(share), above.to(share), share)
        return fuse(x, vectors, "add")

    def _read(self, positions: Float[Tensor, "b L"]) -> Float[Tensor, "b L C"]:
        places = torch.arange(self.places, device=positions.device)
        parts = self.tables[places, self.digits_of(positions)]
        return parts.sum(-2) if self.join == "sum" else parts.flatten(-2)


def places(count: int, base: int) -> int:
    """Number of digits of count - 1 in ``base``, in integer arithmetic."""
    digits = max(1, round(math.log(max(count, 2), base)) - 1)
    while base**digits < count:
        digits += 1
    return digits


ENTRY = Entry(
    factory=Radix,
    summary="Adds a trained vector for each digit of the position in a given base.",
    relative=False,
    trainable=True,
    extrapolates="To base^digits positions, most of whose digits occur in training.",
    cost="digits·L·C once",
    exceptions={"positions": "only 0 … base^digits - 1 exist"},
    sharing="layers",
)
