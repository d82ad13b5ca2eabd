"""Visible keys of a mask function of transformers, by evaluating it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

SPAN = 2**20
PROBES = (0, 1, 7)
"""Tokens whose visible keys, and the queries that see them, are looked at."""


@dataclass(frozen=True)
class Visible:
    """Keys that a query sees, by distance in tokens.

    Args:
        back, ahead: the farthest; None: no limit; ``"unknown"`` beyond a short mask.
        chunk: tokens of a chunk, outside of which nothing is visible.
        other: names of parts of the mask that are not functions of positions alone.
    """

    back: int | Literal["unknown"] | None
    ahead: int | Literal["unknown"] | None
    chunk: int | None = None
    other: tuple[str, ...] = ()


def visible(mask_function: Callable[..., Any]) -> Visible | None:
    """Visibility by position; None where the mask is neither a band nor chunks."""
    try:
        later = [_last(mask_function, key=token) for token in PROBES]
        front = [_last(mask_function, query=token) for token in PROBES]
    except (IndexError, RuntimeError):  # looks into tensors of the input
        return _combined(mask_function)
    if None in (*later, *front):
        return None
    back, ahead = _distance(later), _distance(front)  # type: ignore[arg-type]
    if isinstance(back, int) and isinstance(ahead, int):
        return Visible(_limit(back), _limit(ahead))
    # The last query that sees a key of the first chunk is the chunk's last token.
    end = later[0]
    if (
        end is not None
        and end < SPAN - 1
        and set(later) == {end}
        and front in (later, list(PROBES))
    ):
        return Visible(end, end if front == later else 0, chunk=end + 1)
    return None


def _last(mask_function: Callable[..., Any], **fixed: int) -> int | None:
    """The last query that sees a key, or key that a query sees; None if one between is hidden."""
    token = next(iter(fixed.values()))
    zero, other = torch.zeros((), dtype=torch.long), torch.arange(SPAN)
    at = torch.full_like(other, token)
    pair = (other, at) if "key" in fixed else (at, other)
    sees = torch.as_tensor(mask_function(zero, zero, *pair)).expand(SPAN)
    visible = sees[token:].nonzero().flatten()
    if not len(visible) or int(visible[-1]) + 1 != len(visible):
        return None
    return token + int(visible[-1])


def _distance(last: list[int]) -> int | None:
    """The distance to the last token that is visible, if it is the same for all probes."""
    if all(end == SPAN - 1 for end in last):
        return SPAN
    distances = {end - token for end, token in zip(last, PROBES, strict=True)}
    return distances.pop() if len(distances) == 1 else None


def _limit(distance: int) -> int | None:
    return None if distance == SPAN else distance


def _combined(mask_function: Callable[..., Any]) -> Visible | None:
    """Visibility by the one part of a conjunction or disjunction that positions decide."""
    names = mask_function.__code__.co_freevars if hasattr(mask_function, "__code__") else ()
    cells = (cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ())
    parts = dict(zip(names, cells, strict=True)).get("mask_functions", ())
    visibilities = [(part, visible(part)) for part in parts]
    positional = [positions for _, positions in visibilities if positions]
    if len(positional) != 1:
        return None
    join = "or" if "or_mask" in mask_function.__qualname__ else "and"
    other = [
        f"{join} {part.__qualname__.split('.')[0]}"
        for part, positions in visibilities
        if not positions
    ]
    return Visible(
        positional[0].back, positional[0].ahead, positional[0].chunk, (*positional[0].other, *other)
    )


def visible_of(mask: Tensor) -> Visible | None:
    """Visibility of a short mask [..., queries, keys]; None: neither causal nor all."""
    sees = mask if mask.dtype == torch.bool else mask > -1e4
    sees = sees.reshape(-1, *sees.shape[-2:])[0]
    if sees.all():
        return Visible("unknown", "unknown")
    causal = torch.equal(sees, torch.ones_like(sees).tril())
    return Visible("unknown", 0) if causal else None
