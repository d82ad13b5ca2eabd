"""Swin: a number for each head and offset between the cells of a window."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.models.swin.modeling_swin import SwinAttention

from posenc.runtime import has_values
from posenc.transformers.acceleration.accelerated import Accelerated, parameter_of, wants_weights
from posenc.transformers.acceleration.families.common.images import attend_windows
from posenc.transformers.acceleration.family import AcceleratedFamily

FUSED_TO = 4
"""Multiple of ``shortest``, in cells of a window, from which on posenc computes without gradients
too; in smaller windows PyTorch's fused kernel does, which has no gradient of the bias."""


class AcceleratedSwinAttention(Accelerated, SwinAttention):
    """Attention within windows; as it was in small ones, and in shifted ones inside a graph."""

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


ENTRY = AcceleratedFamily(
    title="Swin",
    classes={SwinAttention: AcceleratedSwinAttention},
    shortest=144,
    limits=f"shifted windows outside compiled graphs only, {FUSED_TO} × the keys without gradients",
)
