"""Hierarchical decomposition of a trained table."""

from __future__ import annotations

import torch

from posenc.arguments import Share
from posenc.encoding import Encoding
from posenc.encodings.embedding.hierarchical import PAPER_ALPHA, hierarchical_rows, require_alpha
from posenc.encodings.embedding.learned import Learned
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension
from posenc.extension.fitting import Stretch, remade, replaced, require_part
from posenc.extension.resampling import longer_count


def hierarchical(
    encoding: Encoding, *, factor: Stretch, alpha: Share = PAPER_ALPHA, prefix: int = 0
) -> Encoding:
    """Hierarchical decomposition: n trained rows make up to n², the first n unchanged.

    ``P'[i·n + j] = α u_i + (1 - α) u_j`` with ``u_j = (P_j - α P_0) / (1 - α)``. The new rows are
    independent parameters; the encoding ``hierarchical`` is the same tied to n rows. Cost: none.
    Differs from the source in nothing.

    Args:
        encoding: with a learned table.
        factor: extension of the rows, 1 to n.
        alpha: α, weight of the coarse part, 0 < α < 1 and not 0.5.
        prefix: number of first rows that are kept, as they are no positions; n counts the others.

    Raises:
        ArgumentError: if there is no learned table, or an argument is outside its domain.

    Reference: Su 2020, "Hierarchical decomposition of position encodings: BERT can handle
    ultra-long texts", https://kexue.fm/archives/7947.

    >>> import posenc
    >>> from posenc.extension import hierarchical
    >>> learned = posenc.create("learned", dim=4, max_length=8)
    >>> hierarchical(learned, factor=8).embedding.max_length
    64
    """
    learned = require_part(encoding, Learned, "hierarchical", "a learned table")
    require_alpha(alpha)
    count = longer_count(learned, factor, prefix) - prefix
    table = learned.table.detach()
    trained = table[prefix:].to(torch.promote_types(table.dtype, torch.float32))
    if count > len(trained) ** 2:
        raise ArgumentError(
            "factor",
            expected=f"1 to {len(trained)}, since n rows make n²",
            got=factor,
            remedy="Use interpolate.",
        )
    blocks = -(-count // len(trained))
    rows = hierarchical_rows(trained, alpha, blocks=blocks)[:count].to(table.dtype)
    rows[: len(trained)] = table[prefix:]  # the formula gives these up to rounding
    tables = {"table": torch.cat([table[:prefix], rows])}
    return replaced(encoding, learned, remade(learned, tables=tables, max_length=prefix + count))


ENTRY = Extension(
    function=hierarchical,
    summary="Decomposes a trained table of n positions so that it serves up to n².",
    on=("learned",),
    short_unchanged=True,
    training="helps",
    expect="Untouched up to the trained length; usable past it, better after a short training.",
    trials={"text_table": ("@prefix=1",)},
)
