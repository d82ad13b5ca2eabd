"""Facts about the attention layers of a model, where each is from, and those read from values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import exp
from typing import Any, Literal

import torch
from torch import Tensor

DIGITS = 1e-4
"""Relative error of frequencies, which transformers computes in float32."""


AWAY = 0.5
"""Error in radians of angles far out, where float32 has few digits left of them."""


@dataclass(frozen=True, kw_only=True)
class RotationFacts:
    """Rotation of the features of a head; None stands for what is unknown.

    Args:
        features: that are rotated.
        first: the first of them.
        pairing: of features as they reach attention: ``"half"`` or ``"adjacent"``.
        distance: of the features of a pair; of halves mostly features / 2.
        sign: 1 where angles grow with the position.
        frequencies: of each pair, in radians a token.
        gain: factor of the rotated features.
        varies: frequencies or gain change with the length of the text.
    """

    features: int | None
    first: int | None = None
    pairing: Literal["half", "adjacent"] | None = None
    distance: int | None = None
    sign: int | None = None
    frequencies: tuple[float, ...] | None = None
    gain: float | None = None
    varies: bool | None = None

    @property
    def base(self) -> float | None:
        """The base b of frequencies c·b^(−i / pairs); None where they are not geometric.

        Pairs without a rotation count if they lie between the halves.
        """
        if self.frequencies is None or len(self.frequencies) < 2 or not all(self.frequencies):
            return None
        pairs = self.distance if self.pairing == "half" else len(self.frequencies)
        logs = torch.tensor(self.frequencies, dtype=torch.float64).log()
        step = (logs[0] - logs[-1]) / (len(logs) - 1)
        line = logs[0] - step * torch.arange(len(logs))
        return exp(step * (pairs or len(logs))) if (logs - line).abs().max() < 10 * DIGITS else None

    def alike(self, other: RotationFacts | None) -> bool:
        """True if two rotations are equal up to errors of float32."""
        if other is None or replace(self, frequencies=None) != replace(other, frequencies=None):
            return False
        if self.frequencies is None or other.frequencies is None:
            return self.frequencies == other.frequencies
        ours, others = (torch.tensor(r.frequencies) for r in (self, other))
        return bool(((ours - others).abs() <= 1e-3 * ours).all())


@dataclass(frozen=True)
class _Turns:
    """A rotation, ratios [pairs, tokens] of complex features after and before, radians a token."""

    rotation: RotationFacts
    ratio: Tensor
    steps: Tensor


def rotation(
    near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor] | None, start: int
) -> RotationFacts | None:
    """The rotation that took ``near[1]`` to ``near[0]``; None if nothing was rotated.

    Args:
        near: features [heads, tokens, dim] after and before, at positions 0, 1, ….
        far: the same at positions from ``start`` on; None: not known.
    """
    turns = _turns(*near)
    if turns is None:
        return None
    measured, steps = turns.rotation, turns.steps
    if measured.pairing is None:
        return measured
    varies = None
    beyond = _turns(*far, tolerance=AWAY) if far is not None else None
    if beyond is not None and beyond.ratio.shape == turns.ratio.shape:
        error = (beyond.ratio[:, 0] * torch.polar(torch.ones_like(steps), -steps * start)).angle()
        varies = bool(error.abs().max() > AWAY) or beyond.rotation.gain != measured.gain
        if not varies:
            steps = steps + error / start  # slow pairs hardly move within a few tokens
    frequencies = tuple(float(f"{f:.6g}") for f in steps.abs().tolist())
    return replace(measured, frequencies=frequencies, varies=varies)


def _turns(after: Tensor, before: Tensor, tolerance: float = 10 * DIGITS) -> _Turns | None:
    """The rotation of features, its pairing unknown unless angles are proportional to positions."""
    least = torch.finfo(before.dtype).eps ** 0.75 * before.abs().max()
    moved = ((after - before).abs() > least).any(0).any(0).nonzero().flatten()
    count = len(moved)
    if not count:
        return None
    unknown = RotationFacts(features=count, first=int(moved[0]))
    nothing = torch.zeros(0)
    if count % 2:
        return _Turns(unknown, nothing, nothing)
    half, pairs = count // 2, torch.arange(count // 2)
    for name, (i, j) in {
        "half": (moved[:half], moved[half:]),
        "adjacent": (moved[::2], moved[1::2]),
    }.items():
        a, b = (torch.complex(x[..., i].double(), x[..., j].double()) for x in (after, before))
        head = b.abs().amin(1).argmax(0)  # for each pair, a head in which it is not small
        ratio = (a / b)[head, :, pairs]  # [pairs, tokens]
        gain = ratio.abs()
        if not bool(((gain - gain.mean()).abs() < DIGITS * gain.mean()).all()):
            continue
        last = ratio.shape[1] - 1
        steps = (ratio[:, 1] / ratio[:, 0]).angle()
        rest = (
            ratio[:, -1] / ratio[:, 0] * torch.polar(torch.ones_like(steps), -steps * last)
        ).angle()
        if float(rest.abs().max()) > tolerance:
            continue
        steps = steps + rest / last
        sign = int(steps[0].sign())
        mean = float(f"{float(gain.mean()):.5g}")
        distance = int(j[0] - i[0])
        paired = replace(unknown, pairing=name, distance=distance, sign=sign, gain=mean)  # type: ignore[arg-type]
        return _Turns(paired, ratio, steps)
    return _Turns(unknown, nothing, nothing)


HIDDEN, SAME = -1e4, 1e-9
"""Logits below are masked; those that differ by less are the same."""


@dataclass(frozen=True)
class Bias:
    """A bias, and the factor of products of queries and keys beside it.

    Args:
        shape: None without one, ``"linear"``, ``"by offset"``, ``"by position"`` or ``"by content
            and position"``.
        slopes: of a linear bias: its decrease a token, for each head.
        scale: the factor; None: not known.
    """

    shape: str | None
    slopes: tuple[float, ...] = ()
    scale: float | None = None


def bias_of(logits: Tensor) -> Bias:
    """The bias in logits [heads, queries, keys] of zero products."""
    shown = logits > HIDDEN
    if logits.shape[-1] != logits.shape[-2]:
        values = logits[shown]
        differ = len(values) and float(values.max() - values.min()) > SAME
        return Bias("by position" if differ else None)
    # Softmax ignores a constant of each row.
    relative = logits - logits.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    if not bool(shown.any()) or float(relative[shown].abs().max()) < SAME:
        return Bias(None)
    pairs = shown[:, 1:, 1:] & shown[:, :-1, :-1]
    moved = (relative[:, 1:, 1:] - relative[:, :-1, :-1])[pairs]
    if len(moved) and float(moved.abs().max()) > 1e-6:
        return Bias("by position")
    falling = -relative[:, -1].flip(-1)  # [heads, distance back]
    slope = falling[:, 1:2]
    if float((falling - slope * torch.arange(falling.shape[-1])).abs().max()) < 1e-6:
        return Bias("linear", tuple(float(f"{s:.5g}") for s in slope.flatten().tolist()))
    return Bias("by offset")


def factor_of(products: Tensor, content: Tensor, silent: Tensor) -> float | None:
    """The factor from products of queries and keys to logits; None if there is more.

    Args:
        products: [heads, queries, keys].
        content: logits less ``silent``.
        silent: logits of zero products, masked ones included.
    """
    shown = silent > HIDDEN
    if products.shape != content.shape or not bool(shown.any()):
        return None
    a, b = content[shown].double(), products[shown].double()
    factor = (a @ b) / (b @ b)
    linear = float((a - factor * b).abs().max()) <= 1e-3 * float(a.abs().max())
    return float(f"{float(factor):.4g}") if linear else None


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


UNKNOWN: Literal["unknown"] = "unknown"
Maybe = Literal["unknown"]


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """One kind of attention call, or layers without any; ``"unknown"`` where a fact is.

    Args:
        module: name, with an asterisk for the number of the layer.
        kind: ``"none"`` for layers without attention.
        instead: classes of the modules of such layers.
        heads, key_heads, head_dim, value_dim: of the call; heads of equal keys count once.
        scale: factor of the logits.
        rotation: of queries; None: not rotated.
        key_rotation: of keys, where it is another one.
        absolute: queries of equal tokens differ by position before any rotation.
        causal: no query sees a later key.
        back, ahead: tokens to the farthest visible key before and after a query; None: no limit.
        chunk: tokens of a chunk, outside of which nothing is visible.
        exceptions: parts of the mask that depend on the input, by name.
        bias: shape of what is added to the logits; ``"by offset"`` depends on key − query alone.
        slopes: of a bias that is linear in the offset, for each head.
        sinks: each head has a logit that only the sum of its softmax includes.
        cap: c of logits c·tanh(s / c).
        temperature: factor of queries at positions at which it is not 1.
        keys_of: the module whose keys are read again.
        passes: calls of each module over a text; more than one in looped models.
        arguments: further ones of the call: numbers, or shapes of tensors.
        sources: where each fact is from.
    """

    module: str
    kind: Literal["self", "cross", "none"] | Maybe
    instead: tuple[str, ...] = ()
    heads: int | None = None
    key_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    scale: float | None = None
    rotation: RotationFacts | Maybe | None = None
    key_rotation: RotationFacts | Maybe | None = None
    absolute: bool | Maybe = False
    causal: bool | Maybe = UNKNOWN
    back: int | Maybe | None = None
    ahead: int | Maybe | None = None
    chunk: int | Maybe | None = None
    exceptions: tuple[str, ...] = ()
    bias: str | None = None
    slopes: tuple[float, ...] = ()
    sinks: bool | Maybe = False
    cap: float | Maybe | None = None
    temperature: Mapping[str, float] | Maybe = field(default_factory=dict)
    keys_of: str | None = None
    passes: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def windowed(self) -> bool:
        """True if the visible keys are known to be limited."""
        return any(isinstance(limit, int) and limit for limit in (self.back, self.chunk))

    @property
    def unlimited(self) -> bool | Maybe:
        """True if the largest visible distance grows with the text."""
        return UNKNOWN if UNKNOWN in (self.back, self.chunk) else not self.windowed


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers that do the same.

    Args:
        numbers: of the layers, from 0; empty where calls have none.
        attention: of each.
    """

    numbers: tuple[int, ...]
    attention: AttentionFacts


@dataclass(frozen=True, kw_only=True)
class PositionTable:
    """A table of positions.

    Args:
        module: name.
        rows: in the table.
        first: the row of the first token.
    """

    module: str
    rows: int
    first: int


@dataclass(frozen=True, kw_only=True)
class LayerReading:
    """Layers of a model.

    Args:
        layers: in their order, equal ones together.
        tables: of absolute positions.
        by: ``"run"``, or ``"config"`` where the model could not be run.
        reason: why it could not be run, or what had to be left out.
        far: the position of the second run; None if there was none.
        seconds: that it took.
    """

    layers: tuple[Layers, ...]
    tables: tuple[PositionTable, ...] = ()
    by: Literal["run", "config"] = "run"
    reason: str = ""
    far: int | None = None
    seconds: float = 0.0
