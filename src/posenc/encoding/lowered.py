"""Structured forms that parts of an encoding are lowered to, for fast backends.

Their tensors may require gradients. Backends compute those of every tensor of a form, such as T5's
``table``, and autograd passes them on to the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenTableProduct:
    """A summand that depends on one token and one bucket: ``tokens[b, h, l] · rows[h, n]``.

    Kept as its two factors, so that no one has to hold an L×N matrix.
    """

    tokens: Float[Tensor, "b H L E"]
    rows: Float[Tensor, "h N E"]


@dataclass(frozen=True, eq=False)
class BucketedTerms:
    """One group of the formula that most relative methods share. With n = bucket(offset(i, j)):

    ``s_ij += table[h, n] + left[b, h, i, n] + right[b, h, j, n] + row[b, h, i] + column[b, h, j]``
    and ``o_i += Σ_j p_ij · value[h, n]``.

    Args:
        bucket: maps offsets Δ = key − query, ``[..., A]`` real, to buckets ``[...]`` int64 in
            0 … N-1. A pure function of the offset alone.
        table: ``[H, N]``.
        left: tokens are the queries (``[B, H, Q, E]``); the attention scale is already in it.
        right: tokens are the keys (``[B, H, K, E]``); the attention scale is already in it.
        row: ``[B|1, H, Q]``; column: ``[B|1, H, K]``.
        value: ``[H|1, N, D]``.
        max_distance: beyond this distance (on one axis) the bucket no longer changes, on either
            side. None: no such distance is known.
    """

    bucket: Callable[[Float[Tensor, "*dims A"]], Int[Tensor, "*dims"]]
    table: Float[Tensor, "H N"] | None = None
    left: TokenTableProduct | None = None
    right: TokenTableProduct | None = None
    row: Float[Tensor, "b H Q"] | None = None
    column: Float[Tensor, "b H K"] | None = None
    value: Float[Tensor, "h N D"] | None = None
    max_distance: int | None = None


@dataclass(frozen=True, eq=False)
class LowRank:
    """``s_ij += query[b, h, i] · key[b, h, j]``: extra columns on the queries and keys.

    Args:
        query: ``[B|1, H, Q, R]``, the attention scale already in it; key: ``[B|1, H, K, R]``.
    """

    query: Float[Tensor, "b H Q R"]
    key: Float[Tensor, "b H K R"]


StructuredScore = BucketedTerms | LowRank


@dataclass(frozen=True, eq=False)
class DistanceFunction:
    """``s_ij += slope[h, m] · u + intercept[h, m]``, ``u = distance(|Δ|) · factor[b, i]``.

    A piecewise-linear function of u, which has to be continuous; m is the number of knots that are
    at most u.

    Args:
        distance: maps distances ``[...]``, at least 0, to numbers of at least 0 that never fall.
        factor: ``[B|1, Q]``, positive.
        knots: ``[M - 1]``, ascending. They get no gradient.
        slope, intercept: ``[H, M]``.
    """

    distance: Callable[[Float[Tensor, "*dims"]], Float[Tensor, "*dims"]]
    factor: Float[Tensor, "b Q"]
    knots: Float[Tensor, " N"]
    slope: Float[Tensor, "H M"]
    intercept: Float[Tensor, "H M"]


@dataclass(frozen=True, eq=False)
class GateCounts:
    """``s_ij += (1 - r) · y[b, h, i, ⌊c⌋] + r · y[b, h, i, ⌊c⌋ + 1]`` with ``r = c - ⌊c⌋``.

    ``c = min(Σ_{t=j..i} σ(scale · q_i·k_t), N - 1)`` over the keys that the query sees, by order.

    Args:
        product: y, tokens ``[B, H, Q, E]`` times rows ``[H|1, N, E]``; N is 2 or more.
    """

    product: TokenTableProduct


@dataclass(frozen=True, eq=False)
class LogGateSums:
    """``s_ij += slope[h] · Σ_{t=j+1..i} log σ(query[b, h, i] · key[b, h, t])``.

    The sum is over the keys that the query sees, by order.

    Args:
        query: ``[B|1, H, Q, E]``; key: ``[B|1, H, K, E]``; any factor of their product is in one.
        slope: ``[H]``, at least 0, in logits. It gets no gradient.
    """

    query: Float[Tensor, "b H Q E"]
    key: Float[Tensor, "b H K E"]
    slope: Float[Tensor, " H"]


@dataclass(frozen=True, eq=False)
class StickWeights:
    """Weights ``σ(s_ij) · Π_{j<t<i} (1 - σ(s_it))`` instead of the softmax, over keys before i.

    Args:
        rest_to_self: whether what is left goes to the query's own key.
    """

    rest_to_self: bool


@dataclass(frozen=True, eq=False)
class HeadMixing:
    """``s_ij += B_ij + output · leaky_relu(input · [A_ij, B_ij] + input_bias) + output_bias``.

    A: the logits ``scale · q_i·k_j`` of all heads; B: biases of all heads, by offset.

    Args:
        bias: maps offsets ``[W]`` to B ``[H, W]``.
        input: ``[U, 2H]``; input_bias: ``[U]``; output: ``[H, U]``; output_bias: ``[H]``.
    """

    bias: Callable[[Float[Tensor, " W"]], Float[Tensor, "H W"]]
    input: Float[Tensor, "U I"]
    input_bias: Float[Tensor, " U"]
    output: Float[Tensor, "H U"]
    output_bias: Float[Tensor, " H"]


@dataclass(frozen=True, eq=False)
class BlockTransforms:
    """Products with queries that are transformed by each block of 64 keys between query and key.

    ``s_ij = diagonal[b, h, i, j - 64 n]`` in the block n of the query's key of offset 0, and
    ``s_ij = q_i · M_{n-1} … M_{m+1} · k_j`` for those of an earlier block m. The transforms are
    reflections: ``s_ij = scale · q_i · H_i … H_{j+1} · k_j`` with ``H_t = 1 - β_t w_t w_tᵀ``.

    Args:
        query: ``[B, H, Q, D]``; key: ``[B, H, K, D]``.
        first: index of the first query's key of offset 0; those of the next queries follow.
        scale: of the products.
        reflections: computes w ``[b, H, K, D]`` and β ``[b, H, K]``.
    """

    BLOCK: ClassVar[int] = 64

    query: Float[Tensor, "B H Q D"]
    key: Float[Tensor, "B H K D"]
    first: int
    scale: float
    reflections: Callable[[], tuple[Tensor, Tensor]]

    def compute(
        self,
    ) -> tuple[
        Float[Tensor, "B H Q E"],
        Float[Tensor, "B H K E"],
        Float[Tensor, "B H N E E"],
        Float[Tensor, "B H Q T"],
    ]:
        """q, k, M and the diagonal, by products of reflections in their compact form.

        E is a multiple of 16.
        """
        size, q, k = self.BLOCK, self.query, self.key
        directions, strengths = (x.expand(len(q), *x.shape[1:]) for x in self.reflections())
        wide = torch.promote_types(q.dtype, torch.float32)
        queries, keys = q.shape[2], k.shape[2]
        more = (-q.shape[3] % 16, -keys % size)
        before = min(max(0, self.first), keys)
        here = slice(before, before + queries)

        def blocks(x: Tensor, before: int = 0) -> Tensor:
            behind = keys + more[1] - before - x.shape[2]
            x = torch.nn.functional.pad(x.to(wide), (0, more[0], before, behind))
            return x.view(*x.shape[:2], -1, size, x.shape[3])  # [B, H, blocks, size, width]

        w, key_blocks, query = blocks(directions), blocks(k), blocks(q * self.scale, before)
        beta = torch.nn.functional.pad(strengths.to(wide), (0, more[1])).view(w.shape[:-1])
        along = (w @ w.mT * beta.unsqueeze(-1)).tril(-1)
        weighted = w * beta.unsqueeze(-1)
        onto = (weighted @ key_blocks.mT).tril(-1)
        lost, mixed = torch.linalg.solve_triangular(
            along, torch.cat([onto, weighted], dim=-1), upper=False, unitriangular=True
        ).split([size, w.shape[-1]], dim=-1)
        read = (query @ w.mT).tril()
        diagonal = query @ key_blocks.mT - read @ lost
        query, key_blocks = query - read @ mixed, key_blocks - lost.mT @ w
        return (
            query.flatten(2, 3)[:, :, here],
            key_blocks.flatten(2, 3)[:, :, :keys],
            torch.eye(w.shape[-1], dtype=wide, device=w.device) - w.mT @ mixed,
            diagonal.flatten(2, 3)[:, :, here],
        )


FusedScore = (
    BlockTransforms | DistanceFunction | GateCounts | HeadMixing | LogGateSums | StickWeights
)
"""Forms of single methods outside the structured one, for compiled kernels."""
