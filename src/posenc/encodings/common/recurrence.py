"""Vectors ``p_0, p_1, …`` of a linear or gated recurrence at any positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.encodings.common.opaque import opaque
from posenc.errors import LengthError

SPARSE = 32
"""Positions are sparse when their span exceeds this many times their number."""


def linear_orbit(weights: Sequence[Tensor], first: int, count: int) -> Float[Tensor, "count C"]:
    """``c + A^k (p_0 - c)`` for k = first … first + count - 1, by doubling.

    Args:
        weights: ``p_0`` ``[C]``, ``c`` ``[C]``, ``A`` ``[C, C]``.
        first, count: which vectors.
    """
    start, centre, transition = weights
    rows, power = (start - centre).unsqueeze(0), transition.mT
    for digit in range(first.bit_length()):
        both = torch.cat([rows, power]) @ power  # one product, which also squares the power
        rows = both[:1] if first >> digit & 1 else rows
        power = both[1:]
    power = transition.mT
    while len(rows) < count:
        missing = count - len(rows)
        both = torch.cat([rows[:missing], power]) @ power
        rows, power = torch.cat([rows, both[: -len(power)]]), both[-len(power) :]
    return rows + centre


def _linear_sparse(weights: Sequence[Tensor], positions: Int[Tensor, " N"]) -> Float[Tensor, "N C"]:
    """Vectors of the linear recurrence at sparse positions, by the positions' binary digits."""
    start, centre, transition = weights
    power = transition.mT
    rows = (start - centre).expand(len(positions), -1)
    digits = int(positions.max()).bit_length()
    for digit in range(digits):
        odd = (positions >> digit & 1).bool().unsqueeze(-1)
        rows = torch.where(odd, rows @ power, rows)
        if digit + 1 < digits:
            power = power @ power
    return rows + centre


FARTHEST_STEP = 2**20
"""Largest position of a recurrent unit: all states from 0 on are computed and stored."""


def gated_orbit(weights: Sequence[Tensor], first: int, count: int) -> Float[Tensor, "count C"]:
    """States of a gated recurrent unit without input, computed sequentially from ``p_0``.

    Args:
        weights: ``p_0`` ``[C]``, ``U`` ``[3C, C]``, biases ``a`` and ``b`` ``[3C]`` of the input's
            and the state's side, in the order of the gates r, z and n.
        first, count: which vectors.

    Raises:
        LengthError: beyond ``FARTHEST_STEP``.
    """
    start, recurrent, input_bias, state_bias = weights
    steps = first + count - 1
    if steps > FARTHEST_STEP:
        raise LengthError(
            "positions",
            expected=f"0 to {FARTHEST_STEP}, since recurrent states are computed step by step",
            got=steps,
            remedy="Count positions from the text's beginning, or use step='linear'.",
        )
    if steps == 0:
        return start.unsqueeze(0)
    inputs = start.new_zeros(steps, 1, 1)
    flat = [start.new_zeros(len(recurrent), 1), recurrent, input_bias, state_bias]
    states, _ = torch.gru(inputs, start.view(1, 1, -1), flat, True, 1, 0.0, False, False, False)
    return torch.cat([start.unsqueeze(0), states[:, 0]])[first:]


Orbit = Callable[[Sequence[Tensor], int, int], Tensor]


def _read(
    positions: Float[Tensor, "b L"],
    weights: Sequence[Tensor],
    orbit: Orbit,
    sparse: Callable[[Sequence[Tensor], Tensor], Tensor] | None = None,
) -> Float[Tensor, "b L C"]:
    """Vectors at real positions; fractional ones are interpolated linearly."""
    if not positions.numel():
        return positions.new_zeros(*positions.shape, len(weights[0]))
    below = positions.detach().floor()
    above = positions.detach().ceil() if not positions.requires_grad else below + 1
    first, last = int(below.min()), int(above.max())
    if sparse is None or last - first < SPARSE * positions.numel():
        vectors = orbit(weights, first, last - first + 1)
        low, high = below.long() - first, above.long() - first
    else:
        distinct, index = torch.stack([below, above]).long().unique(return_inverse=True)  # type: ignore[no-untyped-call]
        vectors = sparse(weights, distinct)
        low, high = index
    share = (positions - below).unsqueeze(-1)
    return torch.lerp(vectors[low], vectors[high], share)


def _linear(positions: Tensor, weights: Sequence[Tensor], settings: str) -> Tensor:
    return _read(positions, weights, linear_orbit, _linear_sparse)


def _gated(positions: Tensor, weights: Sequence[Tensor], settings: str) -> Tensor:
    return _read(positions, weights, gated_orbit, None)


linear_at = opaque("linear_orbit", _linear)
gated_at = opaque("gated_orbit", _gated)
