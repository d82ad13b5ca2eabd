"""DeBERTa (v1): relative positions without buckets, one projection to queries, keys and values."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from transformers.models.deberta.modeling_deberta import (
    DebertaEncoder,
    DisentangledSelfAttention,
    build_relative_position,
)

from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.transformers.acceleration.families.common.disentangled import (
    DisentangledAttention,
    DisentangledEncoder,
)
from posenc.transformers.acceleration.family import AcceleratedFamily


class DebertaAttention(DisentangledAttention, DisentangledSelfAttention):
    """Self-attention."""

    def split(self, hidden_states: Float[Tensor, "B L C"]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.transpose_for_scores(self.in_proj(hidden_states)).chunk(3, dim=-1)
        biases = (
            self.transpose_for_scores(bias[None, None]) for bias in (self.q_bias, self.v_bias)
        )
        q, v = ((x + bias).to(k.dtype) for x, bias in zip((q, v), biases, strict=True))
        return q, k, v

    def summands(self) -> int:
        return len(self.pos_att_type)

    def rows(self, tokens: Float[Tensor, "B H L D"]) -> tuple[int, int]:
        reach = self.max_relative_positions
        span = min(tokens.shape[2], reach)
        return reach - span, reach + span - 1

    def bucket(self, offset: Offsets) -> BucketIndex:
        reach = self.max_relative_positions
        return (reach - offset[..., 0].long()).clamp(0, 2 * reach - 1)

    def projections(self) -> tuple[nn.Module | None, nn.Module | None]:
        return (
            self.pos_proj if "c2p" in self.pos_att_type else None,
            self.pos_q_proj if "p2c" in self.pos_att_type else None,
        )

    def relative_positions(self, hidden_states: Tensor) -> Tensor | None:
        if not self.relative_attention:
            return None
        return build_relative_position(hidden_states, hidden_states)


class DebertaEncoding(DisentangledEncoder, DebertaEncoder):
    """The encoder."""


def _refusal(module: nn.Module) -> str | None:
    if any(getattr(part, "talking_head", False) for part in module.modules()):
        return "talking heads mix the weights of all heads"
    return None


ENTRY = AcceleratedFamily(
    title="DeBERTa",
    classes={DisentangledSelfAttention: DebertaAttention, DebertaEncoder: DebertaEncoding},
    shortest=1,
    refusal=_refusal,
)
