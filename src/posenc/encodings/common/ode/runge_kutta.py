"""Fixed Runge-Kutta steps of FLOATER's equation for a batch of initial values, and their backward.

Terms that depend on time alone (the rotation, the time columns of both layers) are computed for a
whole segment of steps at once, which leaves two sequential matrix products per stage. The backward
pass runs the steps in reverse and takes the weights' gradients from one product per segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encodings.common.ode.field import Field

SEGMENT = 64
"""Steps per segment, for which time-dependent terms are computed and stages stored at once.

Segment boundaries are fixed, so the state at a time does not depend on the other times.
"""


@dataclass(frozen=True)
class Tableau:
    """Butcher tableau of an explicit Runge-Kutta method.

    Args:
        nodes: times of the stages, as fractions of the step.
        inner: per stage, weights of the slopes of earlier stages.
        outer: weights of all slopes in the step.
    """

    nodes: tuple[float, ...]
    inner: tuple[tuple[float, ...], ...]
    outer: tuple[float, ...]


TABLEAUS = {
    "euler": Tableau((0.0,), ((),), (1.0,)),
    "midpoint": Tableau((0.0, 1 / 2), ((), (1 / 2,)), (0.0, 1.0)),
    "rk4": Tableau(
        (0.0, 1 / 3, 2 / 3, 1.0),
        ((), (1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0)),
        (1 / 8, 3 / 8, 3 / 8, 1 / 8),
    ),
}
"""Named as in torchdiffeq, whose "rk4" is Kutta's 3/8 rule."""


def step(
    tableau: Tableau,
    slope: Callable[[Tensor, Tensor], Tensor],
    times: Float[Tensor, "*dims"],
    size: Float[Tensor, "*dims"],
    state: Float[Tensor, "*dims C"],
) -> Float[Tensor, "*dims C"]:
    """``state`` after one step of any size; differentiable as often as ``slope`` is."""
    slopes: list[Tensor] = []
    for node, weights in zip(tableau.nodes, tableau.inner, strict=True):
        inside = state + _combined(weights, slopes) if slopes else state
        slopes.append(size.unsqueeze(-1) * slope(times + node * size, inside))
    return state + _combined(tableau.outer, slopes)


def _combined(weights: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
    terms = (weight * slope for weight, slope in zip(weights, slopes, strict=True) if weight)
    return torch.stack(list(terms)).sum(0)


@dataclass
class Segment:
    """Stored stages of consecutive steps, read by the backward pass."""

    begin: int
    states: Float[Tensor, "N+1 S C"]
    points: Float[Tensor, "N s S C"]
    hidden: Float[Tensor, "N s S E"]


class Stepper:
    """Steps of one size of ``dz/dt = T(t)⁻¹ u (W_2 [a(W_1 [T(t) z; ut] + b_1); ut] + b_2)``.

    ``T(t)`` rotates pairs of features at ``rates``; without rates it is the identity. An odd last
    feature is paired with a zero.

    Args:
        tableau: the method.
        size: step in tokens, negative for steps before 0.
        field: the equation; weights ``W_1 [E, C+1]``, ``b_1 [E]``, ``W_2 [C, E+1]``, ``b_2 [C]``.
    """

    def __init__(self, tableau: Tableau, size: float, field: Field) -> None:
        first, first_bias, second, second_bias = (w.detach().clone() for w in field.weights)
        self.tableau, self.size, self.unit = tableau, size, field.unit
        self.relu, rates, unit = field.activation == "relu", field.rates, field.unit
        self.dim, hidden = second.shape[0], second.shape[1] - 1
        spare = self.dim % 2 if len(rates) else 0
        self.rates = torch.cat([rates, rates.new_zeros(spare)])
        pad = torch.nn.functional.pad
        self.inner = pad(first[:, :-1], (0, spare))  # [E, C]
        self.inner_time, self.inner_bias = first[:, -1], first_bias
        self.outer = pad(second[:, :-1], (0, 0, 0, spare)) * size * unit  # [C, E]
        self.outer_time = pad(second[:, -1], (0, spare)) * size * unit
        self.outer_bias = pad(second_bias, (0, spare)) * size * unit
        self.width, self.hidden = self.dim + spare, hidden
        like = first.new_tensor
        self.stages = [like([1.0, *weights]) for weights in tableau.inner]
        self.whole = like([1.0, *tableau.outer])
        # Weights of a stage's slope in the step, then in later stages, the last first.
        count = len(tableau.nodes)
        self.reverse = [
            like([tableau.outer[i], *(tableau.inner[j][i] for j in range(count - 1, i, -1))])
            for i in range(count)
        ]

    def padded(self, state: Float[Tensor, "*dims D"]) -> Float[Tensor, "*dims C"]:
        """``state`` with a zero appended if an odd last feature needs a partner."""
        return torch.nn.functional.pad(state, (0, self.width - self.dim))

    def _times(self, begin: int, count: int) -> Float[Tensor, "N s"]:
        knots = torch.arange(begin, begin + count, device=self.inner.device)
        nodes = self.inner.new_tensor(self.tableau.nodes)
        return self.size * (knots.unsqueeze(-1) + nodes)

    def _rotations(self, times: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Complex factors per pair, for each step and stage, and their conjugates.

        Lazy conjugates are avoided: they are lost inside an operator of a compiled graph.
        """
        if not len(self.rates):
            return [None] * times.numel()
        angles = times.reshape(-1, 1) * self.rates
        cosine, sine = angles.cos(), angles.sin()
        forward, inverse = torch.complex(cosine, -sine), torch.complex(cosine, sine)
        return list(zip(forward.unbind(), inverse.unbind(), strict=True))

    @torch.no_grad()
    def forward(self, state: Float[Tensor, "S C"], begin: int, count: int) -> Segment:
        """``count`` steps from ``state``, which is ``begin`` steps from 0."""
        stages, batch = len(self.tableau.nodes), len(state)
        times = self._times(begin, count)
        scaled = self.unit * times.unsqueeze(-1)
        inner = (scaled * self.inner_time + self.inner_bias).flatten(0, 1).unbind()
        outer = (scaled * self.outer_time + self.outer_bias).flatten(0, 1).unbind()
        points = state.new_empty(count * stages, batch, self.width)
        hidden = state.new_empty(count * stages, batch, self.hidden)
        states = state.new_empty(count + 1, batch, self.width)
        rows = state.new_empty(1 + stages, batch, self.width)  # state, then slopes
        inside, change = torch.empty_like(state), torch.empty_like(state)
        states[0], rows[0] = state, state
        work = Work.of(rows, inside, change, points, states)
        terms = zip(inner, outer, self._rotations(times), hidden.unbind(), strict=True)
        for number in range(count):
            for stage in range(stages):
                first, second, rotation, active = next(terms)
                self._slope(work, number * stages + stage, stage, first, second, rotation, active)
            torch.mv(work.until[stages], self.whole, out=work.states[number + 1])
            work.rows[0].copy_(work.states[number + 1])
        shape = (count, stages, batch, -1)
        return Segment(begin, states, points.view(shape), hidden.view(shape))

    def _slope(
        self,
        work: Work,
        index: int,
        stage: int,
        inner: Tensor,
        outer: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        hidden: Tensor,
    ) -> None:
        """One evaluation of the dynamics for the whole batch: the slope of a stage."""
        point = work.points[index]
        source = work.rows[0]
        if stage:
            source = work.inside if rotation is not None else point.view(-1)
            torch.mv(work.until[stage], self.stages[stage], out=source)
        if rotation is not None:
            pairs = work.inside_pairs if stage else work.row_pairs[0]
            torch.mul(pairs, rotation[0], out=work.point_pairs[index])
        elif not stage:
            point.view(-1).copy_(source)
        torch.addmm(inner, point, self.inner.t(), out=hidden)
        hidden.relu_() if self.relu else hidden.tanh_()
        if rotation is None:
            torch.addmm(outer, hidden, self.outer.t(), out=work.slopes[stage])
        else:
            torch.addmm(outer, hidden, self.outer.t(), out=work.change)
            torch.mul(work.change_pairs, rotation[1], out=work.row_pairs[1 + stage])

    @torch.no_grad()
    def backward(
        self, segment: Segment, gradient: Float[Tensor, "N+1 S C"], sums: Sequence[Tensor]
    ) -> Float[Tensor, "S C"]:
        """The gradient of a segment's first state; weight gradients are added to ``sums``."""
        count, stages, batch, _ = segment.points.shape
        times = self._times(segment.begin, count)
        rotations = self._rotations(times)
        active = segment.hidden.flatten(0, 1)
        slopes = ((active > 0).to(active) if self.relu else 1 - active.square()).unbind()
        outer = gradient.new_empty(count * stages, batch, self.width)
        inner = gradient.new_empty(count * stages, batch, self.hidden)
        rows = gradient.new_empty(1 + stages, batch, self.width)  # state, then stages, last first
        share, back = torch.empty_like(rows[0]), torch.empty_like(rows[0])
        work = Work.of(rows, share, back, outer, gradient)
        ones = gradient.new_ones(1 + stages)
        inners, behind = inner.unbind(), torch.empty_like(inner[0])
        rows[0] = gradient[count]
        total = torch.empty_like(work.rows[0])
        for number in range(count - 1, -1, -1):
            for stage in range(stages - 1, -1, -1):
                index, after = number * stages + stage, stages - 1 - stage
                rotation, change = rotations[index], work.points[index]
                if rotation is None:
                    torch.mv(work.until[after], self.reverse[stage], out=change.view(-1))
                else:
                    torch.mv(work.until[after], self.reverse[stage], out=work.inside)
                    torch.mul(work.inside_pairs, rotation[0], out=work.point_pairs[index])
                torch.mm(change, self.outer, out=behind)
                torch.mul(behind, slopes[index], out=inners[index])
                if rotation is None:
                    torch.mm(inners[index], self.inner, out=work.slopes[after])
                else:
                    torch.mm(inners[index], self.inner, out=work.change)
                    torch.mul(work.change_pairs, rotation[1], out=work.row_pairs[1 + after])
            torch.addmv(work.states[number], work.until[stages], ones, out=total)
            work.rows[0].copy_(total)
        self._add_weights(sums, segment, times, inner, outer)
        return rows[0].clone()

    def _add_weights(
        self,
        sums: Sequence[Tensor],
        segment: Segment,
        times: Float[Tensor, "N s"],
        inner: Float[Tensor, "M S E"],
        outer: Float[Tensor, "M S C"],
    ) -> None:
        scaled = self.unit * times.flatten()
        outer = outer[..., : self.dim] * self.size * self.unit
        points = segment.points[..., : self.dim].flatten(0, 2)
        first, first_bias, second, second_bias = sums
        first[:, :-1] += inner.flatten(0, 1).t() @ points
        first[:, -1] += scaled @ inner.sum(1)
        first_bias += inner.sum((0, 1))
        second[:, :-1] += outer.flatten(0, 1).t() @ segment.hidden.flatten(0, 2)
        second[:, -1] += scaled @ outer.sum(1)
        second_bias += outer.sum((0, 1))


@dataclass(frozen=True)
class Work:
    """Flat and complex views of the buffers that steps write to."""

    rows: Sequence[Tensor]
    row_pairs: Sequence[Tensor]
    slopes: Sequence[Tensor]
    until: Sequence[Tensor]
    inside: Tensor
    inside_pairs: Tensor
    change: Tensor
    change_pairs: Tensor
    points: Sequence[Tensor]
    point_pairs: Sequence[Tensor]
    states: Sequence[Tensor]

    @staticmethod
    def of(rows: Tensor, inside: Tensor, change: Tensor, points: Tensor, states: Tensor) -> Work:
        flat = rows.flatten(1)
        return Work(
            rows=flat.unbind(),
            row_pairs=_pairs(rows).unbind(),
            slopes=rows[1:].unbind(),
            until=[flat[: 1 + count].t() for count in range(len(rows))],
            inside=inside.view(-1),
            inside_pairs=_pairs(inside),
            change=change,
            change_pairs=_pairs(change),
            points=points.unbind(),
            point_pairs=_pairs(points).unbind(),
            states=states.flatten(1).unbind(),
        )


def _pairs(x: Tensor) -> Tensor:
    """A complex view of pairs of features; ``x`` itself if their number is odd."""
    if x.shape[-1] % 2:
        return x
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
