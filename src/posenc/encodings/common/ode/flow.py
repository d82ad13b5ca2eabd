"""Solutions of FLOATER's differential equation at any set of real times."""

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
from posenc.encodings.common.ode.trajectory import SEGMENT, trajectory, unrolled
from posenc.errors import ArgumentError, LengthError
from posenc.runtime import is_transformed

DIRECT = 16 * SEGMENT
"""Most tokens over which all stages of the adaptive method are stored for the backward pass."""

FARTHEST = 2**20
"""Largest number of steps, or tokens, from 0; steps are sequential."""

Method = Literal["euler", "midpoint", "rk4", "dopri5"]
Gradient = Literal["direct", "adjoint"]


Solved = Callable[[Int[Tensor, " N"]], Float[Tensor, "N C"]]
"""States after sorted, distinct numbers of whole steps from 0."""


class BoundaryStates(Protocol):
    """Store of states at segment boundaries, by sign and segment number."""

    def last(self, sign: int, segment: int) -> int:
        """The largest stored segment number up to ``segment``; -1 if there is none."""

    def get(self, sign: int, segment: int) -> Tensor | None:
        """The stored state or None."""

    def put(self, sign: int, segment: int, states: Tensor) -> None:
        """Store a state."""


def load_solvers() -> Any:
    """The module ``torchdiffeq``, which is optional and slow to import.

    Raises:
        ArgumentError: when it is not installed.
    """
    try:
        return importlib.import_module("torchdiffeq")
    except ImportError as error:
        raise ArgumentError(
            "floater",
            expected="the package torchdiffeq, its equation solver",
            got="an installation without torchdiffeq",
            remedy="Install the extra: pip install 'posenc[ode]'.",
        ) from error


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Settings of the equation ``dp/dt = h(t, p)`` and its solver.

    Args:
        method: a fixed-step method, with steps counted from 0, or ``"dopri5"``.
        step: tokens a step of a fixed-step method.
        tolerance: relative and absolute tolerance of ``"dopri5"``.
        gradient: through the solver's steps, or by the adjoint equation.
        activation: a.
        unit: u, time per token.
        rotary: R rotates pairs of features as the sinusoidal encoding does; otherwise R is 0.
    """

    method: Method
    step: float
    tolerance: float
    gradient: Gradient
    activation: Activation
    unit: float
    rotary: bool

    def to_text(self) -> str:
        """The fields as JSON, the form in which an operator takes them."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Flow:
        """The settings from ``to_text``."""
        return cls(**json.loads(text))

    def field(self, start: Float[Tensor, " C"], weights: Sequence[Tensor]) -> Field:
        """The equation with these weights."""
        return Field(start, weights, activation=self.activation, unit=self.unit, rotary=self.rotary)

    def at(
        self,
        times: Float[Tensor, " N"],
        start: Float[Tensor, " C"],
        weights: Sequence[Tensor],
        solved: Solved | None = None,
        bounds: BoundaryStates | None = None,
    ) -> Float[Tensor, "N C"]:
        """``p`` at sorted, distinct times; each value is independent of the other times.

        Args:
            times: in tokens.
            start: ``p(0)``.
            weights: of the dynamics.
            solved: source of states after whole steps; None solves from ``start``.
            bounds: store of the adaptive method's states at segment boundaries.
        """
        field = self.field(start, weights)
        if not len(times):
            return start.new_zeros(0, len(start))
        if self.method != "dopri5":
            return field.rotated(self._by_steps(times, field, start, solved), times)
        ahead, behind = times[times >= 0], times[times < 0].flip(0)
        parts = []
        if len(behind):
            parts.append(self._adaptive(behind, field, start, bounds).flip(0))
        if len(ahead):
            parts.append(self._adaptive(ahead, field, start, bounds))
        return field.rotated(torch.cat(parts), times)

    def _by_steps(
        self,
        times: Float[Tensor, " N"],
        field: Field,
        start: Float[Tensor, " C"],
        solved: Solved | None,
    ) -> Float[Tensor, "N C"]:
        """``z = exp(-R t) p``: whole steps from 0, then a shorter one from the last knot."""
        steps = (times / self.step).trunc()
        require_near(int(steps.abs().max()))
        numbers, index = steps.long().unique(return_inverse=True)  # type: ignore[no-untyped-call]
        if solved is not None:
            reached = solved(numbers)
        elif self.gradient == "adjoint" and torch.is_grad_enabled():

            def solve(sign: int, counts: Sequence[int]) -> Tensor:
                def adjoint(state: Tensor, weights: Sequence[Tensor], *steps: int) -> Tensor:
                    return self._solve(field, state, self._knots(state, sign, *steps), weights)

                return unrolled(adjoint, counts, start, field.weights)

            reached = self.each_way(numbers, solve)
        else:
            reached = self.whole_steps(numbers, start.unsqueeze(0), field.weights)[:, 0]
        reached = reached[index]
        knot = steps * self.step
        rest = times - knot
        if not rest.any():
            return reached

        def shorter(share: Tensor, z: Tensor) -> Tensor:
            return rest.unsqueeze(-1) * field(knot + share * rest, z)

        return self._solve(shorter, reached, rest.new_tensor([0.0, 1.0]))[1]

    def each_way(
        self, numbers: Int[Tensor, " N"], solve: Callable[[int, Sequence[int]], Tensor]
    ) -> Tensor:
        """``solve(sign, counts)`` for negative and for other step numbers, in ascending order.

        ``numbers`` are sorted and distinct, and so are ``counts``, from 0 outwards.
        """
        steps = numbers.tolist()
        behind = [-number for number in reversed(steps) if number < 0]
        ahead = [number for number in steps if number >= 0]
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

        ``finish`` is called at the start of each backward pass.
        """
        field = self.field(starts[0], weights)

        def both_ways(sign: int, counts: Sequence[int]) -> Tensor:
            def solve(state: Tensor, weights: Sequence[Tensor], begin: int, count: int) -> Tensor:
                return self.segment(field.with_weights(weights), sign, state, begin, count)

            if is_transformed():
                return unrolled(solve, counts, starts, field.weights)
            return trajectory(solve, counts, starts, field.weights, finish)

        return self.each_way(numbers, both_ways)

    def segment(
        self, field: Field, sign: int, state: Float[Tensor, "S C"], begin: int, count: int
    ) -> Float[Tensor, "N S C"]:
        """``state``, which is ``begin`` steps from 0, and the states of ``count`` steps from it."""
        return self._solve(field, state, self._knots(state, sign, begin, count))

    def _knots(self, like: Tensor, sign: int, begin: int, count: int) -> Float[Tensor, " N"]:
        """Times after ``begin`` whole steps from 0, and after each of ``count`` more."""
        numbers = torch.arange(begin, begin + count + 1, device=like.device).to(like)
        return numbers * (sign * self.step)

    def _adaptive(
        self, times: Float[Tensor, " N"], field: Field, start: Tensor, bounds: BoundaryStates | None
    ) -> Float[Tensor, "N C"]:
        """``z`` at times of one sign, from 0 outwards.

        Segment by segment; the solver restarts its step size in each.
        """
        parts = []
        sign = -1 if bool(times[-1] < 0) else 1
        numbers = (times.abs() / SEGMENT).floor()
        segments = numbers.unique().long().tolist()  # type: ignore[no-untyped-call]
        long = require_near(segments[-1] * SEGMENT) > DIRECT
        first = 0 if bounds is None else max(0, bounds.last(sign, segments[0]))
        for number in range(first, segments[-1] + 1):
            stored = None if bounds is None else bounds.get(sign, number)
            start = start if stored is None else stored
            begin = times.new_tensor([sign * SEGMENT * number])
            inside = times[numbers == number]
            skipped = int(not len(inside) or bool(inside[0] != begin))
            grid = torch.cat([begin, inside] if skipped else [inside])
            grid = torch.cat([grid, begin + sign * SEGMENT])

            def segment(z: Tensor, grid: Tensor = grid, skipped: int = skipped) -> Tensor:
                return self._solve(field, z, grid, field.weights)[skipped:]

            states = _recomputed(segment, start) if long else segment(start)
            parts.append(states[:-1])
            start = states[-1]
            if bounds is not None:
                bounds.put(sign, number + 1, start.clone())
        return torch.cat(parts)

    def _solve(
        self,
        slope: Callable[[Tensor, Tensor], Tensor],
        start: Tensor,
        times: Tensor,
        weights: Sequence[Tensor] = (),
    ) -> Tensor:
        """States at ``times``, from ``start`` at the first; a fixed step between two of them.

        Gradients of ``weights`` are by the adjoint equation if that is chosen.
        """
        solve, options = load_solvers().odeint, {}
        if weights and self.gradient == "adjoint":
            solve, options = load_solvers().odeint_adjoint, {"adjoint_params": tuple(weights)}
        tolerances = {"rtol": self.tolerance, "atol": self.tolerance}
        states: Tensor = solve(slope, start, times, method=self.method, **tolerances, **options)
        return states


def require_near(count: int) -> int:
    """``count`` steps, or tokens, if there are at most ``FARTHEST``.

    Raises:
        LengthError: when there are more.
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
    """``segment(start)``, recomputed in the backward pass instead of stored."""
    states: Tensor = checkpoint(segment, start, use_reentrant=False, preserve_rng_state=False)
    return states


def vectors_at(
    positions: Float[Tensor, "b L"],
    start: Float[Tensor, " C"],
    weights: Sequence[Tensor],
    flow: Flow,
    solved: Solved | None = None,
    bounds: BoundaryStates | None = None,
) -> Float[Tensor, "b L C"]:
    """``p`` at any times, solved at the distinct ones; see ``Flow.at``."""
    times = positions.detach()
    distinct, index = times.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    vectors = flow.at(distinct, start, weights, solved, bounds)[index]
    if positions.requires_grad:
        # The derivative with respect to time is the right-hand side of the equation.
        velocity = flow.field(start, weights).velocity(times, vectors)
        vectors = vectors + (positions - times).unsqueeze(-1) * velocity
    return vectors
