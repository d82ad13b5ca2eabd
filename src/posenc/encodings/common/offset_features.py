"""Products of queries with projected features of the offset, and with two trained vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.encoding import BucketedTerms, LowRank, ScoreTerm, TokenTableProduct
from posenc.encoding.prepared import reused, reused_later
from posenc.encoding.tensors import BucketIndex, Keys, Offsets, Queries, Scores, StructuredTerms
from posenc.encodings.common.buckets import gather_rows, offset_index
from posenc.grid import Grid
from posenc.runtime import has_values, is_exporting

KEPT = 4096
"""Distances up to which features are kept from call to call."""

REUSED = 1024
"""Distances up to which projected rows are; of more, kernels take far longer than projections."""

Features = tuple[Float[Tensor, "*N F"], Float[Tensor, "*N F"]]
"""Odd and even functions of a number."""


class GlobalBiases(nn.Module):
    """The vectors u (``content``) and w (``position``), ``[H, D]``, used in place of a query.

    Args:
        heads: H.
        head_dim: D.
        std: standard deviation of the initial values.
    """

    def __init__(self, heads: int, head_dim: int, *, std: float) -> None:
        super().__init__()
        self.std = std
        self.content = nn.Parameter(torch.empty(heads, head_dim))
        self.position = nn.Parameter(torch.empty(heads, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        nn.init.normal_(self.content, std=self.std)
        nn.init.normal_(self.position, std=self.std)

    def forward(self) -> tuple[Float[Tensor, "H D"], Float[Tensor, "H D"]]:
        """u and w."""
        return self.content, self.position


class OffsetFeatures(ScoreTerm, ABC):
    """``s_ij += scale · (u_h · k_j + (q_i + w_h) · (W^o_h o(i - j) + W^e_h e(i - j)))``.

    o and e ``[F]`` are odd and even functions of the offset, so that each distance is projected
    once; u and w ``[H, D]`` are trained vectors; ``W^o`` and ``W^e`` ``[H, D, F]`` weights.
    """

    @abstractmethod
    def odd_even(self, x: Float[Tensor, "*N"]) -> Features:
        """o(x) and e(x), in float64 where there is one."""

    @abstractmethod
    def constants(self) -> Hashable:
        """Settings of the functions."""

    @abstractmethod
    def halves(self) -> tuple[Float[Tensor, "H D F"], Float[Tensor, "H D F"]]:
        """``W^o`` and ``W^e``."""

    @abstractmethod
    def vectors(self, scale: float) -> tuple[Float[Tensor, "H D"], Float[Tensor, "H D"]]:
        """u and w where logits are multiplied by ``scale``."""

    @abstractmethod
    def factors(
        self, q: Queries, grid: Grid
    ) -> tuple[Float[Tensor, "B H Q R"], Float[Tensor, "b H K R"]] | None:
        """Two factors of ``q_i · (W^o o(i - j) + W^e e(i - j))``; None where there are none."""

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        u, w = self.vectors(scale)
        content = _column(u, k).unsqueeze(2)
        q = q + w.to(q).unsqueeze(1)
        if grid.shift is None:
            return scale * (content + self._by_pairs(q, grid))
        rows, _ = self._rows(grid, q)
        index = _bucket(grid, rows)(grid.offset)
        return scale * (content + gather_rows(q, rows, index))

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        u, w = self.vectors(scale)
        wide = torch.promote_types(q.dtype, torch.float32)
        column = scale * _column(u, k.to(wide))
        if grid.shift is None:
            factors = self.factors(scale * (q + w.to(q).unsqueeze(1)), grid)
            if factors is None:
                return None
            ones = column.new_ones(1, q.shape[1], q.shape[2], 1)
            return LowRank(*factors), LowRank(ones, column.unsqueeze(-1))
        # w's products are a table, and the queries stay as they are. In half precision rows are
        # in float32: rounded ones would change a logit of 30 by 0.1.
        rows, table = self._rows(grid, q.new_empty(0, dtype=wide), scale)
        left = TokenTableProduct(q, rows)
        return (BucketedTerms(_bucket(grid, rows), table=table, left=left, column=column),)

    def _by_pairs(self, q: Queries, grid: Grid) -> Scores:
        """Products of an irregular grid, by factors or else pair by pair."""
        factors = self.factors(q, grid)
        if factors is not None:
            return factors[0] @ factors[1].mT
        projected = torch.cat([q @ half.to(q) for half in self.halves()], dim=-1)
        features = torch.cat(self.odd_even(-grid.offset[..., 0]), dim=-1)
        return torch.einsum("bhqf,bqkf->bhqk", projected, features.to(q))

    def _rows(
        self, grid: Grid, like: Tensor, factor: float = 1.0
    ) -> tuple[Float[Tensor, "H N D"], Float[Tensor, "H N"]]:
        """Projected features at every offset Δ of a regular grid, and w's products with them.

        Offsets ascend; of causal grids, to 0. Rows are multiplied by ``factor``.
        """
        shift = grid.require_shift()
        first, last = shift - (grid.query.length - 1), shift + grid.key.length - 1
        terms = self._reused(first, last, like, factor)
        if terms is None:
            rows = self._products(first, last, grid, like, factor)
            terms = rows, _column(self.vectors(factor)[1], rows)
        return terms

    def _products(
        self, first: int, last: int, grid: Grid, like: Tensor, factor: float
    ) -> Float[Tensor, "H N D"]:
        """Projected features at -Δ for Δ from ``first`` to ``last``."""
        halves = self._scaled_halves(like, factor)
        # Comparisons of symbolic lengths would bound them in an exported program.
        if is_exporting() or first >= 0 or last <= 0:
            features = self.odd_even(-grid.float_offsets(device=like.device))
            odd, even = _projected(features, halves)
            return odd + even
        count = max(-first, last) + 1
        last = 0 if grid.causal else last
        if has_values(like) and like.device.type == "cpu" and count <= KEPT:
            features = self._kept(count, like.dtype)
        else:
            features = self.odd_even(torch.arange(float(count), device=like.device))
        return _mirrored(features, halves, first, last)

    def _reused(
        self, first: int, last: int, like: Tensor, factor: float
    ) -> tuple[Float[Tensor, "H N D"], Float[Tensor, "H N"]] | None:
        """Rows and column at offsets ``first`` to ``last``, stored while weights stay the same."""
        if not has_values(like) or max(-first, last) >= REUSED:
            return None
        count = 1 << max(-first, last).bit_length()  # few kinds while a cache grows

        def compute() -> tuple[Tensor, Tensor]:
            features = self._kept(count, like.dtype)
            halves = self._scaled_halves(like, factor)
            rows = _mirrored(features, halves, 1 - count, count - 1)
            return rows, _column(self.vectors(factor)[1], rows)

        stored = reused_later(compute, "rows", count, like.dtype, factor, layers=(self,))
        part = slice(first + count - 1, last + count)
        return None if stored is None else (stored[0][:, part], stored[1][:, part])

    def _kept(self, count: int, dtype: torch.dtype) -> Features:
        """The features of 0 … ``count`` - 1, on the CPU."""

        def compute() -> Features:
            odd, even = self.odd_even(torch.arange(float(count)))
            return odd.to(dtype), even.to(dtype)

        return reused(compute, type(self), self.constants(), count, dtype)

    def _scaled_halves(self, like: Tensor, factor: float) -> Features:
        odd, even = self.halves()
        return factor * odd.to(like), factor * even.to(like)


def _projected(features: Features, halves: Features) -> Features:
    """The odd part and the even part of the products, each ``[H, N, D]``."""
    odd, even = (part.to(half) @ half.mT for part, half in zip(features, halves, strict=True))
    return odd, even


def _mirrored(
    features: Features, halves: Features, first: int, last: int
) -> Float[Tensor, "H N D"]:
    """Products at -Δ for Δ from ``first`` < 0 to ``last``, of the features of the distances."""
    odd, even = _projected(features, halves)
    return torch.cat([(even + odd)[:, 1 : 1 - first].flip(1), (even - odd)[:, : last + 1]], dim=1)


def _bucket(grid: Grid, rows: Float[Tensor, "H N D"]) -> Callable[[Offsets], BucketIndex]:
    """The row of each offset; of hidden ones perhaps the last."""
    index, last = offset_index(grid), rows.shape[1] - 1
    return lambda offset: index(offset).clamp(max=last)


def _column(u: Float[Tensor, "h D"], x: Float[Tensor, "*B g K D"]) -> Float[Tensor, "*B h K"]:
    """``u · x_j``, by heads that share x; the vectors first, which takes BLAS half the time."""
    groups = u.to(x).reshape(x.shape[-3], -1, u.shape[-1])
    return (groups @ x.mT).flatten(-3, -2)
