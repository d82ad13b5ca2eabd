"""Positions written in a larger base."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from posenc.encoding import Encoding
from posenc.encodings.embedding.radix import Radix
from posenc.entry import Citation
from posenc.errors import ArgumentError, UnknownNameError
from posenc.extension.entry import Extension, ExtensionClaims
from posenc.extension.fitting import replaced, require_factor, require_part
from posenc.extension.resampling import resampled_rows, rows_like

__all__ = ["NewDigits", "radix_base"]

NewDigits = Literal["interpolated", "drawn"]


def radix_base(
    encoding: Encoding,
    *,
    factor: float,
    length: float | None = None,
    base: int | None = None,
    digits: NewDigits = "interpolated",
    seed: int = 0,
) -> Encoding:
    """Change of radix: positions are written with the same number of digits in a larger base.

    ``p = Σ_t d_t γ^t``, digits ``0 … γ - 1`` instead of ``0 … β - 1``: this is the view in which a
    larger base of RoPE is a change of radix (``ntk``). Each digit place has a table of β trained
    rows and needs γ. Cost: none.

    Args:
        encoding: with radix positions.
        factor: s, 1 or more.
        length: L, the trained length; by default all ``β^m`` positions.
        base: γ, β or more; by default the smallest with ``γ^m ≥ s L``.
        digits: ``"interpolated"``: the γ rows of a place are read from its β by linear
            interpolation, first and last staying; ``"drawn"``: the β rows stay, and new ones are
            drawn with their mean and spread.
        seed: of the draw.

    Raises:
        ArgumentError: when there are no radix positions, or an argument is out of its domain.
        UnknownNameError: for other ``digits``.

    Reference: Su 2023, "Transformer upgrade road 10: RoPE is a β-ary encoding"
    (kexue.fm/archives/9675).

    >>> import posenc
    >>> from posenc.extension import radix_base
    >>> radix_base(posenc.create("radix", dim=4, base=10, digits=3), factor=4).embedding.base
    16
    """
    radix = require_part(encoding, Radix, "radix_base", "radix positions")
    if digits not in ("interpolated", "drawn"):
        raise UnknownNameError.of("digits", digits, ("interpolated", "drawn"))
    covered = radix.base**radix.digits if length is None else length
    wanted = require_factor(factor) * covered
    if base is None:
        base = radix.base
        while base**radix.digits < wanted:
            base += 1
    if base < radix.base or base**radix.digits < wanted:
        raise ArgumentError(
            "base",
            expected=f"{radix.base} or more, whose {radix.digits} digits write "
            f"{wanted:g} positions",
            got=base,
            remedy="None takes the smallest.",
        )
    generator = torch.Generator().manual_seed(seed)
    tables = [_more_rows(table, base, digits, generator) for table in radix.tables.detach()]
    with torch.device("meta"):
        larger = Radix(
            dim=radix.tables.shape[-1],
            base=base,
            digits=radix.digits,
            std=radix.std,
        )
    larger.join = radix.join
    larger.tables = nn.Parameter(torch.stack(tables), requires_grad=radix.tables.requires_grad)
    return replaced(encoding, radix, larger.train(radix.training))


def _more_rows(table: Tensor, count: int, digits: NewDigits, generator: torch.Generator) -> Tensor:
    if digits == "interpolated":
        return resampled_rows(table, count, align="corners")
    return torch.cat([table, rows_like(table, count - len(table), generator=generator)])


ENTRY = Extension(
    function=radix_base,
    summary="Writes positions in a larger base with the same number of digits.",
    on=("radix",),
    claims=ExtensionClaims(
        training="helps",
        expect="All digit places stay inside what they have seen; the low digits blur a little.",
    ),
    citation=Citation(
        authors="Su",
        title="Transformer upgrade road 10: RoPE is a β-ary encoding",
        year=2023,
        url="https://kexue.fm/archives/9675",
    ),
)
