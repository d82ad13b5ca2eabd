"""Rotation of queries or keys, from their values before and after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp
from typing import Literal

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
