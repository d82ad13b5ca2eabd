"""Trajectories of an ordinary differential equation from 0 to any set of real times."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc.encodings.common.ode.field import Activation, Field
from posenc.encodings.common.ode.runge_kutta import SEGMENT, TABLEAUS, Stepper, step
from posenc.encodings.common.ode.trajectory import DIRECT, split, trajectory
from posenc.encodings.common.opaque import opaque
from posenc.errors import ArgumentError, LengthError
from posenc.runtime import is_transformed

__all__ = [
    "Bounds",
    "Flow",
    "Gradient",
    "Method",
    "flow_at",
    "load_solvers",
    "vectors_at",
]

FARTHEST = 2**20
"""Most steps, or tokens, from 0: they are taken one after the other."""

Method = Literal["euler", "midpoint", "rk4", "dopri5"]
Gradient = Literal["direct", "adjoint"]


Solved = Callable[[Int[Tensor, " N"]], Float[Tensor, "N C"]]
"""States after sorted, distinct numbers of whole steps from 0."""


class Bounds(Protocol):
    """States at the bounds of segments, by sign and number."""

    def last(self, sign: int, segment: int) -> int:
        """The last number up to ``segment`` that has a state; -1 without any."""
        ...

    def get(self, sign: int, segment: int) -> Tensor | None:
        """The state, if there is one."""
        ...

    def put(self, sign: int, segment: int, states: Tensor) -> None:
        """Store a state."""
        ...


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

    def field(self, start: Float[Tensor, " C"], weights: Sequence[Tensor]) -> Field:
        """The equation with such weights."""
        return Field(
            start,
            weights,
            activation=self.activation,
            unit=self.unit,
            turning=self.turning,
        )

    def at(
        self,
        times: Float[Tensor, " N"],
        start: Float[Tensor, " C"],
        weights: Sequence[Tensor],
        solved: Solved | None = None,
        bounds: Bounds | None = None,
    ) -> Float[Tensor, "N C"]:
        """``p`` at sorted, distinct times, each as if it were asked for alone.

        Args:
            times: in tokens.
            start: ``p(0)``.
            weights: of the dynamics.
            solved: where states after whole steps come from, if not from ``start``.
            bounds: where the adaptive method finds and stores the states at segments' bounds.
        """
        field = self.field(start, weights)
        if not len(times):
            return start.new_zeros(0, len(start))
        if self.method != "dopri5":
            return field.turned(self._by_steps(times, field, start, weights, solved), times)
        ahead, behind = times[times >= 0], times[times < 0].flip(0)
        parts = []
        if len(behind):
            parts.append(self._adaptive(behind, field, start, weights, bounds).flip(0))
        if len(ahead):
            parts.append(self._adaptive(ahead, field, start, weights, bounds))
        return field.turned(torch.cat(parts), times)

    def _by_steps(
        self,
        times: Float[Tensor, " N"],
        field: Field,
        start: Float[Tensor, " C"],
        weights: Sequence[Tensor],
        solved: Solved | None,
    ) -> Float[Tensor, "N C"]:
        """``z = exp(-R t) p``: whole steps from 0, then a shorter one from the last knot."""
        steps = (times / self.step).trunc()
        require_near(int(steps.abs().max()))
        numbers, index = steps.long().unique(return_inverse=True)  # type: ignore[no-untyped-call]
        if solved is not None:
            reached = solved(numbers)
        elif self.gradient == "adjoint" and torch.is_grad_enabled():
            reached = self.each_way(
                numbers, lambda sign, counts: self._knots(counts, sign, field, start, weights)
            )
        else:
            reached = self.whole_steps(numbers, start.unsqueeze(0), weights)[:, 0]
        reached = reached[index]
        knot = steps * self.step
        rest = times - knot
        return step(TABLEAUS[self.method], field, knot, rest, reached) if rest.any() else reached

    def each_way(
        self, numbers: Int[Tensor, " N"], solve: Callable[[int, Sequence[int]], Tensor]
    ) -> Tensor:
        """``solve(sign, counts)`` for the steps before 0 and for the others, in ascending order.

        ``numbers`` of steps are sorted and distinct; so are the ``counts`` from 0 outwards.
        """
        every = numbers.tolist()
        behind = [-number for number in reversed(every) if number < 0]
        ahead = [number for number in every if number >= 0]
        parts = [solve(-1, behind).flip(0)] if behind else []
        return torch.cat([*parts, solve(1, ahead)] if ahead else parts)

    def whole_steps(
        self,
        numbers: Int[Tensor, " N"],
        starts: Float[Tensor, "S C"],
        weights: Sequence[Tensor],
        finish: Callable[[], None] = lambda: None,
    ) -> Float[Tensor, "N S C"]:
        """``z`` after sorted, distinct numbers of whole steps from 0, for a batch of ``p(0)``.

        ``finish`` is called whenever the backward pass begins.
        """
        field = self.field(starts[0], weights)

        def solve(sign: int, counts: Sequence[int]) -> Tensor:
            def unrolled(starts: Tensor, weights: Sequence[Tensor]) -> Tensor:
                return self._unrolled(sign, counts, starts, field.having(weights))

            if is_transformed():
                return unrolled(starts, field.weights)
            return trajectory(
                lambda weights: self._stepper(sign, field.having(weights)),
                unrolled,
                counts,
                starts,
                field.weights,
                finish,
            )

        return self.each_way(numbers, solve)

    def stepper(self, sign: int, start: Float[Tensor, " C"], weights: Sequence[Tensor]) -> Stepper:
        """The fixed steps after 0, or before it, without a graph."""
        return self._stepper(sign, self.field(start, weights))

    def _stepper(self, sign: int, field: Field) -> Stepper:
        return Stepper(
            TABLEAUS[self.method],
            sign * self.step,
            field.rates,
            self.activation,
            self.unit,
            field.weights,
        )

    def _unrolled(
        self, sign: int, counts: Sequence[int], starts: Float[Tensor, "S C"], field: Field
    ) -> Float[Tensor, "N S C"]:
        size = starts.new_full((len(starts),), sign * self.step)
        states, state = [starts], starts
        for number in range(counts[-1]):
            state = step(TABLEAUS[self.method], field, number * size, size, state)
            states.append(state)
        return torch.stack([states[count] for count in counts])

    def _knots(
        self,
        counts: Sequence[int],
        sign: int,
        field: Field,
        start: Tensor,
        weights: Sequence[Tensor],
    ) -> Float[Tensor, "N C"]:
        """``z`` after so many whole steps from 0, with gradients by the adjoint equation."""
        found = [start.unsqueeze(0)] if counts[0] == 0 else []
        for begin, many, inside, _ in split(counts):
            knots = torch.arange(begin, begin + many + 1, device=start.device).to(start)
            states = self._solve(field, start, knots * self.step * sign, weights)
            found.append(states[inside])
            start = states[-1]
        return torch.cat(found)

    def _adaptive(
        self,
        times: Float[Tensor, " N"],
        field: Field,
        start: Tensor,
        weights: Sequence[Tensor],
        bounds: Bounds | None,
    ) -> Float[Tensor, "N C"]:
        """``z`` at times of one sign, from 0 outwards.

        Segment by segment; the solver chooses its first step anew in each.
        """
        found = []
        sign = -1 if bool(times[-1] < 0) else 1
        numbers = (times.abs() / SEGMENT).floor()
        wanted = numbers.unique().long().tolist()  # type: ignore[no-untyped-call]
        long = require_near(wanted[-1] * SEGMENT) > DIRECT
        first = 0 if bounds is None else max(0, bounds.last(sign, wanted[0]))
        for number in range(first, wanted[-1] + 1):
            kept = None if bounds is None else bounds.get(sign, number)
            start = start if kept is None else kept
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
            if bounds is not None:
                bounds.put(sign, number + 1, start.clone())
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


def vectors_at(
    positions: Float[Tensor, "b L"],
    start: Float[Tensor, " C"],
    weights: Sequence[Tensor],
    flow: Flow,
    solved: Solved | None = None,
    bounds: Bounds | None = None,
) -> Float[Tensor, "b L C"]:
    """``p`` at any times, from the distinct ones; see ``Flow.at``."""
    times = positions.detach()
    distinct, index = times.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    vectors = flow.at(distinct, start, weights, solved, bounds)[index]
    if positions.requires_grad:
        # The derivative by the time is the equation itself.
        velocity = flow.field(start, weights).velocity(times, vectors)
        vectors = vectors + (positions - times).unsqueeze(-1) * velocity
    return vectors


def _compute(positions: Tensor, weights: Sequence[Tensor], settings: str) -> Tensor:
    start, *learned = weights
    return vectors_at(positions, start, learned, Flow(**json.loads(settings)))


flow_at = opaque("flow", _compute)
