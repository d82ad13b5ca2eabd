"""Positions encoded from digit strings by a small Transformer."""

from __future__ import annotations

from itertools import product

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from posenc.arguments import Count, Probability, Width, checked
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.checks import require_axes
from posenc.encodings.common.special_tokens import zero_special
from posenc.encodings.common.table import fuse, real_positions, require_inside
from posenc.errors import ArgumentError
from posenc.layout import Layout

BASE = 10

STD = 0.02
"""Standard deviation of initial values."""


class Seqpe(EmbeddingEncoding):
    """SeqPE: a small Transformer encodes the position's digits, axis after axis.

    ``x + W · T(e_1, …, e_m, c) + b``, ``e_t = D[digit_t] + P[t] (+ A[axis])``: ``T`` is the output
    at the last token, the trained ``c``, of causal pre-norm blocks (tanh-GELU, width 4C) and a
    LayerNorm.

    Digits are decimal, most significant first; leading zeros are masked, position 0 is one digit.
    Positions in tokens or cells, fractional ones interpolated linearly on each axis; special tokens
    pass unchanged. Differs from the paper, whose best text models multiply logits by products of
    these vectors, in adding them to the tokens (the authors' "input add"); its two auxiliary losses
    are left to the training loop.

    Args:
        dim: width C.
        heads: heads of the small Transformer, a divisor of C.
        axes: A, components of a position.
        digits: m / A, largest number of digits per axis.
        depth: blocks of the small Transformer.
        dropout: dropout probability of the blocks' residual branches.

    Raises:
        ArgumentError: when an option is out of its domain; in ``forward``, for a layout with
            another number of axes.
        LengthError: in ``forward``, for a position below 0 or of more digits.

    Reference: Li et al. 2025, "SeqPE: Transformer with Sequential Position Encoding",
    https://arxiv.org/abs/2506.13277.

    >>> import posenc, torch
    >>> encoding = posenc.create("seqpe", dim=8, heads=2)
    >>> encoding.embed(torch.zeros(1, 3, 8), posenc.Layout.sequence(3, start=9998)).shape
    torch.Size([1, 3, 8])
    """

    axes = None

    @checked
    def __init__(
        self,
        *,
        dim: Width,
        heads: Count,
        axes: Count = 1,
        digits: Count = 5,
        depth: Count = 2,
        dropout: Probability = 0.1,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ArgumentError(
                "heads", expected=f"a divisor of dim ({dim})", got=heads, remedy="Change either."
            )
        self.dim, self.digits = dim, digits
        self.symbols = nn.Parameter(torch.empty(BASE, dim))
        self.places = nn.Parameter(torch.empty(axes * digits, dim))
        self.axis = nn.Parameter(torch.empty(axes, dim)) if axes > 1 else None
        self.summary = nn.Parameter(torch.empty(dim))
        self.blocks = nn.ModuleList(_Block(dim, heads, dropout) for _ in range(depth))
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values: normal, biases zero, norms one."""
        for parameter in (self.symbols, self.places, self.axis, self.summary):
            if parameter is not None:
                nn.init.normal_(parameter, std=STD)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=STD)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        axes = self.places.shape[0] // self.digits
        require_axes(layout, axes, remedy=f"Create the encoding with axes={layout.axes}.")
        holder, remedy = f"a string of {self.digits} digits", "Create it with more digits."
        for axis in range(axes):
            require_inside(layout, BASE**self.digits, holder, remedy=remedy, axis=axis)
        return fuse(x, zero_special(self._vectors(layout), layout), "add")

    def _vectors(self, layout: Layout) -> Float[Tensor, "b L C"]:
        positions = torch.stack([real_positions(layout, n) for n in range(layout.axes)], dim=-1)
        below = positions.floor()
        if layout.start is not None or layout.extent is not None:
            return self.read(below.long())
        fraction = positions - below
        last = BASE**self.digits - 1
        total = torch.zeros_like(positions[..., :1])
        for corner in product((0, 1), repeat=layout.axes):
            up = torch.tensor(corner, device=positions.device)
            weight = torch.where(up == 1, fraction, 1 - fraction).prod(-1, keepdim=True)
            total = total + weight * self.read((below.long() + up).clamp(max=last))
        return total

    def read(self, positions: Int[Tensor, "*dims A"]) -> Float[Tensor, "*dims C"]:
        """The vector of each integer position of at most ``digits`` digits per axis."""
        powers = BASE ** torch.arange(self.digits - 1, -1, -1, device=positions.device)
        number = positions.unsqueeze(-1)
        string = (number.div(powers, rounding_mode="floor") % BASE).flatten(-2)
        written = ((number >= powers) | (powers == 1)).flatten(-2)
        vectors = self.symbols[string] + self.places
        if self.axis is not None:
            vectors = vectors + self.axis.repeat_interleave(self.digits, dim=0)
        vectors = vectors.flatten(0, -3)
        summary = self.summary.expand(vectors.shape[0], 1, -1)
        vectors = torch.cat([vectors, summary], dim=1)
        present = nn.functional.pad(written, (0, 1), value=True).flatten(0, -2).unsqueeze(1)
        length = vectors.shape[1]
        ones = torch.ones(length, length, dtype=torch.bool, device=positions.device)
        # Leading zeros attend to themselves: a fully masked row would be NaN.
        visible = (present & ones.tril()) | torch.eye(
            length, dtype=torch.bool, device=present.device
        )
        for block in self.blocks:
            vectors = block(vectors, visible)
        read: Tensor = self.output(self.norm(vectors[:, -1])).unflatten(0, positions.shape[:-1])
        return read


class _Block(nn.Module):
    """A pre-norm Transformer block as in GPT-2."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.projection, self.joined = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.widen, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "n L C"], visible: Bool[Tensor, "n L L"]
    ) -> Float[Tensor, "n L C"]:
        parts = self.projection(self.first(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        logits = (q * q.shape[-1] ** -0.5) @ k.mT
        attended = logits.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1) @ v
        x = x + self.dropout(self.joined(attended.transpose(1, 2).flatten(2)))
        hidden = nn.functional.gelu(self.widen(self.second(x)), approximate="tanh")
        mixed: Tensor = x + self.dropout(self.narrow(hidden))
        return mixed


ENTRY = Entry(
    factory=Seqpe,
    summary="Encodes the position's digits by a small Transformer.",
    relative=False,
    trainable=True,
    extrapolates="To digits trained in every place, with the paper's auxiliary losses.",
    cost="L·(digits·A + 1)·12·C² per block, once",
    sharing="layers",
)
