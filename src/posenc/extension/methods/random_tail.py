"""New rows of a learned table drawn with the trained rows' mean and deviation."""

from __future__ import annotations

import torch

from posenc.encoding import Encoding
from posenc.encodings.embedding.learned import Learned
from posenc.extension.entry import Extension, ExtensionClaims
from posenc.extension.fitting import replaced, require_factor, require_part
from posenc.extension.resampling import longer_count, rows_like, with_rows

__all__ = ["random_tail"]


def random_tail(encoding: Encoding, *, factor: float, prefix: int = 0, seed: int = 0) -> Encoding:
    """Random tail: trained rows stay, new ones are drawn with the trained rows' mean and spread.

    ``P[p, c] ~ N(mean_c, std_c)`` for positions past the table, mean and standard deviation over
    the trained rows of each feature. Cost: none. To be trained: before that a new row says only
    that it is some position.

    Args:
        encoding: with a learned table.
        factor: 1 or more; how many times the rows.
        prefix: first rows that are no positions; they stay, and do not count.
        seed: of the draw.

    Raises:
        ArgumentError: when there is no learned table, or an argument is out of its domain.

    >>> import posenc
    >>> from posenc.extension import random_tail
    >>> random_tail(posenc.create("learned", dim=4, max_length=8), factor=2).embedding.max_length
    16
    """
    learned = require_part(encoding, Learned, "random_tail", "a learned table")
    count = longer_count(learned, require_factor(factor), prefix)
    table = learned.table.detach()
    generator = torch.Generator().manual_seed(seed)
    drawn = rows_like(table[prefix:], count - len(table), generator=generator)
    return replaced(encoding, learned, with_rows(learned, torch.cat([table, drawn])))


ENTRY = Extension(
    function=random_tail,
    summary="Keeps the trained rows and draws new ones with their mean and spread.",
    on=("learned",),
    claims=ExtensionClaims(
        short_unchanged=True,
        training="needed",
        expect="Untouched up to the trained length; new positions mean nothing before training.",
    ),
    citation=None,
)
