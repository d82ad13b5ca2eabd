"""Attention among cells: of windows by Swin's bias, and of images by SAM's, along each axis."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from posenc.encoding import BucketedTerms, TokenTableProduct
from posenc.encoding.prepared import constant
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import has_values
from posenc.transformers.acceleration.accelerated import (
    Accelerated,
    AcceleratedFamily,
    parameter_of,
    wants_weights,
)
from posenc.transformers.acceleration.families.patches import cell_bucket
from posenc.transformers.acceleration.routing import dense_attention

FUSED_TO = 4
"""Multiple of ``shortest``, in cells of a window, from which on posenc computes without gradients
too; in smaller windows PyTorch's fused kernel does, which has no gradient of the bias."""


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


class AcceleratedSwinAttention(Accelerated):
    """Swin's attention; as it was in small windows, and in shifted ones inside a graph."""

    def forward(
        self,
        hidden_states: Float[Tensor, "N L C"],
        attention_mask: Float[Tensor, "W L L"] | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        table = parameter_of(self.relative_position_bias, "relative_position_bias_table")
        trained = torch.is_grad_enabled() and table.requires_grad
        shortest = self.shortest * (1 if trained else FUSED_TO)
        traced = attention_mask is not None and not has_values(attention_mask)
        if hidden_states.shape[1] < shortest or traced or wants_weights(self, options):
            return self.original_forward(
                hidden_states=hidden_states, attention_mask=attention_mask, **options
            )
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = self.in_heads(hidden_states, self.num_attention_heads, *layers)
        size, dropped = self.relative_position_bias.window_size, self.attention_dropout
        output = attend_windows(
            self, q, k, v, table.T, attention_mask, size, scale=self.scaling, dropout=dropped
        )
        return self.o_proj(output), None


def swin() -> AcceleratedFamily:
    """Swin: a number for each head and offset between the cells of a window."""
    from transformers.models.swin.modeling_swin import SwinAttention

    limits = "shifted windows outside compiled graphs only"
    return AcceleratedFamily(
        title="Swin",
        classes={SwinAttention: AcceleratedSwinAttention},
        shortest=144,
        limits=f"{limits}, {FUSED_TO} × the keys without gradients",
    )


class AcceleratedSwinv2Attention(Accelerated):
    """Swin-v2's attention; as it was in small windows, and in shifted ones inside a graph."""

    def forward(
        self,
        hidden_states: Float[Tensor, "N L C"],
        attention_mask: Float[Tensor, "W L L"] | None = None,
        output_attentions: bool | None = False,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        traced = attention_mask is not None and not has_values(attention_mask)
        if output_attentions or traced or hidden_states.shape[1] < self.shortest:
            inputs = {"attention_mask": attention_mask, "output_attentions": output_attentions}
            return self.original_forward(hidden_states=hidden_states, **inputs, **options)
        layers = self.query, self.key, self.value
        q, k, v = self.in_heads(hidden_states, self.num_attention_heads, *layers)
        factor = torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()  # [H, 1, 1]
        table = self.continuous_position_bias_mlp(self.relative_coords_table).flatten(0, 2)
        output = attend_windows(
            self,
            (normalize(q, dim=-1) * factor).to(v.dtype),
            normalize(k, dim=-1).to(v.dtype),
            v,
            16 * table.T.sigmoid(),
            None if attention_mask is None else 2 * attention_mask,  # as transformers adds it
            tuple(self.window_size),
            scale=1.0,
            dropout=self.dropout.p,
        )
        return (output,)


def swinv2() -> AcceleratedFamily:
    """Swin-v2: cosines of queries and keys in windows, and a network's bias by their offset."""
    from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

    return AcceleratedFamily(
        title="Swin-v2",
        classes={Swinv2SelfAttention: AcceleratedSwinv2Attention},
        shortest=144,
        limits="shifted windows outside compiled graphs only",
    )


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


def _bucket(offset: Offsets, *, axis: int, size: int) -> BucketIndex:
    return (size - 1 - offset[..., axis].long()).clamp(0, 2 * size - 2)


def _sam_family(title: str, eager: type[nn.Module], sdpa: type[nn.Module]) -> AcceleratedFamily:
    """The family of SAM's two classes of attention, of which the second drops nothing."""
    return AcceleratedFamily(title, {eager: WithDropout, sdpa: DecomposedAttention}, shortest=196)


def sam() -> AcceleratedFamily:
    """SAM: relative positions along each axis, over windows and whole images."""
    from transformers.models.sam import modeling_sam as modeling

    kinds = modeling.SamVisionAttention, modeling.SamVisionSdpaAttention
    return _sam_family("SAM", *kinds)


def sam_hq() -> AcceleratedFamily:
    """SAM-HQ, as SAM."""
    from transformers.models.sam_hq import modeling_sam_hq as modeling

    kinds = modeling.SamHQVisionAttention, modeling.SamHQVisionSdpaAttention
    return _sam_family("SAM-HQ", *kinds)


class AcceleratedVitDetAttention(DecomposedAttention):
    """ViTDet's attention, of the image encoder."""

    def forward(  # type: ignore[override]
        self, hidden_state: Float[Tensor, "B Y X C"], **options: Any
    ) -> Any:
        return super().forward(hidden_states=hidden_state, **options)

    def original_forward(self, **arguments: Any) -> Any:
        return super().original_forward(hidden_state=arguments.pop("hidden_states"), **arguments)

    @staticmethod
    def get_rel_pos(*arguments: Any) -> Tensor:
        """The row of the table for each query and key along an axis."""
        from transformers.models.vitdet.modeling_vitdet import get_rel_pos

        return get_rel_pos(*arguments)

    @property
    def num_attention_heads(self) -> int:
        return self.num_heads

    @property
    def use_rel_pos(self) -> bool:
        return self.use_relative_position_embeddings


def vitdet() -> AcceleratedFamily:
    """ViTDet, as SAM."""
    from transformers.models.vitdet.modeling_vitdet import VitDetAttention

    return AcceleratedFamily("ViTDet", {VitDetAttention: AcceleratedVitDetAttention})
