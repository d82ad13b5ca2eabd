"""The validated problem of one call of attention, the input of every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.attention.problem.lowering import lower
from posenc.encoding import Encoding, FusedScore, Rotation, StructuredScore
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout


class GlobalSoftmax(NamedTuple):
    """Output and LSE of queries over more keys than those of a problem.

    Args:
        output: ``[B, H, Q, E]``.
        lse: ``[B, H, Q]`` in float32 or better.
    """

    output: Float[Tensor, "B H Q E"]
    lse: Float[Tensor, "B H Q"]


@dataclass(frozen=True, eq=False)
class Problem:
    """One call of ``attend``.

    Args:
        q: ``[B, H, Q, D]``; k: ``[B, G, K, D]``; v: ``[B, G, K, E]``. All of one dtype and device.
        grid: offsets and visibility.
        encoding: its score and value parts are what is left to do.
        scale: factor of the product q·k.
        dropout: probability of dropping an attention weight.
        lowered: score and value parts in structured form; None where one has none.
        rotation: what queries and keys have yet to be multiplied by before their product, see
            ``rotated``; only where nothing of ``lowered`` reads queries or keys.
        global_softmax: output and LSE over more keys than these. The result then has the gradient
            of that output through these keys; its values are arbitrary.
        counter_dropout: counter-based dropout, in place of ``dropout``.
        sinks: ``[H]``, logits that only the sum of the softmax sees; included in the LSE.
        softcap: c of ``c · tanh(s / c)``, which whole logits become before they are masked. Neither
            for scores that replace the softmax.
        source: queries and keys before the query_key part, where q and k are those after it.
        rotate: applies a rotation, at the speed of this machine's kernels.
    """

    q: Float[Tensor, "B H Q D"]
    k: Float[Tensor, "B G K D"]
    v: Float[Tensor, "B G K E"]
    grid: Grid
    encoding: Encoding
    scale: float
    dropout: float
    lowered: tuple[StructuredScore, ...] | None
    rotation: Rotation | None = None
    global_softmax: GlobalSoftmax | None = None
    counter_dropout: CounterDropout | None = None
    sinks: Float[Tensor, " H"] | None = None
    softcap: float | None = None
    source: tuple[Tensor, Tensor] | None = None
    rotate: Rotate = Rotation.apply
    _rotated: Problem | None = field(default=None, init=False, repr=False)

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def rotated(self) -> Problem:
        """The problem with queries and keys rotated, for backends that do not rotate themselves."""
        if self.rotation is None:
            return self
        if self._rotated is None:
            q, k = self.rotate(self.rotation, self.q, self.k)
            rotated = replace(self, q=q, k=k, rotation=None, source=(self.q, self.k))
            object.__setattr__(self, "_rotated", rotated)
        assert self._rotated is not None
        return self._rotated

    def fused(self) -> FusedScore | None:
        """The score part's form outside the structured one, if it has one."""
        score = self.encoding.score
        if score is None:
            return None
        return score.fuse(self.q, self.k, self.grid, scale=self.scale)

    def lower_on_sequences(self, first: int, last: int) -> tuple[StructuredScore, ...] | None:
        """The structured form on plain sequences that have all offsets from first to last.

        Some parts have a form there only. None where there is none, where terms may depend on more
        than the offsets, queries and keys, or positions have gradients, which sequences' have not.
        """
        grid, score, queries = self.grid, self.encoding.score, self.q.shape[2]
        sides = (grid.query, grid.key)
        if torch.is_grad_enabled() and any(side.positions.requires_grad for side in sides):
            return None
        if grid.query.signal is not None or grid.key.signal is not None:
            return None
        if score is not None and (score.replaces_product or score.reads_layout):
            return None
        start = max(0, -first - queries + 1)
        key_start = max(0, first + queries - 1 + start)
        keys = max(1, last - (key_start - start) + 1)
        device, dtype = grid.query.device, grid.query.positions.dtype
        like = torch.empty(0, dtype=torch.promote_types(dtype, grid.key.positions.dtype))
        try:
            query = Layout.sequence(queries, start, device=device).in_precision_of(like)
            key = Layout.sequence(keys, key_start, device=device).in_precision_of(like)
            sequences = Grid(query, key, grid.causal)
            return lower(
                self.encoding,
                self.q,
                self.k,
                sequences,
                scale=self.scale,
                value_dim=self.v.shape[3],
            )
        except ArgumentError:  # an offset that no document has may be out of a table's range
            return None

    def by_definition(self) -> Problem:
        """The problem with queries and keys transformed by the encoding's own query_key part."""
        source = (self.q, self.k) if self.rotation is not None else self.source
        if source is None:
            return self
        q, k = transformed(*source, self.encoding, self.grid)
        return replace(self, q=q, k=k, rotation=None, source=None)


def transformed(q: Tensor, k: Tensor, encoding: Encoding, grid: Grid) -> tuple[Tensor, Tensor]:
    """Queries and keys after the query_key part.

    Raises:
        ArgumentError: where the part returns other shapes than kernels would read.
    """
    if encoding.query_key is None:
        return q, k
    new_q, new_k = encoding.query_key(q, k, grid)
    (batch, heads, queries), (_, groups, keys) = q.shape[:3], k.shape[:3]
    if not (
        new_q.shape[:3] == (batch, heads, queries)
        and new_k.shape[:1] == (batch,)
        and new_k.shape[1] in (groups, heads)
        and new_k.shape[2:] == (keys, new_q.shape[3])
    ):
        raise ArgumentError(
            f"{type(encoding.query_key).__name__}.forward",
            expected=f"queries [{batch}, {heads}, {queries}, E] and "
            f"keys [{batch}, {groups} or {heads}, {keys}, E]",
            got=f"{list(new_q.shape)} and {list(new_k.shape)}",
            remedy="Return as many queries and keys as there were, of one width.",
        )
    return new_q, new_k


BITS = 24
"""Random bits of a weight."""


@dataclass(frozen=True, eq=False)
class CounterDropout:
    """Counter-based dropout of weights: a hash of batch row, head and both tokens' numbers.

    The mask is the same however tokens and heads are spread over processes.

    Args:
        probability: of dropping a weight.
        seed: of the call.
        query, key: ``[b, Q]`` and ``[b, K]``, numbers of the tokens, see ``token_numbers``.
        first_head: number of the first of these heads among all.
    """

    probability: float
    seed: int
    query: Int[Tensor, "b Q"]
    key: Int[Tensor, "b K"]
    first_head: int = 0

    def factors(self, like: Float[Tensor, "B H Q K"]) -> Float[Tensor, "B H Q K"]:
        """0 for dropped weights, 1 / (1 - probability) for others."""
        batch, heads = (
            torch.arange(first, first + count, device=like.device)
            for first, count in ((0, like.shape[0]), (self.first_head, like.shape[1]))
        )
        place = _mix(_mix(batch.unsqueeze(1) + self.seed) + heads)  # [B, H]
        row = _mix(place[:, :, None, None] + self.query[:, None, :, None])
        bits = _mix(row + self.key[:, None, None, :]) & (2**BITS - 1)
        is_kept = bits >= round(self.probability * 2**BITS)
        factors: Tensor = is_kept.to(like.dtype) / (1 - self.probability)
        return factors


def draw_seed(device: torch.device) -> Int[Tensor, "1"]:
    """A seed for a mask, from the generator of PyTorch for a device."""
    return torch.randint(2**31 - 1, (1,), device=device)


def token_numbers(layout: Layout) -> Int[Tensor, "b L"]:
    """A number for each token of a row, by its document and order."""
    if layout.document is None:
        return _mix(layout.order)
    return _mix(_mix(layout.document) + layout.order)


def _mix(x: Int[Tensor, "*dims"]) -> Int[Tensor, "*dims"]:
    """SplitMix64's finaliser, of 64-bit integers that wrap around."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    mixed: Tensor = x ^ _shifted(x, 31)
    return mixed


def _shifted(x: Int[Tensor, "*dims"], bits: int) -> Int[Tensor, "*dims"]:
    """Logical right shift."""
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted


Rotate = Callable[[Rotation, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Queries and keys rotated, as by ``Rotation.apply``."""
