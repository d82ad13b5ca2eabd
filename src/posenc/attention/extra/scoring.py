"""Scoring a query against keys, and turning scores into attention weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from posenc.attention.softmax import masked_softmax
from posenc.errors import ArgumentError


def within_lengths(lengths: Int[Tensor, "*dims"], keys: int) -> Bool[Tensor, "*rest q K"]:
    """Mask of the first ``lengths`` of ``keys`` keys, for ``masked_softmax``.

    Args:
        lengths: ``[B]``, valid keys of each row, or ``[B, Q]``, of each query; 0 or more.
        keys: K.

    Returns:
        ``[B, 1, K]`` or ``[B, Q, K]``.

    Raises:
        ArgumentError: when ``lengths`` has another rank or is not of integers.
    """
    if lengths.dim() not in (1, 2) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ArgumentError(
            "lengths",
            expected="integers of shape [B] or [B, Q]",
            got=f"{lengths.dtype} of shape {list(lengths.shape)}",
            remedy="Give the number of valid keys of each row, or of each query.",
        )
    valid = lengths.unsqueeze(-1) if lengths.dim() == 2 else lengths.view(-1, 1, 1)
    return torch.arange(keys, device=lengths.device) < valid


class ScoringFunction(nn.Module, ABC):
    """Scoring function: vectors of queries and keys to logits ``[..., Q, K]``."""

    @abstractmethod
    def forward(
        self, query: Float[Tensor, "*dims Q D"], key: Float[Tensor, "*dims K E"]
    ) -> Float[Tensor, "*dims Q K"]:
        """The logit of every pair."""


class Dot(ScoringFunction):
    """``s_ij = q_i · k_j`` (Luong et al. 2015)."""

    def forward(
        self, query: Float[Tensor, "*dims Q D"], key: Float[Tensor, "*dims K D"]
    ) -> Float[Tensor, "*dims Q K"]:
        _require_width("key", key, query.shape[-1])
        return query @ key.mT


class ScaledDot(Dot):
    """``s_ij = q_i · k_j / √D``: of unit variance where features are (Vaswani et al. 2017)."""

    def forward(
        self, query: Float[Tensor, "*dims Q D"], key: Float[Tensor, "*dims K D"]
    ) -> Float[Tensor, "*dims Q K"]:
        return super().forward(query, key) / math.sqrt(query.shape[-1])


class Bilinear(ScoringFunction):
    """``s_ij = q_i · W k_j``: queries and keys may differ in width (Luong et al. 2015, "general").

    Args:
        query_dim: width D of a query; key_dim: width E of a key.
        heads: H, each with a W of its own; queries and keys are then ``[..., H, L, D]``.

    Raises:
        ArgumentError: when an argument is below 1.
    """

    def __init__(self, *, query_dim: int, key_dim: int, heads: int = 1) -> None:
        super().__init__()
        _require_positive(query_dim=query_dim, key_dim=key_dim, heads=heads)
        self.weight = nn.Parameter(torch.empty(heads, query_dim, key_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W uniformly up to ``1 / √E``, as a linear layer's."""
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self, query: Float[Tensor, "*dims Q D"], key: Float[Tensor, "*dims K E"]
    ) -> Float[Tensor, "*dims Q K"]:
        _require_width("query", query, self.weight.shape[-2])
        _require_width("key", key, self.weight.shape[-1])
        return query @ _of_heads(self.weight) @ key.mT


class Additive(ScoringFunction):
    """``s_ij = w · tanh(W_q q_i + W_k k_j)`` (Bahdanau et al. 2015). Memory: Q·K·hidden.

    Args:
        query_dim: width D of a query; key_dim: width E of a key.
        hidden: width in between.
        heads: H, each with weights of its own; queries and keys are then ``[..., H, L, D]``.

    Raises:
        ArgumentError: when an argument is below 1.
    """

    def __init__(self, *, query_dim: int, key_dim: int, hidden: int, heads: int = 1) -> None:
        super().__init__()
        _require_positive(query_dim=query_dim, key_dim=key_dim, hidden=hidden, heads=heads)
        self.query = nn.Parameter(torch.empty(heads, query_dim, hidden))
        self.key = nn.Parameter(torch.empty(heads, key_dim, hidden))
        self.weight = nn.Parameter(torch.empty(heads, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each weight uniformly up to ``1 / √inputs``, as a linear layer's."""
        for parameter, inputs in (
            (self.query, self.query.shape[1]),
            (self.key, self.key.shape[1]),
            (self.weight, self.weight.shape[1]),
        ):
            nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5)

    def forward(
        self, query: Float[Tensor, "*dims Q D"], key: Float[Tensor, "*dims K E"]
    ) -> Float[Tensor, "*dims Q K"]:
        _require_width("query", query, self.query.shape[-2])
        _require_width("key", key, self.key.shape[-2])
        left = (query @ _of_heads(self.query)).unsqueeze(-2)
        right = (key @ _of_heads(self.key)).unsqueeze(-3)
        weight = _of_heads(self.weight)
        logits = torch.tanh(left + right) @ weight.unsqueeze(-2).unsqueeze(-1)
        return logits.squeeze(-1)


class MultiHeadScoring(nn.Module):
    """Multi-head attention over any scoring function: ``o_i = Σ_j softmax_j(s_ij) v_j``, H heads.

    Knows nothing of positions; ``Attention`` does.

    Args:
        dim: width C of the output, and of queries, keys and values unless given.
        heads: H.
        score: makes the scoring function from the width of a head and the number of heads, as in
            ``lambda width, heads: Additive(query_dim=width, key_dim=width, hidden=8,
            heads=heads)``.
        query_dim, key_dim, value_dim: widths of what comes in; C by default.
        bias: the projections have biases.
        dropout: probability of dropping an attention weight in training.

    Raises:
        ArgumentError: when the heads do not divide ``dim``, or ``dropout`` is no probability.

    >>> import torch
    >>> attention = MultiHeadScoring(dim=8, heads=2, score=lambda width, heads: ScaledDot())
    >>> x = torch.randn(3, 5, 8)
    >>> attention(x, x, x, lengths=torch.tensor([5, 2, 0])).shape
    torch.Size([3, 5, 8])
    """

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        score: Callable[[int, int], ScoringFunction],
        query_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _require_positive(dim=dim, heads=heads)
        if dim % heads:
            raise ArgumentError(
                "dim",
                expected=f"a multiple of heads ({heads})",
                got=dim,
                remedy="Change dim or heads.",
            )
        if not 0 <= dropout < 1:
            raise ArgumentError(
                "dropout", expected="0 ≤ dropout < 1", got=dropout, remedy="0 drops nothing."
            )
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(query_dim or dim, dim, bias=bias)
        self.key = nn.Linear(key_dim or dim, dim, bias=bias)
        self.value = nn.Linear(value_dim or dim, dim, bias=bias)
        self.output = nn.Linear(dim, dim, bias=bias)
        self.score = score(dim // heads, heads)

    def forward(
        self,
        queries: Float[Tensor, "B Q q"],
        keys: Float[Tensor, "B K k"],
        values: Float[Tensor, "B K v"],
        *,
        lengths: Int[Tensor, "*dims"] | None = None,
        visible: Bool[Tensor, "#B #Q K"] | None = None,
    ) -> Float[Tensor, "B Q C"]:
        """The output ``[B, Q, C]``; before its projection a query that sees nothing is zero.

        Args:
            queries, keys, values: token vectors.
            lengths: ``[B]`` or ``[B, Q]``, how many keys, from the first, may be seen.
            visible: broadcastable to ``[B, Q, K]``, which keys may be seen (as well). Keys and
                values that no query sees may hold anything, NaN included.
        """
        seen = torch.ones(1, 1, keys.shape[1], dtype=torch.bool, device=keys.device)
        if lengths is not None:
            seen = seen & within_lengths(lengths, keys.shape[1])
        if visible is not None:
            seen = seen & visible
        if lengths is not None or visible is not None:
            unseen = ~seen.any(1).unsqueeze(-1)
            keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
        q, k, v = self.query(queries), self.key(keys), self.value(values)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        weights = masked_softmax(self.score(q, k), seen.unsqueeze(1))
        weights = torch.dropout(weights, self.dropout, train=self.training)
        merged: Tensor = self.output((weights @ v).transpose(1, 2).flatten(2))
        return merged


def _of_heads(weight: Tensor) -> Tensor:
    """A weight without its axis of heads where there is one head, so that none is needed."""
    return weight[0] if weight.shape[0] == 1 else weight


def _require_positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ArgumentError(name, expected="1 or more", got=count, remedy="Count them.")


def _require_width(name: str, x: Tensor, width: int) -> None:
    if x.shape[-1] != width:
        raise ArgumentError(
            name,
            expected=f"width {width}",
            got=x.shape[-1],
            remedy="Dot products need queries and keys of one width; Bilinear and Additive do not.",
        )
