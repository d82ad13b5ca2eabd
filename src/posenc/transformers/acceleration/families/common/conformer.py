"""Attention of conformers: Transformer-XL's positions, or Shaw's on keys."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.transformers.acceleration.accelerated import KEYS, Accelerated, wants_weights
from posenc.transformers.acceleration.family import AcceleratedFamily
from posenc.transformers.acceleration.interface import PositionBias, attention
from posenc.transformers.acceleration.terms import cached_projection, products_by_offset
from posenc.transformers.acceleration.trials import random_ids


class ConformerAttention(Accelerated):
    """Self-attention whose masks are made for posenc's attention interface."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B L C"],
        attention_mask: Tensor | None = None,
        relative_position_embeddings: Float[Tensor, "1 N C"] | None = None,
        **options: Any,
    ) -> Any:
        short = hidden_states.shape[1] < self.shortest
        dense = attention_mask is not None and attention_mask.dim() > 2
        if short or dense or wants_weights(self, options):
            if relative_position_embeddings is not None:
                options["relative_position_embeddings"] = relative_position_embeddings
            return self.original_forward(
                hidden_states=hidden_states, attention_mask=attention_mask, **options
            )
        layers = self.linear_q, self.linear_k, self.linear_v
        q, k, v = self.in_heads(hidden_states, self.num_heads, *layers)
        tokens, behind = q, q.shape[2] - 1
        if relative_position_embeddings is not None:
            rows = self._rows(relative_position_embeddings)
            tokens, q = (q + x.unsqueeze(1).to(q) for x in (self.pos_bias_v, self.pos_bias_u))
        else:
            left, right = self.left_max_position_embeddings, self.right_max_position_embeddings
            ahead, behind = min(right, behind), min(left, behind)
            index = torch.arange(left - behind, left + ahead + 1, device=q.device)
            rows = self.distance_embedding(index).unsqueeze(0)  # [1, N, D]
        bias = PositionBias((products_by_offset(tokens * self.scaling, rows, behind),))
        dropout = self.dropout.p if self.training else 0.0
        output, weights = attention(
            self, q, k, v, attention_mask, dropout, self.scaling, position_bias=bias, **options
        )
        return self.linear_out(output.flatten(2)), weights

    def _rows(self, embeddings: Float[Tensor, "1 N C"]) -> Float[Tensor, "H N D"]:
        """Projections of relative positions."""

        def project(rows: Float[Tensor, "n C"]) -> Float[Tensor, "H n D"]:
            heads: Tensor = self.linear_pos(rows.unsqueeze(0))[0].unflatten(
                -1, (self.num_heads, -1)
            )
            return heads.transpose(0, 1)

        cached = cached_projection(project, embeddings, 1, layers=(self.linear_pos,))
        return project(embeddings[0]) if cached is None else cached


def features_and_ids(model: Any, rows: int, length: int) -> dict[str, Tensor]:
    """Random features of a sound, and ids where the model has a decoder of texts."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    size = (rows, length, config.feature_projection_input_dim)
    made = {"input_features": torch.randn(size, generator=generator)}
    if hasattr(model, "text_decoder"):
        made["decoder_input_ids"] = random_ids(config.vocab_size, (rows, 9), generator)
    return made


def conformer_family(
    title: str, kind: type[nn.Module], encoder: type[nn.Module], **options: Any
) -> AcceleratedFamily:
    """The family of an encoder whose blocks have attention of this kind."""
    fields: dict[str, Any] = {"classes": {kind: ConformerAttention}, "refusal": refusal, **options}
    return AcceleratedFamily(title, configured=(encoder,), masks=KEYS, **fields)


def refusal(module: Any) -> str | None:
    """The reason why attention or an encoder stays as it is, or None."""
    kind = getattr(module, "position_embeddings_type", module.config.position_embeddings_type)
    if kind in ("relative", "relative_key"):
        return None
    return "no relative positions in its attention, which is PyTorch's own"
