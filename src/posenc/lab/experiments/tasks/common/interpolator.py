"""Model of the temperature task: an encoder of numbers at real times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from posenc.layout import Layout
from posenc.models.block import Block
from posenc.models.checkpoint import SavedModel
from posenc.models.layers import make_norm, normalize
from posenc.models.sharing import share_encodings
from posenc.models.stack import StackConfig, draw_blocks, embed, make_blocks, make_encodings


class Interpolator(SavedModel):
    """Encoder of numbers at real times, which predicts a value for each, hidden or not.

    Args:
        config: of its blocks.
        encoding, options: of the positions, which are times.
        layers: blocks.
    """

    kind = "interpolator"

    def __init__(
        self, config: StackConfig, *, encoding: str, options: Mapping[str, Any], layers: int
    ) -> None:
        super().__init__()
        self.config = config
        self._shape = {"encoding": encoding, "options": dict(options), "layers": layers}
        encodings = make_encodings(config, encoding, options, layers=layers, causal=False)
        self.input = nn.Linear(2, config.dim)
        self.blocks = make_blocks(config, encodings, causal=False)
        self.shared_encodings = share_encodings(self)
        self.norm = make_norm(config.norm, config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, 1)
        draw_blocks(self.blocks)

    def forward(
        self, values: Float[Tensor, "B L"], hidden: Bool[Tensor, "B L"], layout: Layout
    ) -> Float[Tensor, "B L"]:
        """A value ``[B, L]`` for each reading; hidden ``values`` are ignored."""
        visible = torch.stack([values.masked_fill(hidden, 0.0), hidden.to(values.dtype)], dim=-1)
        x = self.input(visible)
        first = cast(Block, self.blocks[0]).attention.encoding
        x = embed(first, x, layout, None)
        for block in self.blocks:
            x = block(x, layout)
        predicted: Tensor = self.output(normalize(self.norm, x, layout)).squeeze(-1)
        return predicted

    def _fields(self) -> dict[str, Any]:
        return self._shape | {"config": self.config.to_json()}

    @classmethod
    def _of_fields(cls, fields: Mapping[str, Any]) -> Self:
        shape = {key: value for key, value in fields.items() if key != "config"}
        return cls(StackConfig(**fields["config"]), **shape)


class Timed(nn.Module):
    """An ``Interpolator`` with readings at their times, or at their indices.

    Args:
        model: the interpolator.
        by_index: positions are 0, 1, 2, … whatever the times.
    """

    def __init__(self, model: Interpolator, *, by_index: bool) -> None:
        super().__init__()
        self.model, self.by_index = model, by_index

    def forward(self, values: Tensor, times: Tensor, hidden: Tensor) -> Tensor:
        """A value for each reading, from values, hours and the mask of hidden ones, ``[B, L]``."""
        if self.by_index:
            layout = Layout.sequence(values.shape[1], device=values.device)
        else:
            layout = Layout.at(times)
        predicted: Tensor = self.model(values, hidden, layout)
        return predicted
