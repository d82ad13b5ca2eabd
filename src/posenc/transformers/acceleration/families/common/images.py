"""Attention of images: a bias for each head and offset (BEiT's, Swin's), or decomposed (SAM's)."""

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
from posenc.encoding import BucketedTerms, TokenTableProduct
from posenc.encoding.derivatives import with_definition
from posenc.encoding.prepared import constant
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import differentiates_forward, differentiates_twice, without_autocast
from posenc.transformers.acceleration.accelerated import Accelerated, settings_of, wants_weights
from posenc.transformers.acceleration.family import AcceleratedFamily
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
    index = _cell_bucket(Grid(cells, cells).offset, size=size)  # [1, P, P]
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
    encoding = encoding_of(BucketedTerms(partial(_cell_bucket, size=size), table=table[:, :-3]))
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


def _cell_bucket(offset: Offsets, *, size: tuple[int, int]) -> BucketIndex:
    """The row of each offset between cells, as transformers computes it."""
    (rows, columns), (down, across) = size, offset.long().unbind(-1)
    span = 2 * columns - 1
    return ((rows - 1 - down) * span + columns - 1 - across).clamp(0, (2 * rows - 1) * span - 1)


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
    bucket = partial(_cell_bucket, size=size)

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


class DecomposedAttention(Accelerated):
    """Attention among the cells of an image or of a window."""

    weight_dropout: float = 0.0
    """Probability with which a weight is dropped in training."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B Y X C"],
        output_attentions: bool | None = False,
        **options: Any,
    ) -> Any:
        height, width = hidden_states.shape[1:3]
        short = height * width < self.shortest
        if short or wants_weights(self, {"output_attentions": output_attentions}):
            inputs = {"hidden_states": hidden_states, "output_attentions": output_attentions}
            return self.original_forward(**inputs, **options)
        heads = self.num_attention_heads
        qkv = self.qkv(hidden_states).flatten(1, 2).unflatten(-1, (3, heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, H, L, D] each
        terms = []
        if self.use_rel_pos:
            tables = (height, self.rel_pos_h), (width, self.rel_pos_w)
            terms = [self._along(axis, q, *table) for axis, table in enumerate(tables)]
        cells = Layout.image(height, width, device=q.device)
        output = self.attend(q, k, v, Grid(cells, cells), *terms, dropout=self.weight_dropout)
        output = output.transpose(1, 2).reshape(*hidden_states.shape[:3], -1)
        return self.proj(output), None

    def _along(self, axis: int, q: Tensor, size: int, table: Tensor) -> BucketedTerms:
        """Products of unscaled queries with a row for each offset along an axis."""
        pairs = self.get_rel_pos(size, size, table)  # by query and key
        rows = torch.cat([pairs[0].flip(0), pairs[1:, 0]]).unsqueeze(0)  # [1, 2 size - 1, D]
        left = TokenTableProduct(q, rows)
        return BucketedTerms(partial(_bucket, axis=axis, size=size), left=left)


class WithDropout(DecomposedAttention):
    """Attention that drops weights by its own rate."""

    @property
    def weight_dropout(self) -> float:  # type: ignore[override]
        return self.dropout


def sam_family(title: str, eager: type[nn.Module], sdpa: type[nn.Module]) -> AcceleratedFamily:
    """The family of SAM's two classes of attention, of which the second drops nothing."""
    return AcceleratedFamily(title, {eager: WithDropout, sdpa: DecomposedAttention}, shortest=196)


def _bucket(offset: Offsets, *, axis: int, size: int) -> BucketIndex:
    return (size - 1 - offset[..., axis].long()).clamp(0, 2 * size - 2)
