"""A decoder with random positions."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.lab.experiments.recipe import Positions
from posenc.lab.training.seeding import generator
from posenc.layout import Layout
from posenc.layout.transforms import randomized
from posenc.models import Decoder


class RandomlyPlacedDecoder(nn.Module):
    """A decoder with tokens at 0, 1, 2, …, or at random positions in a range of ``max_length``."""

    def __init__(self, decoder: Decoder, *, positions: Positions, max_length: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.positions: Positions = positions
        self.max_length = max_length

    def forward(self, tokens: Int[Tensor, "B L"], draw: Int[Tensor, ""]) -> Float[Tensor, "B L V"]:
        """Logits after each token; ``draw`` seeds the positions."""
        layout = None
        if self.positions != "plain":
            drawn = random_layout(
                tokens.shape[1], self.positions, max_length=self.max_length, seed=int(draw)
            )
            layout = drawn.to(tokens.device)
        logits: Tensor = self.decoder(tokens, layout)
        return logits


def random_layout(length: int, positions: Positions, *, max_length: int, seed: int) -> Layout:
    """Layout of ``length`` tokens, at positions in a range of ``max_length`` (or ``length``)."""
    layout = Layout.sequence(length)
    if positions in ("plain", "index"):
        return layout
    source = generator(seed, length)
    layout = randomized(layout, max_length=max(max_length, length), generator=source)
    if positions == "randomized":
        return layout
    shuffled = torch.randperm(length, generator=source)
    return layout.with_positions(layout.positions[:, shuffled])
