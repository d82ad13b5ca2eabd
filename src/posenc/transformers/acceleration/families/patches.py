"""Biases of images of patches with a class token, a number for each head and offset: BEiT's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad, scaled_dot_product_attention

from posenc.attention.api import attend_block, attend_block_backward
from posenc.attention.backends.common.base import Backend
from posenc.attention.call import Call
from posenc.attention.problem.problem import GlobalSoftmax
from posenc.encoding import BucketedTerms
from posenc.encoding.derivatives import with_definition
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import differentiates_forward, differentiates_twice, without_autocast
from posenc.transformers.acceleration.accelerated import (
    Accelerated,
    AcceleratedFamily,
    settings_of,
    wants_weights,
)
from posenc.transformers.acceleration.routing import dense_attention
from posenc.transformers.acceleration.terms import ComputedOnce, encoding_of


@dataclass(eq=False)
class ImageBias(ComputedOnce):
    """A position bias of patches after a class token, in place of a number for each pair.

    Functions of PyTorch take it as the tensor ``[1, H, L, L]``.

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

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        def written(x: Any) -> Any:
            return x.dense if isinstance(x, ImageBias) else x

        named = {name: written(x) for name, x in (options or {}).items()}
        return function(*map(written, arguments), **named)


class ImageBiasTable(Accelerated):
    """A bias of one layer or of all, as a table."""

    def forward(
        self,
        window_size: tuple[int, int],
        interpolate_pos_encoding: bool = False,
        dim_size: int | None = None,
    ) -> Tensor | ImageBias:
        rows, columns = window_size
        dense = partial(
            self.original_forward,
            window_size=window_size,
            interpolate_pos_encoding=interpolate_pos_encoding,
            dim_size=dim_size,
        )
        resized = interpolate_pos_encoding and dim_size != rows * columns + 1
        if rows * columns < self.shortest or resized:
            return dense()
        height, width = (2 * side - 1 for side in self.window_size)
        table = self.relative_position_bias_table.T  # [H, N + 3]
        cells = table[:, :-3].reshape(1, -1, width, height)  # as transformers does, not H before W
        cells = interpolate(cells, size=(2 * rows - 1, 2 * columns - 1), mode="bilinear")
        return ImageBias(torch.cat([cells[0].flatten(1), table[:, -3:]], dim=1), window_size, dense)


def attend_images(
    module: nn.Module,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B H L D"],
    v: Float[Tensor, "B H L D"],
    bias: ImageBias,
    scale: float,
) -> Float[Tensor, "B L C"]:
    """Attention without dropout, heads merged; the first token is the class token."""
    table = bias.table.to(q.dtype)

    def definition(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        dense = _written(table, bias.size)
        output, _ = dense_attention(
            q, k, v, dense, None, dropout=0.0, scale=scale, with_weights=True
        )
        return output

    if differentiates_twice() or differentiates_forward():
        return definition(q, k, v, table).transpose(1, 2).flatten(2)
    first = torch.cat([table[:, -1:], table[:, -3:-2].expand(-1, k.shape[2] - 1)], dim=1)
    of_class = scaled_dot_product_attention(
        q[:, :, :1], k, v, attn_mask=first[None, :, None], scale=scale
    )
    backend = settings_of(module).backend
    patches = _attend_from_patches(q[:, :, 1:], k, v, table, bias.size, scale, backend)
    output = torch.cat([of_class, patches], dim=2)
    (output,) = with_definition((output,), definition, (q, k, v, table))
    return output.transpose(1, 2).flatten(2)


def _written(table: Float[Tensor, "H N"], size: tuple[int, int]) -> Float[Tensor, "1 H L L"]:
    """The bias of all pairs."""
    cells = Layout.image(*size, device=table.device)
    index = cell_bucket(Grid(cells, cells).offset, size=size)  # [1, P, P]
    index = pad(index, (1, 0, 1, 0))
    index[:, 0], index[:, :, 0] = table.shape[1] - 3, table.shape[1] - 2
    index[:, 0, 0] = table.shape[1] - 1
    return table[:, index].transpose(0, 1)


def _attend_from_patches(
    q: Float[Tensor, "B H P D"],
    k: Float[Tensor, "B H L D"],
    v: Float[Tensor, "B H L D"],
    table: Float[Tensor, "H N"],
    size: tuple[int, int],
    scale: float,
    backend: str | Backend,
) -> Float[Tensor, "B H P D"]:
    """Attention of patches to the class token and to all patches.

    Patches attend among themselves as an image; the class token's key joins them by the sums of
    exponentiated logits, and the gradients of both parts are those of the whole.
    """
    cells = Layout.image(*size, device=q.device)
    grid = Grid(cells, cells)
    encoding = encoding_of(BucketedTerms(partial(cell_bucket, size=size), table=table[:, :-3]))
    image = Call(q, k[:, :, 1:], v[:, :, 1:], grid, encoding, scale=scale)
    with without_autocast(q.device):
        wide = torch.promote_types(q.dtype, torch.float32)
        key, value = k[:, :, :1].to(wide), v[:, :, :1].to(wide)
        logit = scale * (q.to(wide) @ key.mT) + table[:, -2, None, None]  # [B, H, P, 1]
        with torch.no_grad():
            output, lse = attend_block(image, backend, return_lse=True)
            assert lse is not None
            lse = torch.logaddexp(lse, logit[..., 0].to(lse))  # [B, H, P]
            output = output + (logit - lse.unsqueeze(-1)).exp().to(wide) * (value - output)
        if not torch.is_grad_enabled():
            return output.to(v.dtype)
        global_softmax = GlobalSoftmax(output.to(v.dtype), lse)
        through_image = attend_block_backward(
            replace(image, global_softmax=global_softmax), backend
        )
        weight = (logit - lse.unsqueeze(-1)).exp().to(wide)
        through_class = weight * (value - output)
        through = through_image + through_class.to(v.dtype)
        return global_softmax.output + (through - through.detach())


def cell_bucket(offset: Offsets, *, size: tuple[int, int]) -> BucketIndex:
    """The row of each offset between cells, as transformers computes it."""
    (rows, columns), (down, across) = size, offset.long().unbind(-1)
    span = 2 * columns - 1
    return ((rows - 1 - down) * span + columns - 1 - across).clamp(0, (2 * rows - 1) * span - 1)


class AcceleratedBeitAttention(Accelerated):
    """Attention that takes an ``ImageBias``; with others, and with dropout, it runs as it did."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | ImageBias | None = None,
        **options: Any,
    ) -> Any:
        bias, dropped = attention_mask, self.training and self.attention_dropout > 0
        if not isinstance(bias, ImageBias) or dropped or wants_weights(self, options):
            mask = bias.dense if isinstance(bias, ImageBias) else bias
            return self.original_forward(
                hidden_states=hidden_states, attention_mask=mask, **options
            )
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = self.in_heads(hidden_states, self.num_attention_heads, *layers)
        return self.o_proj(attend_images(self, q, k, v, bias, self.scaling)), None


def beit() -> AcceleratedFamily:
    """BEiT."""
    from transformers.models.beit.modeling_beit import BeitAttention, BeitRelativePositionBias

    return AcceleratedFamily(
        title="BEiT",
        classes={BeitRelativePositionBias: ImageBiasTable, BeitAttention: AcceleratedBeitAttention},
        limits="without dropout of weights",
    )


class PatchAttention(Accelerated):
    """Data2Vec's attention among patches; with dropout, and for weights, it runs as it did."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        output_attentions: bool = False,
        relative_position_bias: Tensor | ImageBias | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        length = hidden_states.shape[1]
        weights = wants_weights(self, {"output_attentions": output_attentions})
        dropped = self.training and self.dropout.p > 0
        bias = None
        if not (weights or dropped or length <= self.shortest):
            bias = relative_position_bias
            if self.has_relative_position_bias:
                size = tuple(side // self.config.patch_size for side in resolution or ())
                layer_bias = self.relative_position_bias(
                    size, interpolate_pos_encoding, dim_size=length
                )
                bias = layer_bias if bias is None else layer_bias + bias
        if not isinstance(bias, ImageBias):
            return self.original_forward(
                hidden_states=hidden_states,
                output_attentions=output_attentions,
                relative_position_bias=relative_position_bias,
                interpolate_pos_encoding=interpolate_pos_encoding,
                resolution=resolution,
                **options,
            )
        layers = self.query, self.key, self.value
        q, k, v = self.in_heads(hidden_states, self.num_attention_heads, *layers)
        return (attend_images(self, q, k, v, bias, self.attention_head_size**-0.5),)


def data2vec() -> AcceleratedFamily:
    """Data2Vec's model of images, as BEiT."""
    from transformers.models.data2vec import modeling_data2vec_vision as modeling

    return AcceleratedFamily(
        title="Data2Vec's model of images",
        classes={
            modeling.Data2VecVisionRelativePositionBias: ImageBiasTable,
            modeling.Data2VecVisionSelfAttention: PatchAttention,
            modeling.Data2VecVisionSdpaSelfAttention: PatchAttention,
        },
        limits="without dropout of weights",
    )
