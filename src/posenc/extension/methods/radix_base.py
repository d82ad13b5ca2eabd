"""Positions in a larger base."""

from __future__ import annotations

import torch

from posenc.encoding import Encoding
from posenc.encodings.embedding.radix import Radix
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension
from posenc.extension.fitting import Stretch, remade, replaced, require_part
from posenc.extension.resampling import resampled_rows


def radix_base(
    encoding: Encoding, *, factor: Stretch, length: float | None = None, base: int | None = None
) -> Encoding:
    """Change of radix: positions are written with the same number of digits in a larger base.

    ``p = Σ_t d_t γ^t``, with digits ``0 … γ - 1`` instead of ``0 … β - 1``, analogous to a larger
    base of RoPE (``ntk``). The table of each digit is resampled from β to γ
    rows, first and last kept. Cost: none.

    Args:
        encoding: with radix positions.
        factor: s, 1 or more.
        length: L, the trained length; all ``β^m`` positions by default.
        base: γ, at least β; the smallest with ``γ^m ≥ s L`` by default.

    Raises:
        ArgumentError: if there are no radix positions, or an argument is outside its domain.

    Reference: Su 2023, "Transformer upgrade road 10: RoPE is a β-ary encoding",
    https://kexue.fm/archives/9675.

    >>> import posenc
    >>> from posenc.extension import radix_base
    >>> radix_base(posenc.create("radix", dim=4, base=10, digits=3), factor=4).embedding.base
    16
    """
    radix = require_part(encoding, Radix, "radix_base", "radix positions")
    covered = radix.base**radix.places if length is None else length
    wanted = factor * covered
    if base is None:
        base = radix.base
        while base**radix.places < wanted:
            base += 1
    if base < radix.base or base**radix.places < wanted:
        raise ArgumentError(
            "base",
            expected=f"{radix.base} or more, whose {radix.places} digits write "
            f"{wanted:g} positions",
            got=base,
            remedy="None takes the smallest.",
        )
    tables = [resampled_rows(table, base, align="corners") for table in radix.tables]
    sizes = {"base": base, "digits": radix.places, "max_length": None}
    larger = remade(radix, tables={"tables": torch.stack(tables)}, **sizes)
    return replaced(encoding, radix, larger)


ENTRY = Extension(
    function=radix_base,
    summary="Writes positions in a larger base with the same number of digits.",
    on=("radix",),
    training="helps",
    expect="All digit places stay inside what they have seen; the low digits blur a little.",
)
