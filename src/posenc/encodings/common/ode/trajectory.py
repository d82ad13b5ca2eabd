"""Trajectories over many fixed steps as one autograd function."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

SEGMENT = 64
"""Steps per segment, of which the state at the beginning is stored for the backward pass.

Segment boundaries are fixed, so the state at a time does not depend on the other times.
"""

Solve = Callable[[Tensor, Sequence[Tensor], int, int], Tensor]
"""From a state ``[S, C]``, the weights, and the numbers of its step and of steps N, the states
``[N+1, S, C]``."""


def trajectory(
    solve: Solve,
    counts: Sequence[int],
    starts: Float[Tensor, "S C"],
    weights: Sequence[Tensor],
    finish: Callable[[], None],
) -> Float[Tensor, "N S C"]:
    """States after ``counts`` steps from ``starts``, of which one a segment is stored.

    Args:
        solve: the steps of a segment, differentiable as often as asked.
        counts: N numbers of steps, ascending, 0 or more.
        starts: initial values.
        weights: of the dynamics.
        finish: called at the start of each backward pass.
    """
    states: Tensor = _Trajectory.apply(solve, counts, finish, starts, *weights)
    return states


def unrolled(
    solve: Solve, counts: Sequence[int], starts: Float[Tensor, "*S C"], weights: Sequence[Tensor]
) -> Float[Tensor, "N *S C"]:
    """The same by differentiable operations, all of whose stages autograd stores."""
    parts, state = [starts.unsqueeze(0)] if counts[0] == 0 else [], starts
    for begin, length, inside, _ in split(counts):
        states = solve(state, weights, begin, length)
        parts += [states[inside]] if inside else []
        state = states[-1]
    return torch.cat(parts)


class _Trajectory(torch.autograd.Function):
    """Segments are solved again in the backward pass.

    States are kept outside autograd's graph, which frees what it has saved, so that trajectories
    solved together can be differentiated one by one, and under activation checkpointing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        solve: Solve,
        counts: Sequence[int],
        finish: Callable[[], None],
        starts: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.solve, ctx.counts, ctx.finish, ctx.inputs = solve, counts, finish, (starts, *weights)
        ctx.set_materialize_grads(True)
        parts, ctx.bounds, state = [starts.unsqueeze(0)] if counts[0] == 0 else [], [], starts
        for begin, length, inside, _ in split(counts):
            ctx.bounds.append(state)
            states = solve(state, weights, begin, length)
            parts += [states[inside]] if inside else []
            state = states[-1].clone()
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.finish()
        (gradient,) = gradients
        pieces, inputs = split(ctx.counts), ctx.inputs
        if torch.is_grad_enabled():
            trained = [part for part in inputs if part.requires_grad]
            states = unrolled(ctx.solve, ctx.counts, inputs[0], inputs[1:])
            found = iter(
                torch.autograd.grad(states, trained, gradient, create_graph=True, allow_unused=True)
            )
            return None, None, None, *(next(found) if x.requires_grad else None for x in inputs)
        sums = [torch.zeros_like(part) for part in inputs[1:]]
        of_state = torch.zeros_like(gradient[0])
        for bound, (begin, length, inside, rows) in zip(
            reversed(ctx.bounds), reversed(pieces), strict=True
        ):
            of_states = gradient.new_zeros(length + 1, *of_state.shape)
            of_states[length] = of_state
            of_states[inside] += gradient[rows]
            with torch.enable_grad():
                parts = [part.detach().requires_grad_() for part in (bound, *inputs[1:])]
                states = ctx.solve(parts[0], parts[1:], begin, length)
            of_state, *of_weights = torch.autograd.grad(states, parts, of_states)
            for total, part in zip(sums, of_weights, strict=True):
                total += part
        if ctx.counts[0] == 0:
            of_state = of_state + gradient[0]
        return None, None, None, of_state, *sums


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
