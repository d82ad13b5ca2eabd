"""Explicit Runge–Kutta steps of a fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encodings.common.ode.field import Field, Slope


@dataclass(frozen=True)
class Tableau:
    """A method's coefficients.

    Args:
        shares: of the step, at which slopes are evaluated.
        inner: weights of the slopes before each one but the first, for the state it is taken at.
        outer: weights of all slopes in the step.
    """

    shares: Sequence[float]
    inner: Sequence[Sequence[float]]
    outer: Sequence[float]


TABLEAUX: dict[str, Tableau] = {
    "euler": Tableau((0,), (), (1,)),
    "midpoint": Tableau((0, 1 / 2), ((1 / 2,),), (0, 1)),
    "rk4": Tableau(  # the rule of three eighths
        (0, 1 / 3, 2 / 3, 1), ((1 / 3,), (-1 / 3, 1), (1, -1, 1)), (1 / 8, 3 / 8, 3 / 8, 1 / 8)
    ),
}


def stepped(
    method: str, field: Field, state: Float[Tensor, "S C"], first: int, count: int, size: float
) -> Float[Tensor, "N S C"]:
    """``state``, which is ``first`` steps of ``size`` from 0, and the states of ``count`` more."""
    tableau, states = TABLEAUX[method], [state]
    begins = size * torch.arange(first, first + count, device=state.device).to(state)
    shares = begins.new_tensor(tableau.shares)
    slopes = field.each((begins.unsqueeze(-1) + size * shares).flatten())
    stages = len(tableau.shares)
    for step in range(0, len(slopes), stages):
        states.append(_step(tableau, slopes[step : step + stages], states[-1], size))
    return torch.stack(states)


def stepped_once(
    method: str,
    field: Field,
    states: Float[Tensor, "N C"],
    begins: Float[Tensor, " N"],
    sizes: Float[Tensor, " N"],
) -> Float[Tensor, "N C"]:
    """Each of N states after one step of its own size."""
    tableau = TABLEAUX[method]
    slopes = [field.at(begins + share * sizes) for share in tableau.shares]
    return _step(tableau, slopes, states, sizes.unsqueeze(-1))


def _step(tableau: Tableau, slopes: Sequence[Slope], state: Tensor, size: float | Tensor) -> Tensor:
    found = [slopes[0](state)]
    for slope, weights in zip(slopes[1:], tableau.inner, strict=True):
        found.append(slope(state + size * _sum(found, weights)))
    return state + size * _sum(found, tableau.outer)


def _sum(slopes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = weights[0] * slopes[0]
    for slope, weight in zip(slopes[1:], weights[1:], strict=True):
        total = total.add(slope, alpha=weight)
    return total
