"""Transformer-XL's relative sinusoids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Base, Count, EvenWidth, Width
from posenc.encoding import BucketedTerms, Entry, LowRank, ScoreTerm, TokenTableProduct
from posenc.encoding.prepared import reused, reused_later
from posenc.encoding.tensors import BucketIndex, Keys, Offsets, Queries, Scores, StructuredTerms
from posenc.encodings.common.buckets import gather_rows, offset_index
from posenc.encodings.common.precision import geometric_angles, wider
from posenc.grid import Grid
from posenc.runtime import has_values, is_exporting

KEPT = 4096
"""Distances up to which waves are kept from call to call."""

REUSED = 1024
"""Distances up to which projected rows are; of more, kernels take far longer than projections."""

STD = 0.02
"""Standard deviation of all initial values, in Transformer-XL and in XLNet."""


class GlobalBiases(nn.Module):
    """The vectors u (``content``) and w (``position``), ``[H, D]``, used in place of a query.

    Args:
        heads: H.
        head_dim: D.
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.content = nn.Parameter(torch.empty(heads, head_dim))
        self.position = nn.Parameter(torch.empty(heads, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        nn.init.normal_(self.content, std=STD)
        nn.init.normal_(self.position, std=STD)

    def forward(self) -> tuple[Float[Tensor, "H D"], Float[Tensor, "H D"]]:
        """u and w."""
        return self.content, self.position


class TransformerXL(ScoreTerm):
    """Transformer-XL: products with projected sinusoids of the offset, and two trained vectors.

    ``s_ij = scale · ((q_i + u_h) · k_j + (q_i + w_h) · W_h r(i - j))`` (section 3.3; w is their
    v), ``r(x)[t] = sin(x · ω_t)``, ``r(x)[C/2 + t] = cos(x · ω_t)``, ``ω_t = base^(-2t/C)``.

    i - j in tokens, any real and never clipped; r ``[C]``, all sines before all cosines; ``W_h``
    ``[D, C]`` without bias, each layer's own; u and w ``[H, D]``, shared by all layers (not in
    ``xlnet``). The reference code finds the terms by padding and reshaping ("relative shift"); here
    each pair is computed from its own offset, so queries and keys may have any lengths and
    positions. Cached keys carry their layout: that is the segment memory.

    On irregular layouts the second term is of rank C, by the sum of angles. Unlike the paper's,
    attention may be bidirectional.

    Args:
        dim: width C of the model and of r; even.
        heads: H.
        head_dim: width D of a head.
        base: ratio of the fastest frequency to the slowest (its limit).

    Raises:
        ArgumentError: when ``dim`` is odd or anything is out of its domain.

    Reference: Dai et al. 2019, "Transformer-XL: Attentive Language Models Beyond a Fixed-Length
    Context", https://arxiv.org/abs/1901.02860.

    >>> import posenc
    >>> first, second = posenc.create_layers("transformer_xl", layers=2, dim=64, heads=4)
    >>> first.score.biases is second.score.biases, first.score.weight is second.score.weight
    (True, False)
    """

    dim: EvenWidth
    heads: Count
    head_dim: Width
    base: Base = 10000.0

    def __post_init__(self) -> None:
        self.biases = GlobalBiases(self.heads, self.head_dim)
        self.weight = nn.Parameter(torch.empty(self.heads, self.head_dim, self.dim))

    def reset_parameters(self) -> None:
        """Draw the initial values of this layer's own weights."""
        nn.init.normal_(self.weight, std=STD)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        u, w = self.biases()
        content = _column(u, k).unsqueeze(2)
        q = q + w.to(q).unsqueeze(1)
        if grid.shift is None:
            rotated, key_waves = self._factors(q, grid)
            return scale * (content + rotated @ key_waves.mT)
        rows, _ = self._rows(grid, q)
        index = _bucket(grid, rows)(grid.offset)
        return scale * (content + gather_rows(q, rows, index))

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        u, w = self.biases()
        wide = torch.promote_types(q.dtype, torch.float32)
        column = scale * _column(u, k.to(wide))
        if grid.shift is None:
            ones = column.new_ones(1, q.shape[1], q.shape[2], 1)
            factors = self._factors(scale * (q + w.to(q).unsqueeze(1)), grid)
            return LowRank(*factors), LowRank(ones, column.unsqueeze(-1))
        # w's products are a table, and the queries stay as they are. In half precision rows are
        # in float32: rounded ones would change a logit of 30 by 0.1.
        rows, table = self._rows(grid, q.new_empty(0, dtype=wide), scale)
        left = TokenTableProduct(q, rows)
        return (BucketedTerms(_bucket(grid, rows), table=table, left=left, column=column),)

    def _rows(
        self, grid: Grid, like: Tensor, factor: float = 1.0
    ) -> tuple[Float[Tensor, "H N D"], Float[Tensor, "H N"]]:
        """``factor · W r(-Δ)`` at every offset Δ of a regular grid, and w's products with it.

        Offsets ascend; of causal grids, to 0.
        """
        shift = grid.require_shift()
        first, last = shift - (grid.query.length - 1), shift + grid.key.length - 1
        terms = self._reused(first, last, like, factor)
        if terms is None:
            rows = self._products(first, last, grid, factor * self.weight.to(like))
            terms = rows, _column(self.biases()[1], rows)
        return terms

    def _products(
        self, first: int, last: int, grid: Grid, weight: Float[Tensor, "H D C"]
    ) -> Float[Tensor, "H N D"]:
        """Products of a weight with ``r(-Δ)`` for Δ from ``first`` to ``last``.

        The sines' part of ``W r(x)`` is odd and the cosines' even: each distance is projected once.
        """
        # Comparisons of symbolic lengths would bound them in an exported program.
        if is_exporting() or first >= 0 or last <= 0:
            waves = self._waves(-grid.float_offsets(device=weight.device))
            odd, even = _projected(waves, weight)
            return odd + even
        count = max(-first, last) + 1
        last = 0 if grid.causal else last
        if has_values(weight) and weight.device.type == "cpu" and count <= KEPT:
            waves = _kept_waves(count, self.dim, self.base, weight.dtype)
        else:
            waves = self._waves(torch.arange(float(count), device=weight.device))
        return _mirrored(waves, weight, first, last)

    def _reused(
        self, first: int, last: int, like: Tensor, factor: float
    ) -> tuple[Float[Tensor, "H N D"], Float[Tensor, "H N"]] | None:
        """Rows and column at offsets ``first`` to ``last``, stored while weights stay the same."""
        if not has_values(like) or max(-first, last) >= REUSED:
            return None
        count = 1 << max(-first, last).bit_length()  # few kinds while a cache grows

        def compute() -> tuple[Tensor, Tensor]:
            waves = _kept_waves(count, self.dim, self.base, like.dtype)
            rows = _mirrored(waves, factor * self.weight.to(like), 1 - count, count - 1)
            return rows, _column(self.biases()[1], rows)

        stored = reused_later(compute, "rows", count, like.dtype, factor, layers=(self,))
        part = slice(first + count - 1, last + count)
        return None if stored is None else (stored[0][:, part], stored[1][:, part])

    def _factors(
        self, q: Queries, grid: Grid
    ) -> tuple[Float[Tensor, "B H Q C"], Float[Tensor, "b H K C"]]:
        """Two factors of ``q_i · W r(i - j)``, by the sine and cosine of a difference.

        With a = Wᵀq, whose halves belong to sines and cosines, the product with r(i - j) is
        ``(a_s sin i + a_c cos i) · cos j + (a_c sin i - a_s cos i) · sin j``, at every frequency.
        """
        for_sines, for_cosines = (q @ self.weight.to(q)).chunk(2, dim=-1)
        sine, cosine = self._sin_cos(grid.query.positions, q)
        key_sine, key_cosine = self._sin_cos(grid.key.positions, q)
        rotated = (for_sines * sine + for_cosines * cosine, for_cosines * sine - for_sines * cosine)
        key_waves = torch.cat([key_cosine, key_sine], dim=-1)
        return torch.cat(rotated, dim=-1), key_waves.expand(-1, q.shape[1], -1, -1)

    def _sin_cos(self, positions: Float[Tensor, "b L 1"], like: Tensor) -> tuple[Tensor, Tensor]:
        sine, cosine = self._waves(positions[..., 0].unsqueeze(1))
        return sine.to(like), cosine.to(like)

    def _waves(self, x: Float[Tensor, "*dims"]) -> tuple[Tensor, Tensor]:
        return _waves(x, self.dim, self.base)


def _waves(x: Float[Tensor, "*dims"], dim: int, base: float) -> tuple[Tensor, Tensor]:
    """``sin(x · ω)`` and ``cos(x · ω)``, ``[..., C/2]``, in float64 where there is one."""
    angles = geometric_angles(wider(x).unsqueeze(-1), dim // 2, dim, base)
    return angles.sin(), angles.cos()


def _kept_waves(count: int, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The waves of 0 … ``count`` - 1, on the CPU."""

    def compute() -> tuple[Tensor, Tensor]:
        sine, cosine = _waves(torch.arange(float(count)), dim, base)
        return sine.to(dtype), cosine.to(dtype)

    return reused(compute, "waves", count, dim, base, dtype)


def _projected(
    waves: tuple[Float[Tensor, "N F"], Float[Tensor, "N F"]], weight: Float[Tensor, "H D C"]
) -> tuple[Float[Tensor, "H N D"], Float[Tensor, "H N D"]]:
    """The sines' part and the cosines' part of products with the weight."""
    sine, cosine = (wave.to(weight) for wave in waves)
    for_sines, for_cosines = weight.chunk(2, dim=-1)
    return sine @ for_sines.mT, cosine @ for_cosines.mT


def _mirrored(
    waves: tuple[Tensor, Tensor], weight: Float[Tensor, "H D C"], first: int, last: int
) -> Float[Tensor, "H N D"]:
    """``W r(-Δ)`` at the offsets from ``first`` < 0 to ``last``, from waves of the distances."""
    odd, even = _projected(waves, weight)
    return torch.cat([(even + odd)[:, 1 : 1 - first].flip(1), (even - odd)[:, : last + 1]], dim=1)


def _bucket(grid: Grid, rows: Float[Tensor, "H N D"]) -> Callable[[Offsets], BucketIndex]:
    """The row of each offset; of hidden ones perhaps the last."""
    index, last = offset_index(grid), rows.shape[1] - 1
    return lambda offset: index(offset).clamp(max=last)


def _column(u: Float[Tensor, "h D"], x: Float[Tensor, "*B g K D"]) -> Float[Tensor, "*B h K"]:
    """``u · x_j``, by heads that share x; the vectors first, which takes BLAS half the time."""
    groups = u.to(x).reshape(x.shape[-3], -1, u.shape[-1])
    return (groups @ x.mT).flatten(-3, -2)


def _share(layers: Sequence[TransformerXL]) -> None:
    for layer in layers[1:]:
        layer.biases = layers[0].biases


ENTRY = Entry(
    factory=TransformerXL,
    summary="Adds products with projected sinusoids of the offset, and two trained vectors.",
    relative=True,
    trainable=True,
    extrapolates="Degrades past the training length: farther sinusoids are new to W.",
    cost="Q·K·H beside Q·(Q + K)·D·H; Q·K·C·H on irregular layouts",
    sharing=_share,
)
