"""Trajectories over many fixed steps as one autograd function."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encodings.common.ode.runge_kutta import SEGMENT, Segment, Stepper

DIRECT = 16 * SEGMENT
"""Largest number of steps whose stages are all stored for the backward pass. Beyond it they are
recomputed by segment, and memory grows with the requested times and one state per segment."""


@dataclass(eq=False)
class Tape:
    """Stored segments, or states at their boundaries, for the backward pass.

    Kept outside autograd's graph, so that trajectories solved together can be differentiated one
    by one and under activation checkpointing.
    """

    segments: list[Segment] = field(default_factory=list)
    bounds: list[Tensor] = field(default_factory=list)


def trajectory(
    stepper: Callable[[Sequence[Tensor]], Stepper],
    unrolled: Callable[[Tensor, Sequence[Tensor]], Tensor],
    counts: Sequence[int],
    starts: Float[Tensor, "S C"],
    weights: Sequence[Tensor],
    finish: Callable[[], None],
) -> Float[Tensor, "N S C"]:
    """States after ``counts`` steps from ``starts``.

    Args:
        stepper: builds the ``Stepper`` of given weights.
        unrolled: the same by differentiable operations, for second derivatives.
        counts: N numbers of steps, ascending, 0 or more.
        starts: initial values.
        weights: as in ``Stepper``.
        finish: called at the start of each backward pass.
    """
    states: Tensor = _Trajectory.apply(stepper, unrolled, counts, finish, starts, *weights)  # type: ignore[no-untyped-call]
    return states


class _Trajectory(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        make: Callable[[Sequence[Tensor]], Stepper],
        unrolled: Callable[[Tensor, Sequence[Tensor]], Tensor],
        counts: Sequence[int],
        finish: Callable[[], None],
        starts: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.stepper, ctx.unrolled = make(weights), unrolled
        ctx.counts, ctx.finish, ctx.inputs = counts, finish, (starts, *weights)
        ctx.tape = tape = Tape()
        ctx.set_materialize_grads(True)
        state = ctx.stepper.padded(starts)
        parts = [state.unsqueeze(0)] if counts[0] == 0 else []
        for begin, length, inside, _ in split(counts):
            segment = ctx.stepper.forward(state, begin, length)
            if counts[-1] <= DIRECT:
                tape.segments.append(segment)
            else:
                tape.bounds.append(state)
            if inside:
                parts.append(segment.states[inside])
            state = segment.states[-1].clone()
        return torch.cat(parts)[..., : starts.shape[-1]].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tape: Tape = ctx.tape
        ctx.finish()
        (output_gradient,) = gradients
        if torch.is_grad_enabled():
            starts, *weights = ctx.inputs
            trained = [part for part in ctx.inputs if part.requires_grad]
            input_gradients = iter(
                torch.autograd.grad(
                    ctx.unrolled(starts, weights),
                    trained,
                    output_gradient,
                    create_graph=True,
                    allow_unused=True,
                )
            )
            return (
                None,
                None,
                None,
                None,
                *(next(input_gradients) if part.requires_grad else None for part in ctx.inputs),
            )
        stepper: Stepper = ctx.stepper
        output_gradient = stepper.padded(output_gradient)
        sums = [torch.zeros_like(weight) for weight in ctx.inputs[1:]]
        state = torch.zeros_like(output_gradient[0])
        pieces = list(split(ctx.counts))
        for number in range(len(pieces) - 1, -1, -1):
            begin, length, inside, rows = pieces[number]
            if tape.segments:
                segment = tape.segments[number]
            else:
                segment = stepper.forward(tape.bounds[number], begin, length)
            gradient = output_gradient.new_zeros(length + 1, *state.shape)
            gradient[length] = state
            gradient[inside] += output_gradient[rows]
            state = stepper.backward(segment, gradient, sums)
        if ctx.counts[0] == 0:
            state = state + output_gradient[0]
        return None, None, None, None, state[..., : stepper.dim], *sums


def split(counts: Sequence[int]) -> list[tuple[int, int, list[int], slice]]:
    """Segments up to the last count: first step, length, requested steps in it, their rows."""
    pieces, row = [], int(counts[0] == 0)
    for begin in range(0, counts[-1], SEGMENT):
        end = min(begin + SEGMENT, counts[-1])
        until = bisect_right(counts, end)
        pieces.append(
            (begin, end - begin, [n - begin for n in counts[row:until]], slice(row, until))
        )
        row = until
    return pieces
