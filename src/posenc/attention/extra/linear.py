"""Linear attention: time and memory linear in the length, with positions that rotate features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.attention.call import Call, require_fit, validate
from posenc.attention.prefix_sums import Keys, LinearState, Queries, changed, weighted_means
from posenc.encoding import Encoding, repeat_heads
from posenc.errors import ArgumentError, UnknownNameError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.layout.padding import zero_invalid
from posenc.runtime import without_autocast

Features = Literal["elu", "softmax"]

CHUNK = 128
"""Tokens a chunk. Of 32, 64, 128, 256 and 512 the fastest forward and backward at 4096 and 16384
tokens with heads of 64, on one core."""


@dataclass(frozen=True)
class FeatureMap:
    """Feature map φ ≥ 0 of linear attention, for queries and keys before their product.

    Args:
        query: φ(q), up to a factor a query, which cancels.
        key: φ(k) as features and the logarithm of a factor a key, ``[B, G, K, 1]``, which does
            not cancel; None where there is none.
    """

    query: Callable[[Float[Tensor, "B H Q D"]], Float[Tensor, "B H Q D"]]
    key: Callable[
        [Float[Tensor, "B G K D"]], tuple[Float[Tensor, "B G K D"], Float[Tensor, "B G K 1"] | None]
    ]


def _elu(x: Tensor) -> Tensor:
    """elu(x) + 1, without the cancellation for x far below 0."""
    return x.clamp(max=0.0).exp() + x.clamp(min=0.0)


def _exponential(k: Tensor) -> tuple[Tensor, Tensor]:
    """exp(k), its largest feature set aside."""
    level = k.detach().amax(-1, keepdim=True)
    return (k - level).exp(), level


FEATURES: dict[str, FeatureMap] = {
    "elu": FeatureMap(_elu, lambda k: (_elu(k), None)),
    "softmax": FeatureMap(lambda q: q.softmax(-1), _exponential),
}
"""``"elu"``: φ = elu + 1 (Katharopoulos et al. 2020). ``"softmax"``: φ(q) = softmax(q) over the
features, φ(k) = exp(k) (Shen et al. 2021, in the causal form that RoFormer names)."""


def attend_linear(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    grid: Grid,
    encoding: Encoding,
    *,
    features: Features = "elu",
    chunk: int = CHUNK,
    state: LinearState | None = None,
) -> Float[Tensor, "B H Q E"]:
    """Attention whose weights are products of features, with ``encoding``'s query_key part.

    ``o_i = Σ_j f(φ(q_i))·f(φ(k_j)) v_j / Σ_j φ(q_i)·φ(k_j)`` over the keys each query may see: the
    encoding transforms φ(q) and φ(k) in the numerator only, so that the denominator cannot vanish
    (as in RoFormer). Weights of the numerator may be negative, and need not sum to 1.

    Time (Q + K)·(D + chunk)·E·H and memory linear in Q + K, gradients included. Computed in
    float32 or better.

    Args:
        q: ``[B, H, Q, D]``, not yet transformed; k: ``[B, G, K, D]``; v: ``[B, G, K, E]``. H is a
            multiple of G.
        grid: where queries and keys are, and who sees whom; documents, padding and any order are
            fine, windows are not. Tokens marked invalid may hold anything, NaN included.
        encoding: one without score and value parts.
        features: φ, see ``FEATURES``.
        chunk: tokens whose products are written out at a time.
        state: the past, to which ``grid`` (the same tokens on both sides) is appended. Documents
            that continue must be the last of a chunk, that with the largest number.

    Returns:
        ``[B, H, Q, E]`` in ``v``'s dtype. A row that sees nothing is zero.

    Raises:
        ArgumentError: on arguments that do not fit together, parts or windows that linear
            attention has no place for, or a state where it makes no sense.
        UnknownNameError: for other ``features``.
    """
    validate(Call(q, k, v, grid, encoding))
    _require_linear(grid, encoding, chunk, state)
    if features not in FEATURES:
        raise UnknownNameError.of("feature map", features, FEATURES)
    wide = torch.promote_types(q.dtype, torch.float32)
    q = zero_invalid(q, grid.query, dim=2)
    k, v = (zero_invalid(x, grid.key, dim=2) for x in (k, v))
    with without_autocast(q.device):
        plain_q = FEATURES[features].query(q.to(wide))
        plain_k, level = FEATURES[features].key(k.to(wide))
        rotated_q, rotated_k = plain_q, plain_k
        if encoding.query_key is not None:
            rotated_q, rotated_k = encoding.query_key(plain_q, plain_k, grid)
        heads = q.shape[1]
        keys = changed(
            Keys(plain_k, rotated_k, v.to(wide), level), lambda x: repeat_heads(x, heads)
        )
        queries = Queries(plain_q, rotated_q)
        output = weighted_means(queries, keys, grid, chunk, state or LinearState())
    return output.to(v.dtype)


def _require_linear(grid: Grid, encoding: Encoding, chunk: int, state: LinearState | None) -> None:
    for site in ("score", "value"):
        if getattr(encoding, site) is not None:
            raise ArgumentError(
                "encoding",
                expected="no score or value part, for which linear attention has no place",
                got=f"a {site} part, {type(getattr(encoding, site)).__name__}",
                remedy="Use attend, or an encoding of the embedding or query_key site.",
            )
    if grid.window is not None or grid.intervals is not None:
        raise ArgumentError(
            "grid",
            expected="no window and no intervals",
            got=grid,
            remedy="Use attend: what has been summed cannot be taken out again.",
        )
    if chunk < 1:
        raise ArgumentError("chunk", expected="1 or more", got=chunk, remedy="Leave the default.")
    if state is None:
        return
    if not grid.causal or grid.query is not grid.key:
        raise ArgumentError(
            "state",
            expected="a causal grid with the new tokens on both sides",
            got=f"causal={grid.causal}, {grid.query.length} queries and {grid.key.length} keys",
            remedy="Use Grid.of(layout, causal=True); the past is in the state.",
        )
    if encoding.query_key is not None and not encoding.query_key.tokenwise:
        raise ArgumentError(
            "state",
            expected="an encoding that treats each token by itself",
            got=type(encoding.query_key).__name__,
            remedy="Give the whole sequence at once: keys that were summed cannot change.",
        )


class LinearAttention(nn.Module):
    """Multi-head linear attention around ``attend_linear``.

    Args:
        dim: width C of the model.
        heads: query heads H.
        kv_heads: key/value heads G, of which H must be a multiple; by default as many as there are
            queries: H, or fewer where heads share them (RoPE++).
        head_dim: width D of a head; ``dim / heads`` by default.
        encoding: its query_key part is used here; it may have no score or value part.
        causal: a token sees the past only.
        features: φ, see ``FEATURES``.
        bias: the projections have biases.

    Raises:
        ArgumentError: when the heads do not divide, or the encoding does not fit them.
    """

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        encoding: Encoding,
        causal: bool = False,
        features: Features = "elu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        queries = encoding.queries(heads)
        kv_heads = queries if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads or (head_dim is None and dim % heads):
            raise ArgumentError(
                "heads",
                expected="a multiple of kv_heads and, without head_dim, a divisor of dim",
                got=f"{heads} heads, {kv_heads} kv_heads, dim={dim}",
                remedy="Change heads or kv_heads, or give head_dim.",
            )
        width = dim // heads if head_dim is None else head_dim
        require_fit(encoding, heads=heads, head_dim=width, dim=dim, causal=causal)
        self.heads, self.queries, self.kv_heads, self.causal = heads, queries, kv_heads, causal
        self.features: Features = features
        self.query = nn.Linear(dim, queries * width, bias=bias)
        self.key = nn.Linear(dim, kv_heads * width, bias=bias)
        self.value = nn.Linear(dim, kv_heads * width, bias=bias)
        self.output = nn.Linear(heads * width, dim, bias=bias)
        self.encoding = encoding

    def forward(
        self, x: Float[Tensor, "B L C"], layout: Layout, *, state: LinearState | None = None
    ) -> Float[Tensor, "B L C"]:
        """Attend from ``x`` to itself, and to what is in the state, which it then joins."""
        x = zero_invalid(x, layout)
        q, k, v = (
            project(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for project, heads in (
                (self.query, self.queries),
                (self.key, self.kv_heads),
                (self.value, self.kv_heads),
            )
        )
        if self.queries != self.heads:
            q = q.repeat_interleave(self.heads // self.queries, dim=1)
        grid = Grid.of(layout, causal=self.causal)
        output = attend_linear(q, k, v, grid, self.encoding, features=self.features, state=state)
        merged: Tensor = self.output(output.transpose(1, 2).flatten(2))
        return merged
