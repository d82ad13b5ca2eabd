"""Data-adaptive positions: an MLP corrects a bias given the logits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from posenc.arguments import Count, Width
from posenc.encoding import Entry, FusedScore, HeadMixing, ScoreTerm
from posenc.encoding.prepared import is_plain_linear
from posenc.encoding.tensors import Keys, Queries, Scores
from posenc.encodings.common.buckets import OffsetBias
from posenc.encodings.common.precision import WideLinear
from posenc.encodings.score.alibi import Alibi
from posenc.encodings.score.fire import Fire
from posenc.encodings.score.kerple import Kerple
from posenc.grid import Grid

Bias = Literal["alibi", "fire", "kerple"]

BIASES: dict[str, type[Alibi] | type[Fire] | type[Kerple]] = {
    "alibi": Alibi,
    "fire": Fire,
    "kerple": Kerple,
}


class Dape(ScoreTerm):
    """DAPE: a bias plus a correction by a small MLP of the logits and biases of all heads.

    ``s_ij += B_ij + f([A_ij, B_ij])``, ``A_ij = scale · q_i·k_j``.

    A and B: the logits and biases of the pair in all H heads, so f goes from 2H numbers to H, with
    one hidden LeakyReLU layer; each layer has its own f and its own B. Not relative with
    ``bias="fire"``. Differs from the authors' code in serving keys ahead too, by the same bias as
    behind, and in FIRE's own network having the ReLU of its paper.

    Args:
        heads: H.
        bias: the corrected bias; the paper finds ``"kerple"`` best.
        hidden: width of the hidden layer.

    Raises:
        ArgumentError: when an argument is below 1.
        UnknownNameError: for another ``bias``.

    Reference: Zheng et al. 2024, "DAPE: Data-Adaptive Positional Encoding for Length
    Extrapolation", https://arxiv.org/abs/2405.14722.

    >>> import posenc
    >>> posenc.create("dape", heads=8).score.input.weight.shape
    torch.Size([32, 16])
    """

    mixes_heads = True

    heads: Count
    bias: Bias = "kerple"
    hidden: Width = 32

    def __post_init__(self) -> None:
        self.corrected = BIASES[self.bias](heads=self.heads)
        self.input = WideLinear(2 * self.heads, self.hidden)
        self.output = WideLinear(self.hidden, self.heads)

    def reset_parameters(self) -> None:
        """Draw the initial values of the bias and the network."""
        for part in (self.corrected, self.input, self.output):
            part.reset_parameters()

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        logits = q @ k.mT * scale
        bias: Tensor = self.corrected(q, k, grid, scale=scale).to(logits.dtype).expand_as(logits)
        both = torch.cat([logits, bias], dim=1).movedim(1, -1)
        hidden = nn.functional.leaky_relu(self.input(both))
        correction: Tensor = self.output(hidden).movedim(-1, 1)
        return bias + correction

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        plain = is_plain_linear(self.input) and is_plain_linear(self.output)  # not adapted, say
        if not (plain and isinstance(self.corrected, OffsetBias)):
            return None
        return HeadMixing(
            bias=self.corrected.bias,
            input=self.input.weight,
            input_bias=self.input.bias,
            output=self.output.weight,
            output_bias=self.output.bias,
        )


ENTRY = Entry(
    factory=Dape,
    summary="Corrects a bias by a small MLP of the logits and biases of all heads.",
    relative=True,
    trainable=True,
    extrapolates="Holds far past the training length.",
    cost="Q·K·3H·hidden; memory for Q·K·(2H + hidden)",
)
