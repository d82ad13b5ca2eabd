"""Attention within the windows of an image, with a number for each head and offset (Swin's)."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import BucketedTerms
from posenc.encoding.prepared import constant
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.transformers.acceleration.accelerated import Accelerated
from posenc.transformers.acceleration.dense import dense_attention
from posenc.transformers.acceleration.families.common.image_bias import cell_bucket


def attend_windows(
    module: Accelerated,
    q: Float[Tensor, "N H L D"],
    k: Float[Tensor, "N H L D"],
    v: Float[Tensor, "N H L D"],
    table: Float[Tensor, "H T"],
    mask: Float[Tensor, "W L L"] | None,
    size: tuple[int, int],
    *,
    scale: float,
    dropout: float,
) -> Float[Tensor, "N L C"]:
    """Attention of all windows, heads merged.

    Windows that shifting has put together from several parts of the image, the last of each row
    and column, are computed with the bias written out.

    Args:
        q, k, v: N windows, those of one image after those of another.
        table: by the offset of two cells, ``(2Y - 1)(2X - 1)`` of them.
        mask: added to the logits of the W windows of an image; None: nothing is masked.
        size: cells along each axis, (Y, X).
    """
    table = table.to(q.dtype)
    cells = Layout.image(*size, device=q.device)
    grid = Grid(cells, cells)
    bucket = partial(cell_bucket, size=size)

    def attend_unmasked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        terms = BucketedTerms(bucket, table=table)
        return module.attend(q, k, v, grid, terms, dropout=dropout, scale=scale)

    if mask is None:
        return attend_unmasked(q, k, v).transpose(1, 2).flatten(2)
    free = (mask == 0).flatten(1).all(1).tolist()  # one number a window; all else follows from it
    numbers = torch.arange(0, len(q), len(mask), device=q.device).unsqueeze(1)  # of first windows
    joined, parted = (
        constant([n for n, x in enumerate(free) if x == kind], like=numbers)
        for kind in (True, False)
    )
    chosen, others = ((numbers + windows).flatten() for windows in (joined, parted))
    output = torch.empty_like(v)
    if len(chosen):
        output = output.index_copy(
            0, chosen, attend_unmasked(*(x[chosen] for x in (q, k, v))).to(v.dtype)
        )
    if len(others):
        bias = table[:, bucket(grid.offset)[0]].unsqueeze(0)  # [1, H, L, L]
        masks = mask[parted].repeat(len(numbers), 1, 1).unsqueeze(1).to(bias.dtype)
        q, k, v = (x[others] for x in (q, k, v))
        dropped = dropout if module.training else 0.0
        masked_output, _ = dense_attention(q, k, v, bias, masks, dropout=dropped, scale=scale)
        output = output.index_copy(0, others, masked_output.to(v.dtype))
    return output.transpose(1, 2).flatten(2)
