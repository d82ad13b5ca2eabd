"""Attention of patches after a class token, with a number for each head and offset (BEiT's)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate, scaled_dot_product_attention

from posenc.attention import attend
from posenc.attention.backends.tiled.images import tiled_image_backward
from posenc.encoding import BucketedTerms
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.grid import Grid
from posenc.integrations.transformers.accelerate.accelerated import Accelerated, settings_of
from posenc.integrations.transformers.accelerate.terms import ComputedOnce, encoding_of
from posenc.layout import Layout
from posenc.runtime import without_autocast


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
        dense = partial(super().forward, window_size, interpolate_pos_encoding, dim_size)
        resized = interpolate_pos_encoding and dim_size != rows * columns + 1
        if rows * columns < settings_of(self).shortest or resized:
            own: Tensor = dense()
            return own
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
    tables, backend = (table[:, :-3], table[:, -2]), settings_of(module).backend
    patches: Tensor = _Patches.apply(q[:, :, 1:], k, v, *tables, bias.size, scale, backend)  # type: ignore[no-untyped-call]
    first = torch.cat([table[:, -1:], table[:, -3:-2].expand(-1, k.shape[2] - 1)], dim=1)
    of_class = scaled_dot_product_attention(
        q[:, :, :1], k, v, attn_mask=first[None, :, None], scale=scale
    )
    return torch.cat([of_class, patches], dim=2).transpose(1, 2).flatten(2)


class _Patches(torch.autograd.Function):
    """Attention of patches to the class token and to all patches.

    Patches attend among themselves as an image, and the class token's key joins them by their sums
    of exponentiated logits. Given the output and the sums over all keys, the backward pass of the
    image's keys is that of the whole.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "B H P D"],
        k: Float[Tensor, "B H L D"],
        v: Float[Tensor, "B H L D"],
        table: Float[Tensor, "H N"],
        to_class: Float[Tensor, " H"],
        size: tuple[int, int],
        scale: float,
        backend: Any,
    ) -> Float[Tensor, "B H P D"]:
        cells = Layout.image(*size, device=q.device)
        terms = BucketedTerms(partial(cell_bucket, size=size), table=table)
        output, lse = attend(
            q,
            k[:, :, 1:],
            v[:, :, 1:],
            Grid(cells, cells),
            encoding_of(terms),
            backend=backend,
            scale=scale,
            return_lse=True,
        )
        logit = (q @ k[:, :, :1].mT)[..., 0] * scale + to_class.unsqueeze(-1)  # [B, H, P]
        weight = (logit - lse).sigmoid().unsqueeze(-1).to(output.dtype)
        output = output + weight * (v[:, :, :1] - output)
        ctx.save_for_backward(q, k, v, table, to_class, output, torch.logaddexp(lse, logit))
        ctx.size, ctx.scale = size, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, "B H P D"]) -> Any:
        *given, lse = ctx.saved_tensors
        kinds = [x.dtype for x in given]
        wide = torch.promote_types(gradient.dtype, torch.float32)
        (rows, columns), scale = ctx.size, ctx.scale
        with without_autocast(gradient.device):
            q, k, v, table, to_class, output, gradient = (x.to(wide) for x in (*given, gradient))
            lines = table.view(len(table), 2 * rows - 1, 2 * columns - 1).flip(1, 2)
            reversed_rows = (x.flip(2) for x in (gradient, output, lse.to(wide)))
            dq, dk, dv, dtable = tiled_image_backward(
                *reversed_rows,
                (q * scale).flip(2),
                k[:, :, 1:].contiguous(),
                v[:, :, 1:].contiguous(),
                lines.contiguous(),
                [rows, columns, rows, columns],
                ctx.needs_input_grad[3],
            )
            key, value = k[:, :, :1], v[:, :, :1]
            logit = (q @ key.mT) * scale + to_class[:, None, None]
            weight = (logit - lse.unsqueeze(-1)).exp()  # [B, H, P, 1]
            ds = weight * (gradient * (value - output)).sum(-1, keepdim=True)
            dq = scale * (dq.flip(2) + ds * key)
            dk = torch.cat([scale * (ds.mT @ q), dk], dim=2)
            dv = torch.cat([weight.mT @ gradient, dv], dim=2)
            dtable = dtable.flip(1, 2).flatten(1)
            found = (dq, dk, dv, dtable, ds.sum((0, 2, 3)))
        return (*(x.to(kind) for x, kind in zip(found, kinds, strict=False)), None, None, None)


def cell_bucket(offset: Offsets, *, size: tuple[int, int]) -> BucketIndex:
    """The row of each offset between cells, as transformers computes it."""
    (rows, columns), (down, across) = size, offset.long().unbind(-1)
    span = 2 * columns - 1
    return ((rows - 1 - down) * span + columns - 1 - across).clamp(0, (2 * rows - 1) * span - 1)
