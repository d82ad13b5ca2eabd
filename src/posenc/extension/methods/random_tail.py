"""New rows of a learned table drawn at random."""

from __future__ import annotations

import torch

from posenc.encoding import Encoding
from posenc.encodings.embedding.learned import Learned
from posenc.extension.entry import Extension
from posenc.extension.fitting import Stretch, remade, replaced, require_part
from posenc.extension.resampling import longer_count, rows_like


def random_tail(encoding: Encoding, *, factor: Stretch, prefix: int = 0, seed: int = 0) -> Encoding:
    """Random tail: trained rows are kept, new ones drawn with their mean and deviation.

    ``P[p, c] ~ N(mean_c, std_c)`` for positions past the table, with statistics of each feature
    over the trained rows. Cost: none. To be fine-tuned.

    Args:
        encoding: with a learned table.
        factor: extension of the rows, 1 or more.
        prefix: number of first rows that are no positions.
        seed: of the draw.

    Raises:
        ArgumentError: if there is no learned table, or an argument is outside its domain.

    >>> import posenc
    >>> from posenc.extension import random_tail
    >>> learned = posenc.create("learned", dim=4, max_length=8)
    >>> random_tail(learned, factor=2).embedding.max_length
    16
    """
    learned = require_part(encoding, Learned, "random_tail", "a learned table")
    count = longer_count(learned, factor, prefix)
    table = learned.table.detach()
    generator = torch.Generator().manual_seed(seed)
    drawn = rows_like(table[prefix:], count - len(table), generator=generator)
    tables = {"table": torch.cat([table, drawn])}
    return replaced(encoding, learned, remade(learned, tables=tables, max_length=count))


ENTRY = Extension(
    function=random_tail,
    summary="Keeps the trained rows and draws new ones with their mean and spread.",
    on=("learned",),
    short_unchanged=True,
    training="needed",
    expect="Untouched up to the trained length; new positions mean nothing before training.",
    trials={"text_table": ("@prefix=1",)},
)
