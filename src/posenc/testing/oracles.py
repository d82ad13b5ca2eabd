"""Reference attention in Python loops, to test fast implementations.

Written from the papers' equations, sharing no code with the encodings.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.grid import Grid

Rule = Callable[[int, int, float, float], float]
"""Maps (head, batch row, query position, key position) to a number."""

VectorRule = Callable[[int, float, float], Tensor]
"""Maps (head, query position, key position) to a vector of the value width."""

LogitRule = Callable[[Tensor, Tensor, int, float, float], Tensor]
"""Maps (query, key, head, query position, key position) to a number."""


def attention_by_loops(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    grid: Grid,
    *,
    scale: float | None = None,
    bias: Rule | None = None,
    logit: LogitRule | None = None,
    key_vector: VectorRule | None = None,
    value_vector: VectorRule | None = None,
) -> Float[Tensor, "B H Q E"]:
    """Attention one query at a time, in float64.

    Args:
        q, k, v, grid: as for ``attend``, with transformed queries and keys.
        scale: softmax scale; D^-1/2 by default.
        bias: added to each logit.
        logit: the whole logit, replacing the scaled product.
        key_vector: added to each key, depending on the query position.
        value_vector: added to each value, depending on the query position.
    """
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, queries, width = q.shape
    scale = width**-0.5 if scale is None else scale
    group = heads // k.shape[1]
    output = q.new_zeros(batch, heads, queries, v.shape[-1])
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                at = _position(grid.query.positions, b, i)
                logits, values = [], []
                for j in range(k.shape[2]):
                    if not _visible(grid, b, i, j):
                        continue
                    to = _position(grid.key.positions, b, j)
                    key, value = k[b, h // group, j], v[b, h // group, j]
                    if key_vector is not None:
                        key = key + key_vector(h, at, to).double()
                    if value_vector is not None:
                        value = value + value_vector(h, at, to).double()
                    if logit is None:
                        score = scale * (q[b, h, i] @ key)
                    else:
                        score = logit(q[b, h, i], key, h, at, to).double()
                    logits.append(score + (0.0 if bias is None else bias(h, b, at, to)))
                    values.append(value)
                if logits:
                    weights = torch.stack(logits).softmax(0)
                    output[b, h, i] = weights @ torch.stack(values)
    return output


def _position(positions: Tensor, b: int, i: int) -> float:
    return positions[min(b, positions.shape[0] - 1), i, 0].item()


def _entry(values: Tensor | None, b: int, i: int, default: int) -> int:
    return default if values is None else int(values[min(b, values.shape[0] - 1), i].item())


def _visible(grid: Grid, b: int, i: int, j: int) -> bool:
    query, key = grid.query, grid.key
    if _entry(query.document, b, i, 0) != _entry(key.document, b, j, 0):
        return False
    if not _entry(query.valid, b, i, 1) or not _entry(key.valid, b, j, 1):
        return False
    back = _entry(query.order, b, i, 0) - _entry(key.order, b, j, 0)
    if grid.causal and back < 0:
        return False
    if grid.intervals is not None:
        first, end = grid.intervals[min(b, grid.intervals.shape[0] - 1), i].tolist()
        if not first <= _entry(key.order, b, j, 0) < end:
            return False
    if isinstance(grid.window, tuple):
        lowest, highest = grid.window
        return (lowest is None or -back >= lowest) and (highest is None or -back <= highest)
    return grid.window is None or abs(back) < grid.window


def rotate_by_loops(
    x: Float[Tensor, "B H L D"],
    positions: Float[Tensor, "b L 1"],
    *,
    base: float = 10000.0,
    adjacent: bool = False,
    turned: int | None = None,
) -> Float[Tensor, "B H L D"]:
    """RoPE as complex multiplication of each pair, in float64."""
    x = x.double().clone()
    width = x.shape[-1] if turned is None else turned
    for b in range(x.shape[0]):
        for i in range(x.shape[2]):
            at = _position(positions, b, i)
            for t in range(width // 2):
                pair = (2 * t, 2 * t + 1) if adjacent else (t, t + width // 2)
                angle = at * base ** (-2 * t / width)
                turn = complex(math.cos(angle), math.sin(angle))
                for h in range(x.shape[1]):
                    first, second = (x[b, h, i, place].item() for place in pair)
                    product = complex(first, second) * turn
                    x[b, h, i, pair[0]], x[b, h, i, pair[1]] = product.real, product.imag
    return x


def sinusoid_by_loops(position: float, width: int, *, base: float = 10000.0) -> list[float]:
    """The interleaved sinusoid of one position."""
    vector = []
    for feature in range(width):
        angle = position / base ** (2 * (feature // 2) / width)
        vector.append(math.cos(angle) if feature % 2 else math.sin(angle))
    return vector


def t5_bucket_by_loops(
    distance: int, *, causal: bool, buckets: int = 32, max_distance: int = 128
) -> int:
    """T5's bucket of key position − query position, in exact integer arithmetic."""
    first = 0
    if not causal:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(0, -distance)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    # The largest t with (distance / exact)^(buckets - exact) ≥ (max_distance / exact)^t.
    steps = buckets - exact
    bucket = 0
    while (
        bucket < steps - 1
        and distance**steps * exact ** (bucket + 1) >= max_distance ** (bucket + 1) * exact**steps
    ):
        bucket += 1
    return first + exact + bucket
