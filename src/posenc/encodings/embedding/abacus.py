"""Positions of digits within numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from posenc.arguments import Count, Natural, Width
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.prepared import constant
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.checks import require_tokens
from posenc.encodings.common.table import fuse
from posenc.errors import ArgumentError, LengthError
from posenc.layout import Layout
from posenc.layout.padding import hidden_tokens
from posenc.runtime import has_values

ASCII_DIGITS = tuple(range(48, 58))


class Abacus(EmbeddingEncoding):
    """Abacus embeddings: a trained vector for a digit's place in its number.

    ``x + E[n + k]`` for the n-th digit of a number (n from 1), ``x + E[0]`` for any other token;
    ``k`` is drawn from 0 … offset for each batch in training, and 0 in evaluation. ``E`` is
    ``[1 + places + offset, C]``.

    A number is a run of consecutive digits in one document; written with the least significant
    digit first, digits of the same place have the same vector. Reads token ids, not positions. The
    cache keeps the last ``places`` tokens. Differs from the authors' code in nothing (normal
    initial values).

    Args:
        dim: width C.
        digits: token ids of the digits; the ASCII codes by default.
        places: largest number of digits.
        offset: largest k; trains places beyond the length of training numbers.

    Raises:
        ArgumentError: when an option is out of its domain; in ``forward``, without ``tokens``.
        LengthError: in ``forward``, for a number of more digits than ``places``.

    Reference: McLeish et al. 2024, "Transformers Can Do Arithmetic with the Right Embeddings",
    https://arxiv.org/abs/2405.17399.

    >>> import posenc, torch
    >>> encoding = posenc.create("abacus", dim=2)
    >>> tokens = torch.tensor([list(b"21+43")])
    >>> x = encoding.embed(torch.zeros(1, 5, 2), posenc.Layout.sequence(5), tokens=tokens)
    >>> bool((x[0, :2] == x[0, 3:]).all())
    True
    """

    pairwise = False

    dim: Width
    digits: Sequence[int] = ASCII_DIGITS
    places: Count = 128
    offset: Natural = 99

    def __post_init__(self) -> None:
        if not self.digits or min(self.digits) < 0:
            raise ArgumentError(
                "digits",
                expected="token ids, 0 or more",
                got=list(self.digits),
                remedy="Pass the tokenizer's ids of 0 to 9.",
            )
        self.lookback = self.places
        self.table = nn.Parameter(torch.empty(1 + self.places + self.offset, self.dim))

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        nn.init.normal_(self.table)

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        tokens = require_tokens(tokens, "abacus", remedy="Pass tokens=… to embed.")
        place = self.place(tokens, layout)
        if has_values(place):
            longest = int(place.max()) if place.numel() else 0
            if longest > self.places:
                raise LengthError(
                    "tokens",
                    expected=f"numbers of up to {self.places} digits",
                    got=f"one of at least {longest}",
                    remedy="Create the encoding with more places.",
                )
        if self.training:
            shift = torch.randint(self.offset + 1, (1,), device=place.device)
            place = torch.where(place > 0, place + shift, place)
        return fuse(x, self.table[place], "add")

    def place(self, tokens: TokenIds, layout: Layout) -> TokenIds:
        """Each digit's place in its number, from 1; 0 for all other tokens."""
        digits = constant(self.digits, like=tokens)
        digit = (tokens.unsqueeze(-1) == digits).any(-1)
        hidden = hidden_tokens(layout)
        digit = digit if hidden is None else digit & ~hidden
        column = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        begins = digit & ~_continues(digit, layout)
        first = torch.where(begins, column, 0).cummax(1).values
        return torch.where(digit, column - first + 1, 0)


def _continues(digit: Bool[Tensor, "B L"], layout: Layout) -> Bool[Tensor, "B L"]:
    """True for tokens directly after a digit of the same document."""
    # The first token is compared with itself, which fails the test of order.
    before = (torch.arange(layout.length, device=layout.device) - 1).clamp(min=0)
    after = digit[:, before] & (layout.order - layout.order[:, before] == 1)
    if layout.document is not None:
        after = after & (layout.document == layout.document[:, before])
    return after


ENTRY = Entry(
    factory=Abacus,
    summary="Adds a trained vector for each digit's place in its number.",
    relative=True,
    trainable=True,
    extrapolates="To numbers longer than trained by up to the random offset.",
    cost="L·C once",
    sample={"digits": (0, 1, 3)},
    sharing="layers",
)
