"""Trajectories of an ordinary differential equation from 0 to any set of real times."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc.encodings.frequencies import geometric_frequencies
from posenc.encodings.opaque import opaque
from posenc.errors import ArgumentError, LengthError

__all__ = ["Activation", "Flow", "Gradient", "Method", "flow_at", "load_solvers"]

SEGMENT = 64
"""Steps, or tokens, solved at once: the solvers' backward takes time quadratic in the times asked.

The bounds of segments are fixed, so that no time depends on which others are asked for.
"""

DIRECT = 16 * SEGMENT
"""Up to so many steps the graph is kept for the backward pass. Beyond, that of a segment is made
again, so that memory grows with the times asked for, and a state a segment."""

FARTHEST = 2**20
"""Most steps, or tokens, from 0: they are taken one after the other."""

Method = Literal["euler", "midpoint", "rk4", "dopri5"]
Gradient = Literal["direct", "adjoint"]
Activation = Literal["relu", "tanh"]


def load_solvers() -> Any:
    """The module ``torchdiffeq``, which is optional and slow to import.

    Raises:
        ArgumentError: when it is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module("torchdiffeq")
    except ImportError as error:
        raise ArgumentError(
            "floater",
            expected="the package torchdiffeq, which solves its equation",
            got="an installation without it",
            remedy="Install the extra: pip install 'posenc[ode]'.",
        ) from error


@dataclass(frozen=True, kw_only=True)
class Flow:
    """How the equation ``dp/dt = h(t, p)`` is read from weights and solved.

    Args:
        method: a fixed-step method, whose steps are anchored at 0, or ``"dopri5"``.
        step: tokens a step of a fixed-step method.
        tolerance: relative and absolute tolerance of ``"dopri5"``.
        gradient: through the solver's steps, or by solving the adjoint equation backwards.
        activation: a.
        unit: u, time a token.
        turning: R turns pairs of features as the sinusoidal encoding does; 0 otherwise.
    """

    method: Method
    step: float
    tolerance: float
    gradient: Gradient
    activation: Activation
    unit: float
    turning: bool

    def to_text(self) -> str:
        """The fields as JSON, which an operator can carry."""
        return json.dumps(asdict(self))

    def at(
        self, times: Float[Tensor, " N"], start: Float[Tensor, " C"], weights: Sequence[Tensor]
    ) -> Float[Tensor, "N C"]:
        """``p`` at sorted, distinct times, each as if it were asked for alone."""
        field = Field(self, start, weights)
        ahead = self._departure(times[times >= 0], field, start, weights)
        behind = self._departure(times[times < 0].flip(0), field, start, weights)
        return field.turned(torch.cat([behind.flip(0), ahead]), times)

    def _departure(
        self, times: Float[Tensor, " N"], field: Field, start: Tensor, weights: Sequence[Tensor]
    ) -> Float[Tensor, "N C"]:
        """``z = exp(-R t) p`` at times of one sign, from 0 outwards."""
        if not len(times):
            return start.new_zeros(0, len(start))
        if self.method == "dopri5":
            return self._adaptive(times, field, start, weights)
        # Whole steps from 0, then a shorter one from the last knot before each time.
        steps = (times / self.step).trunc()
        distinct, index = steps.abs().long().unique(return_inverse=True)  # type: ignore[no-untyped-call]
        reached = self._knots(distinct, steps[-1].sign(), field, start, weights)[index]
        knot = steps * self.step
        rest = times - knot
        if not bool(rest.any()):
            return reached

        def shorter(share: Tensor, z: Tensor) -> Tensor:
            return rest.unsqueeze(-1) * field(knot + share * rest, z)

        return self._solve(shorter, reached, times.new_tensor([0.0, 1.0]), weights)[1]

    def _knots(
        self,
        wanted: Int[Tensor, " N"],
        sign: Float[Tensor, ""],
        field: Field,
        start: Tensor,
        weights: Sequence[Tensor],
    ) -> Float[Tensor, "N C"]:
        """``z`` after so many whole steps from 0: sorted, distinct numbers of steps.

        Of each segment only the wanted states are kept, and the last.
        """
        count = int(wanted[-1])
        long = require_near(count) > DIRECT
        found = [start.unsqueeze(0)] if bool(wanted[0] == 0) else []
        for begin in range(0, count, SEGMENT):
            end = min(begin + SEGMENT, count)
            knots = torch.arange(begin, end + 1, device=start.device).to(start) * self.step * sign
            inside = wanted[(wanted > begin) & (wanted <= end)] - begin

            def segment(z: Tensor, knots: Tensor = knots, inside: Tensor = inside) -> Tensor:
                states = self._solve(field, z, knots, weights)
                return torch.cat([states[inside], states[-1:]])

            states = _recomputed(segment, start) if long else segment(start)
            found.append(states[:-1])
            start = states[-1]
        return torch.cat(found)

    def _adaptive(
        self, times: Float[Tensor, " N"], field: Field, start: Tensor, weights: Sequence[Tensor]
    ) -> Float[Tensor, "N C"]:
        """Segment by segment; the solver chooses its first step anew in each."""
        found = []
        sign = -1 if bool(times[-1] < 0) else 1
        numbers = (times.abs() / SEGMENT).floor()
        long = require_near(int(numbers[-1]) * SEGMENT) > DIRECT
        for number in range(int(numbers[-1]) + 1):
            begin = times.new_tensor([sign * SEGMENT * number])
            inside = times[numbers == number]
            skipped = int(not len(inside) or bool(inside[0] != begin))
            asked = torch.cat([begin, inside] if skipped else [inside])
            asked = torch.cat([asked, begin + sign * SEGMENT])

            def segment(z: Tensor, asked: Tensor = asked, skipped: int = skipped) -> Tensor:
                return self._solve(field, z, asked, weights)[skipped:]

            states = _recomputed(segment, start) if long else segment(start)
            found.append(states[:-1])
            start = states[-1]
        return torch.cat(found)

    def _solve(
        self,
        field: Callable[[Tensor, Tensor], Tensor],
        start: Tensor,
        times: Tensor,
        weights: Sequence[Tensor],
    ) -> Tensor:
        solvers = load_solvers()
        options: dict[str, object] = {
            "method": self.method,
            "rtol": self.tolerance,
            "atol": self.tolerance,
        }
        if self.gradient == "adjoint":
            options["adjoint_params"] = tuple(weights)
            states: Tensor = solvers.odeint_adjoint(field, start, times, **options)
        else:
            states = solvers.odeint(field, start, times, **options)
        return states


def require_near(count: int) -> int:
    """``count`` steps, or tokens, if they can be gone one after the other.

    Raises:
        LengthError: when there are too many.
    """
    if count > FARTHEST:
        raise LengthError(
            "positions",
            expected=f"up to {FARTHEST} steps from 0, which the solver takes one by one",
            got=f"{count}",
            remedy="Subtract the first time, use a larger unit of time, or raise `step`.",
        )
    return count


def _recomputed(segment: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """``segment(start)``, computed again for the backward pass rather than remembered."""
    states: Tensor = checkpoint(segment, start, use_reentrant=False, preserve_rng_state=False)
    return states


class Field:
    """``dz/dt`` for ``z = exp(-R t) p``: the equation in the frame that turns along.

    There the turning is exact, and the solver only has the trained part to follow.
    """

    def __init__(self, flow: Flow, start: Tensor, weights: Sequence[Tensor]) -> None:
        self.first, self.first_bias, second, second_bias = weights
        self.second, self.second_bias = second * flow.unit, second_bias * flow.unit
        self.flow = flow
        self.paired = len(start) // 2 * 2 if flow.turning else 0
        self.rates = geometric_frequencies(self.paired // 2, len(start), 10000.0, like=start)

    def __call__(
        self, times: Float[Tensor, "*dims"], z: Float[Tensor, "*dims C"]
    ) -> Float[Tensor, "*dims C"]:
        if not self.paired:
            return self.learned(times, z)
        angles = times.unsqueeze(-1) * self.rates
        cosine, sine = angles.cos(), angles.sin()
        p = _times(z, torch.complex(cosine, -sine))
        return _times(self.learned(times, p), torch.complex(cosine, sine))

    def learned(
        self, times: Float[Tensor, "*dims"], p: Float[Tensor, "*dims C"]
    ) -> Float[Tensor, "*dims C"]:
        """The trained part of h."""
        time = (self.flow.unit * times).unsqueeze(-1).expand(*p.shape[:-1], 1)
        hidden = F.linear(torch.cat([p, time], dim=-1), self.first, self.first_bias)
        hidden = hidden.relu() if self.flow.activation == "relu" else hidden.tanh()
        return F.linear(torch.cat([hidden, time], dim=-1), self.second, self.second_bias)

    def velocity(
        self, times: Float[Tensor, "*dims"], p: Float[Tensor, "*dims C"]
    ) -> Float[Tensor, "*dims C"]:
        """``h(t, p)`` a token, the turning included."""
        learned = self.learned(times, p)
        if not self.paired:
            return learned
        turning = _times(p, torch.complex(torch.zeros_like(self.rates), -self.rates))
        return learned + torch.cat(
            [turning[..., : self.paired], torch.zeros_like(p[..., self.paired :])], dim=-1
        )

    def turned(
        self, z: Float[Tensor, "*dims C"], times: Float[Tensor, "*dims"]
    ) -> Float[Tensor, "*dims C"]:
        """``exp(R t) z``."""
        if not self.paired:
            return z
        angles = times.unsqueeze(-1) * self.rates
        return _times(z, torch.complex(angles.cos(), -angles.sin()))


def _times(p: Float[Tensor, "*dims C"], turn: Tensor) -> Float[Tensor, "*dims C"]:
    """Pairs of features, read as complex numbers, times ``turn``; a last odd one stays.

    The pair (sin α, cos α) times ``exp(-iβ)`` is that of ``α + β``. (No lazy conjugates: inside
    an operator of a compiled graph they are lost.)
    """
    paired = 2 * turn.shape[-1]
    pairs = torch.complex(p[..., 0:paired:2], p[..., 1:paired:2])
    turned = torch.view_as_real(pairs * turn).flatten(-2)
    return turned if paired == p.shape[-1] else torch.cat([turned, p[..., paired:]], dim=-1)


def _compute(positions: Tensor, weights: Sequence[Tensor], settings: str) -> Tensor:
    flow = Flow(**json.loads(settings))
    start, *learned = weights
    times = positions.detach()
    distinct, index = times.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    vectors = flow.at(distinct, start, learned)[index]
    if positions.requires_grad:
        # The derivative by the time is the equation itself.
        velocity = Field(flow, start, learned).velocity(times, vectors)
        vectors = vectors + (positions - times).unsqueeze(-1) * velocity
    return vectors


flow_at = opaque("flow", _compute)
