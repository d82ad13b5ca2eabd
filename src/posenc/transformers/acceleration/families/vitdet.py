"""ViTDet: decomposed relative positions over windows and whole images."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers.models.vitdet.modeling_vitdet import VitDetAttention, get_rel_pos

from posenc.transformers.acceleration.families.common.images import DecomposedAttention
from posenc.transformers.acceleration.family import AcceleratedFamily


class AcceleratedVitDetAttention(DecomposedAttention, VitDetAttention):
    """Attention of the image encoder."""

    get_rel_pos = staticmethod(get_rel_pos)

    def forward(  # type: ignore[override]
        self, hidden_state: Float[Tensor, "B Y X C"], **options: Any
    ) -> Any:
        return super().forward(hidden_states=hidden_state, **options)

    def original_forward(self, **arguments: Any) -> Any:
        return super().original_forward(hidden_state=arguments.pop("hidden_states"), **arguments)

    @property
    def num_attention_heads(self) -> int:
        return self.num_heads

    @property
    def use_rel_pos(self) -> bool:
        return self.use_relative_position_embeddings


ENTRY = AcceleratedFamily(title="ViTDet", classes={VitDetAttention: AcceleratedVitDetAttention})
