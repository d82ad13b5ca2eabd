"""BEiT: a number for each head and offset between patches, and three for the class token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate, scaled_dot_product_attention
from transformers.models.beit.modeling_beit import BeitAttention, BeitRelativePositionBias

from posenc.attention import attend
from posenc.encoding import BucketedTerms
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.grid import Grid
from posenc.integrations.transformers.accelerate.accelerated import Accelerated, settings_of
from posenc.integrations.transformers.accelerate.family import AcceleratedFamily
from posenc.integrations.transformers.accelerate.interface import wants_weights
from posenc.integrations.transformers.accelerate.terms import ComputedOnce, encoding_of
from posenc.layout import Layout


@dataclass(eq=False)
class ImageBias(ComputedOnce):
    """A position bias of patches after a class token, in place of a number for each pair.

    Args:
        table: ``[H, (2Y - 1)(2X - 1) + 3]``; the last three are for pairs of the class token with
            a patch, of a patch with the class token, and of the class token with itself.
        size: patches along each axis, (Y, X).
        compute: the model's own function, which computes ``[1, H, L, L]``.
    """

    table: Float[Tensor, "H N"]
    size: tuple[int, int]
    compute: Callable[[], Tensor]

    def __add__(self, other: Tensor | ImageBias) -> Tensor | ImageBias:
        if isinstance(other, Tensor):
            dense: Tensor = self.dense  # [1, H, L, L]
            return dense + other
        table = self.table + other.table
        return ImageBias(table, self.size, lambda: self.dense + other.dense)


class AcceleratedBeitBias(Accelerated, BeitRelativePositionBias):
    """A bias of one layer or of all, as a table where no gradients are computed."""

    original = BeitRelativePositionBias

    def forward(
        self,
        window_size: tuple[int, int],
        interpolate_pos_encoding: bool = False,
        dim_size: int | None = None,
    ) -> Tensor | ImageBias:
        rows, columns = window_size
        dense = partial(super().forward, window_size, interpolate_pos_encoding, dim_size)
        short = rows * columns < settings_of(self).shortest
        resized = interpolate_pos_encoding and dim_size != rows * columns + 1
        if torch.is_grad_enabled() or short or resized:
            own: Tensor = dense()
            return own
        height, width = (2 * side - 1 for side in self.window_size)
        table = self.relative_position_bias_table.T  # [H, N + 3]
        cells = table[:, :-3].reshape(1, -1, width, height)  # as transformers does, not H before W
        cells = interpolate(cells, size=(2 * rows - 1, 2 * columns - 1), mode="bilinear")
        return ImageBias(torch.cat([cells[0].flatten(1), table[:, -3:]], dim=1), window_size, dense)


class AcceleratedBeitAttention(Accelerated, BeitAttention):
    """Attention that takes an ``ImageBias``; with any other, and in training, it runs as it did.

    Patches attend among themselves as an image, and the class token's key joins them by their sums
    of exponentiated logits, through which no gradients flow.
    """

    original = BeitAttention

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | ImageBias | None = None,
        **options: Any,
    ) -> Any:
        bias = attention_mask
        if not isinstance(bias, ImageBias) or self.training or wants_weights(self, options):
            mask = bias.dense if isinstance(bias, ImageBias) else bias
            return super().forward(hidden_states, mask, **options)
        q, k, v = (
            projection(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        rows, columns = bias.size
        table = bias.table.to(q.dtype)
        cells = Layout.image(rows, columns, device=q.device)
        output, lse = attend(
            q[:, :, 1:],
            k[:, :, 1:],
            v[:, :, 1:],
            Grid(cells, cells),
            encoding_of(BucketedTerms(partial(_bucket, size=bias.size), table=table[:, :-3])),
            backend=settings_of(self).backend,
            scale=self.scaling,
            return_lse=True,
        )
        to_class = (q[:, :, 1:] @ k[:, :, :1].mT) * self.scaling + table[:, -2, None, None]
        weight = (to_class - lse.unsqueeze(-1)).sigmoid().to(output.dtype)  # [B, H, L - 1, 1]
        output = output + weight * (v[:, :, :1] - output)
        first = torch.cat([table[:, -1:], table[:, -3:-2].expand(-1, rows * columns)], dim=1)
        of_class = scaled_dot_product_attention(
            q[:, :, :1], k, v, attn_mask=first[None, :, None], scale=self.scaling
        )
        output = torch.cat([of_class, output], dim=2).transpose(1, 2).flatten(2)
        return self.o_proj(output), None


def _bucket(offset: Offsets, *, size: tuple[int, int]) -> BucketIndex:
    """The row of each offset, as transformers computes it."""
    (rows, columns), (down, across) = size, offset.long().unbind(-1)
    span = 2 * columns - 1
    return ((rows - 1 - down) * span + columns - 1 - across).clamp(0, (2 * rows - 1) * span - 1)


ENTRY = AcceleratedFamily(
    title="BEiT",
    classes={
        BeitRelativePositionBias: AcceleratedBeitBias,
        BeitAttention: AcceleratedBeitAttention,
    },
    limits="where no gradients are computed",
)
