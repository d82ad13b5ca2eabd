"""Complex-order embeddings: token vectors rotated by position."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from posenc.arguments import Base, EvenWidth, Length
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.checks import require_tokens
from posenc.encodings.common.precision import angles_at, at_least_single, wider
from posenc.encodings.common.table import real_positions
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.runtime import has_values, widest

Shared = Literal["words", "dimensions", "none"]

GOLDEN = 0.6180339887498949


class ComplexOrder(EmbeddingEncoding):
    """Complex-order embeddings: each feature is a complex wave over positions.

    ``f(j, p) = x_j · exp(i (ω_j p + θ_j))``, so ``f(j, p + n) = f(j, p) · exp(i ω_j n)``.

    ``p`` is the position ``[B|1, L]`` in tokens, any real; ``x_j`` the vector of word j, T complex
    numbers, whose moduli are the paper's amplitudes; ``ω`` in radians a token and ``θ`` in radians,
    trained: ``[T]`` shared by all words, ``[V]`` shared by all dimensions, or ``[V, T]``. For equal
    ω the Hermitian product of two vectors depends on the difference of their positions only.

    A complex ``x`` ``[B, L, T]`` is rotated directly. A real one ``[B, L, C]``, C = 2T, holds T
    real parts, then T imaginary parts: the dot product of such vectors is the real part of the
    Hermitian product of the complex ones (see ``posenc.attention.extra.complex`` for attention of
    complex queries and keys). The parameter is the difference of ω from its initial values, which
    are recomputed and so not rounded in narrow dtypes.

    Differs from the paper in that amplitudes are part of ``x`` and may have phases.

    Args:
        dim: C, real numbers per token; even.
        shared: ``"words"``: ω by dimension, initially ``base^(-2⌊t/2⌋/T)`` as in the official code;
            ``"dimensions"``: ω by word, initially log-spaced over ``base^0 … base^-1``;
            ``"none"``: ω by word and dimension, initially as ``"words"``.
        vocabulary: V, required for ``"dimensions"`` and ``"none"``, which read the token ids.
        phase: train θ, initially 0; without it θ is 0.
        base: ratio of the fastest initial frequency to the slowest.

    Raises:
        ArgumentError: when ``dim``, ``base`` or ``vocabulary`` is out of its domain or missing; in
            ``forward``, for an ``x`` of another width, or ids that are missing or not below V.
        UnknownNameError: for another ``shared``.

    Reference: Wang et al. 2019, "Encoding word order in complex embeddings",
    https://arxiv.org/abs/1912.12333.

    >>> import posenc, torch
    >>> encoding = posenc.create("complex_order", dim=2)
    >>> rotated = encoding.embed(torch.ones(1, 2, 1) + 0j, posenc.Layout.sequence(2))
    >>> [round(angle, 3) for angle in rotated.angle().flatten().tolist()]
    [0.0, 1.0]
    """

    takes_complex = True

    dim: EvenWidth
    shared: Shared = "words"
    vocabulary: Length | None = None
    phase: bool = False
    base: Base = 10000.0

    def __post_init__(self) -> None:
        rows = 1 if self.shared == "words" else self.vocabulary
        if rows is None:
            raise ArgumentError(
                "vocabulary",
                expected=f"1 or more, which shared={self.shared!r} needs",
                got=None,
                remedy="Give the number of token ids, or use shared='words'.",
            )
        self.width = self.dim // 2
        columns = 1 if self.shared == "dimensions" else self.width
        self.departure = nn.Parameter(torch.empty(rows, columns))
        self.phases = nn.Parameter(torch.empty(rows, columns)) if self.phase else None

    def reset_parameters(self) -> None:
        """Set the initial frequencies and zero phases."""
        nn.init.zeros_(self.departure)
        if self.phases is not None:
            nn.init.zeros_(self.phases)

    def forward(
        self,
        x: Features | Complex[Tensor, "B L T"],
        layout: Layout,
        *,
        tokens: TokenIds | None = None,
    ) -> Features | Complex[Tensor, "B L T"]:
        angles = self.angles(layout, tokens)
        cosine, sine = angles.cos(), angles.sin()
        if x.is_complex():
            return (x * torch.complex(cosine, sine)).to(x.dtype)
        real, imaginary = at_least_single(x).chunk(2, dim=-1)
        rotated = [real * cosine - imaginary * sine, real * sine + imaginary * cosine]
        return torch.cat(rotated, dim=-1).to(x.dtype)

    def angles(self, layout: Layout, tokens: TokenIds | None = None) -> Float[Tensor, "b L T"]:
        """``ω p`` less whole turns ``+ θ`` in radians (``[..., 1]`` where dimensions share it)."""
        positions = real_positions(layout).unsqueeze(-1)
        wide = torch.promote_types(positions.dtype, self.departure.dtype)
        positions = positions.to(wide)
        words = self._words(tokens)
        departure = self.departure[words]
        frequencies = self.initial(words, like=wider(positions)) + wider(departure)
        angles = angles_at(positions, frequencies)
        return angles if self.phases is None else angles + self.phases[words].to(wide)

    def _words(self, tokens: TokenIds | None) -> Int[Tensor, "b L"]:
        """Row index of each token in the tables."""
        device = self.departure.device
        if self.shared == "words":
            return torch.zeros(1, 1, dtype=torch.int64, device=device)
        remedy = "Pass tokens=…, or create it with shared='words'."
        tokens = require_tokens(tokens, f"shared={self.shared!r}", remedy)
        count = len(self.departure)
        if has_values(tokens) and device.type == "cpu" and tokens.numel():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= count:
                raise ArgumentError(
                    "tokens",
                    expected=f"ids from 0 to {count - 1}, the vocabulary",
                    got=f"{low} to {high}",
                    remedy="Create the encoding with a larger vocabulary.",
                )
        return tokens

    def initial(self, words: Int[Tensor, "b L"], *, like: Tensor) -> Float[Tensor, "b L T"]:
        """The initial frequencies of words, computed in float64 where the device has it."""
        if self.shared == "dimensions":
            exponent = (words.unsqueeze(-1).to(widest(like.device)) * GOLDEN).frac()
        else:
            feature = torch.arange(self.width, device=like.device)
            exponent = 2 * (feature // 2).to(widest(like.device)) / self.width
        return torch.pow(self.base, -exponent).to(like.dtype)


ENTRY = Entry(
    factory=ComplexOrder,
    summary="Rotates each complex feature by a trained frequency times the position.",
    relative=False,
    trainable=True,
    extrapolates="Any position exists; breaks past the training length like sinusoidal.",
    cost="L·C once",
    sharing="layers",
)
