"""FLOATER: position vectors from a learned differential equation."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from threading import RLock
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.arguments import Interval, Positive, Width, checked
from posenc.encoding import EmbeddingEncoding, Entry, apply_rotation
from posenc.encoding.prepared import Copies
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.opaque import opaque
from posenc.encodings.common.precision import geometric_frequencies
from posenc.encodings.common.table import fuse, real_positions
from posenc.errors import ArgumentError, LengthError
from posenc.layout import Layout
from posenc.runtime import has_values, is_transformed, widest, without_autocast

Start = Literal["sinusoidal", "random"]
Activation = Literal["relu", "tanh"]
Method = Literal["euler", "midpoint", "rk4", "dopri5"]
Gradient = Literal["direct", "adjoint"]

Step = Annotated[float, Interval(1e-3, 1e3)]
"""Tokens per step of a fixed-step method."""

Tolerance = Annotated[float, Interval(1e-9, 1)]

FARTHEST = 2**20
"""Largest number of steps, or tokens, from 0; steps are sequential."""

SEGMENT = 64
"""Steps per call of a solver, whose backward pass takes time that is quadratic in their number."""

Reached = Callable[[Int[Tensor, " N"]], Float[Tensor, "N C"]]
"""States after sorted, distinct numbers of whole steps from 0."""


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
    """The equation of ``z = exp(-R t) p`` and its solver, with the settings of ``Floater``.

    In this frame, which rotates with R, the solver integrates the trained part only. Weights are
    those of ``Dynamics``. ``rotary``: R rotates pairs of features; otherwise it is 0.
    """

    method: Method
    step: float
    tolerance: float
    gradient: Gradient
    activation: Activation
    unit: float
    rotary: bool

    def slope(
        self, weights: Sequence[Tensor], times: Float[Tensor, "*dims"], z: Float[Tensor, "*dims C"]
    ) -> Float[Tensor, "*dims C"]:
        """``dz/dt``."""
        first, first_bias, second, second_bias = weights
        p = self.rotated(z, times)
        time = (self.unit * times).unsqueeze(-1).expand(*z.shape[:-1], 1)
        hidden = F.linear(torch.cat([p, time], dim=-1), first, first_bias)
        hidden = hidden.relu() if self.activation == "relu" else hidden.tanh()
        learned = F.linear(torch.cat([hidden, time], dim=-1), second, second_bias)
        return self.rotated(self.unit * learned, -times)

    def rotated(
        self, z: Float[Tensor, "*dims C"], times: Float[Tensor, "*dims"]
    ) -> Float[Tensor, "*dims C"]:
        """``exp(R t) z``: the pair (sin α, cos α) becomes that of ``α + rate · t``."""
        if not self.rotary:
            return z
        rates = geometric_frequencies(z.shape[-1] // 2, z.shape[-1], 10000.0, like=z)
        angles = -times.unsqueeze(-1) * rates
        return apply_rotation(z, angles.cos(), angles.sin(), "adjacent")

    def vectors(
        self,
        positions: Float[Tensor, "b L"],
        start: Float[Tensor, " C"],
        weights: Sequence[Tensor],
        reached: Reached | None = None,
    ) -> Float[Tensor, "b L C"]:
        """``p`` at any times, each independent of the others.

        Args:
            positions: the times in tokens.
            start: ``p(0)``.
            weights: of the dynamics.
            reached: source of states after whole steps; None solves from ``start``.
        """
        detached = positions.detach()
        times, index = detached.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        if not len(times):
            return start.new_zeros(*positions.shape, len(start))
        if self.method == "dopri5":
            z = self._adaptive(times, start, weights)
        else:
            z = self._by_steps(times, start, weights, reached)
        if not positions.requires_grad:
            return self.rotated(z, times)[index]
        z = z[index]
        moved = (positions - detached).unsqueeze(-1) * self.slope(weights, detached, z)
        return self.rotated(z + moved, positions)

    def _adaptive(
        self, times: Float[Tensor, " N"], start: Float[Tensor, " C"], weights: Sequence[Tensor]
    ) -> Float[Tensor, "N C"]:
        """``z`` at times. Steps depend on ``start`` alone; between them the solver interpolates."""
        require_near(int(times.abs().max()))
        behind, ahead = (
            self._solve(weights, start, torch.cat([times.new_zeros(1), outwards]))[1:]
            for outwards in (times[times < 0].flip(0), times[times > 0])
        )
        at_zero = start.expand(int((times == 0).sum()), -1)
        return torch.cat([behind.flip(0), at_zero, ahead])

    def _by_steps(
        self,
        times: Float[Tensor, " N"],
        start: Float[Tensor, " C"],
        weights: Sequence[Tensor],
        reached: Reached | None,
    ) -> Float[Tensor, "N C"]:
        """``z`` at times: whole steps from 0, then a shorter one from the last knot."""
        steps = (times / self.step).trunc()
        require_near(int(steps.abs().max()))
        numbers, index = steps.long().unique(return_inverse=True)  # type: ignore[no-untyped-call]
        z = self.knots(numbers, start[None], weights)[:, 0] if reached is None else reached(numbers)
        z = z[index]
        knot = steps * self.step
        rest = times - knot
        if not rest.any():
            return z

        def shorter(share: Tensor, z: Tensor) -> Tensor:
            return rest.unsqueeze(-1) * self.slope(weights, knot + share * rest, z)

        found: Tensor = load_solvers().odeint(
            shorter, z, rest.new_tensor([0.0, 1.0]), method=self.method
        )[1]
        return found

    def knots(
        self, numbers: Int[Tensor, " N"], starts: Float[Tensor, "S C"], weights: Sequence[Tensor]
    ) -> Float[Tensor, "N S C"]:
        """``z`` after sorted numbers of whole steps from 0, for a batch of ``p(0)``."""
        low, high = min(int(numbers[0]), 0), max(int(numbers[-1]), 0)
        behind, ahead = (self.advance(starts, 0, end, weights) for end in (low, high))
        return torch.cat([behind.flip(0)[:-1], ahead])[numbers - low]

    def advance(
        self, states: Float[Tensor, "S C"], begin: int, end: int, weights: Sequence[Tensor]
    ) -> Float[Tensor, "N S C"]:
        """``states`` after ``begin`` whole steps from 0, and those after each step to ``end``."""
        sign = 1 if end > begin else -1
        parts = [states.unsqueeze(0)]
        for first in range(begin, end, sign * SEGMENT):
            last = first + sign * min(SEGMENT, abs(end - first))
            times = self.step * torch.arange(first, last + sign, sign, device=states.device)
            parts.append(self._solve(weights, parts[-1][-1], times.to(states))[1:])
        return torch.cat(parts)

    def _solve(
        self, weights: Sequence[Tensor], start: Float[Tensor, "*S C"], times: Float[Tensor, " N"]
    ) -> Float[Tensor, "N *S C"]:
        """``z`` at ``times``, from ``start`` at the first; a fixed step between two of them."""
        solve, options = load_solvers().odeint, {}
        if self.gradient == "adjoint" and torch.is_grad_enabled():
            solve, options = load_solvers().odeint_adjoint, {"adjoint_params": tuple(weights)}
        tolerances = {"rtol": self.tolerance, "atol": self.tolerance}
        slope = partial(self.slope, weights)
        states: Tensor = solve(slope, start, times, method=self.method, **tolerances, **options)
        return states


def require_near(count: int) -> None:
    """Raise ``LengthError`` for more than ``FARTHEST`` steps, or tokens."""
    if count > FARTHEST:
        raise LengthError(
            "positions",
            expected=f"up to {FARTHEST} steps from 0, which the solver takes one by one",
            got=f"{count}",
            remedy="Subtract the first time, use a larger unit of time, or raise `step`.",
        )


class _Resolved(torch.autograd.Function):
    """Solved states whose gradient is that of solving them again from the parameters.

    Autograd saves nothing, so that blocks that share the states can be differentiated one by one,
    and under activation checkpointing.
    """

    @staticmethod
    def forward(
        ctx: Any, solve: Callable[..., Tensor], states: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.solve, ctx.parameters = solve, parameters
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        graph, trained = torch.is_grad_enabled(), [p for p in ctx.parameters if p.requires_grad]
        with torch.enable_grad():
            states = ctx.solve(*ctx.parameters)
        found = iter(
            torch.autograd.grad(
                states, trained, gradients, create_graph=graph, materialize_grads=True
            )
        )
        return None, None, *(next(found) if p.requires_grad else None for p in ctx.parameters)


class Solutions:
    """States of blocks that share their dynamics, solved as one batch.

    They are reused while the parameters, which are compared at each call, stay as they are. Copies
    and pickles start without any.

    Args:
        blocks: all of them.
    """

    def __init__(self, blocks: Sequence[Floater] = ()) -> None:
        self.blocks = blocks
        self._lock = RLock()
        self._copies = Copies([])
        self._stored: dict[int, Float[Tensor, "N S C"]] = {}
        """States from 0 on, by the sign of the times."""
        self._last: tuple[Tensor, Sequence[Tensor], Tensor] | None = None
        """Numbers, parameters and states of the last call with a graph."""

    def __getstate__(self) -> tuple[Sequence[Floater]]:
        return (self.blocks,)

    def __setstate__(self, state: tuple[Sequence[Floater]]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def reached(
        self, flow: Flow, parameters: Sequence[Tensor], numbers: Int[Tensor, " N"]
    ) -> Float[Tensor, "N S C"]:
        """``z`` of all blocks after sorted, distinct numbers of whole steps from 0.

        Args:
            flow: equation and solver.
            parameters: ``p(0)`` of each block, and the four weights of the dynamics.
            numbers: of steps.
        """
        with self._lock:
            if is_transformed() or not self._copies.hold(parameters):
                self._copies, self._stored, self._last = Copies(parameters), {}, None
            with torch.inference_mode(False), torch.no_grad():
                values = self._read(flow, parameters, numbers)
            if not (torch.is_grad_enabled() and any(p.requires_grad for p in parameters)):
                return values
            if self._last is not None:
                known, of, states = self._last
                same = all(a is b for a, b in zip(of, parameters, strict=True))
                if same and torch.equal(known, numbers):
                    return states

            def solve(*parameters: Tensor) -> Tensor:
                return flow.knots(numbers, *_batch(parameters))

            solved: Tensor = _Resolved.apply(solve, values, *parameters)
            self._last = numbers, parameters, solved
            return solved

    def _read(self, flow: Flow, parameters: Sequence[Tensor], numbers: Tensor) -> Tensor:
        """States without a graph, stored ones and those that follow them."""
        starts, weights = _batch(parameters)
        for sign, count in ((-1, -int(numbers[0])), (1, int(numbers[-1]))):
            states = self._stored.get(sign, starts.unsqueeze(0))
            last = len(states) - 1
            if count > last:
                count = max(count, last + min(len(states), SEGMENT))  # copies take time as well
                more = flow.advance(states[-1], sign * last, sign * count, weights)
                states = torch.cat([states, more[1:]])
            self._stored[sign] = states
        behind, ahead = self._stored[-1], self._stored[1]
        if numbers[0] >= 0:
            return ahead[numbers]
        return torch.cat([behind.flip(0)[:-1], ahead])[numbers + len(behind) - 1]


def _batch(parameters: Sequence[Tensor]) -> tuple[Float[Tensor, "S C"], list[Tensor]]:
    """The blocks' ``p(0)`` and the four weights of the dynamics, in float64 if there is one."""
    wide = [p.to(widest(p.device)) for p in parameters]
    return torch.stack(wide[:-4]), wide[-4:]


def _compute(positions: Tensor, weights: Sequence[Tensor], settings: str) -> Tensor:
    start, *learned = weights
    return Flow(**json.loads(settings)).vectors(positions, start, learned)


flow_at = opaque("flow", _compute)


class Dynamics(nn.Module):
    """The weights of the trained part of h: two layers, both with time as an extra input."""

    def __init__(self, dim: int, hidden: int, *, zero: bool) -> None:
        super().__init__()
        self.zero = zero
        self.first_weight = nn.Parameter(torch.empty(hidden, dim + 1))
        self.first_bias = nn.Parameter(torch.empty(hidden))
        self.second_weight = nn.Parameter(torch.empty(dim, hidden + 1))
        self.second_bias = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values; with ``zero``, such that h is 0."""
        nn.init.xavier_normal_(self.first_weight)
        nn.init.xavier_normal_(self.second_weight)
        for parameter in (self.first_bias, self.second_bias):
            nn.init.zeros_(parameter)
        if self.zero:
            nn.init.zeros_(self.second_weight)

    def forward(self) -> list[Tensor]:
        """Weight and bias of the first layer, then of the second."""
        return [self.first_weight, self.first_bias, self.second_weight, self.second_bias]


class Floater(EmbeddingEncoding):
    """FLOATER: a position's vector is the state of a learned differential equation at that time.

    ``x + p(t)`` in every block, ``dp/dt = h(t, p)``, ``p(0)`` trained (section 3), with
    ``h(t, p) = R p + u · (W_2 [a(W_1 [p; u t] + b_1); u t] + b_2)``.

    ``t`` is the position ``[B|1, L]`` in tokens, any real; ``p(0)`` ``[C]``, one per block; ``W_1``
    ``[E, C+1]``, ``W_2`` ``[C, E+1]``, shared by all blocks; ``u`` the time per token. Claims:
    absolute, one axis, trainable; p(t) does not depend on the other requested times. Solved for
    the sorted distinct times, in float64. Cost: C·E for each of ``max |t| / step`` sequential
    steps (set by the tolerance with "dopri5"), independent of the number of rows and tokens.
    Blocks that share the dynamics take fixed steps as one batch, and their states are kept until a
    parameter changes, so decoding a token takes one step; "dopri5" and compiled code solve from 0
    at each call, for each block. At most 2^20 steps are taken.

    Differs from the official code, which has separate flows for queries, keys and values of a
    block after the projections; here one flow is added before them, as in the paper. ``R`` is the
    rotation of the sinusoidal encoding, which the official model has as a second encoding before
    the first block; the solver works in the frame rotating with it.

    Args:
        dim: width C.
        start: ``"sinusoidal"``: ``p(0)`` = (0, 1, 0, 1, …) and the trained part 0, so that p is
            initially the sinusoidal encoding (for even C); ``"random"``: no R, the official
            initial values.
        hidden: E; C by default.
        activation: ``"tanh"``, with which p grows with t² at most, or the official ``"relu"``,
            with which it may grow exponentially past the trained times.
        method: ``"rk4"``, ``"euler"`` or ``"midpoint"`` with fixed steps counted from 0 and a
            shorter last one; ``"dopri5"`` has adaptive steps.
        step: tokens per step of a fixed-step method (1/5 in the official code).
        tolerance: relative and absolute, of ``"dopri5"``.
        gradient: ``"direct"`` through all steps, whose graph the backward pass holds, or by the
            ``"adjoint"`` equation, which takes longer and holds the states alone.
        unit: u.

    Raises:
        ArgumentError: when an option is out of its domain, or torchdiffeq is not installed.
        UnknownNameError: for another ``start``, ``activation``, ``method`` or ``gradient``.
        LengthError: in ``forward``, for a time more than 2^20 steps from 0.

    Reference: Liu et al. 2020, "Learning to Encode Position for Transformer with Continuous
    Dynamical Model", https://arxiv.org/abs/2003.09229.

    >>> import posenc, torch
    >>> encoding = posenc.create("floater", dim=4)
    >>> encoding.embed(torch.zeros(1, 2, 4), posenc.Layout.sequence(2))[0, 0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """

    every_layer = True

    @checked
    def __init__(
        self,
        *,
        dim: Width,
        start: Start = "sinusoidal",
        hidden: Width | None = None,
        activation: Activation = "tanh",
        method: Method = "rk4",
        step: Step = 1.0,
        tolerance: Tolerance = 1e-6,
        gradient: Gradient = "direct",
        unit: Positive = 0.01,
    ) -> None:
        super().__init__()
        self.dim = dim
        hidden = dim if hidden is None else hidden
        load_solvers()
        self.flow = Flow(
            method=method,
            step=step,
            tolerance=tolerance,
            gradient=gradient,
            activation=activation,
            unit=unit,
            rotary=start == "sinusoidal",
        )
        self._settings = json.dumps(asdict(self.flow))
        self.dynamics = Dynamics(dim, hidden, zero=start == "sinusoidal")
        self.start = nn.Parameter(torch.empty(dim))
        self.solutions = Solutions([self])
        self._reset_start()

    def reset_parameters(self) -> None:
        """Set or draw the initial values, those of the shared dynamics too."""
        self.dynamics.reset_parameters()
        self._reset_start()

    @torch.no_grad()
    def _reset_start(self) -> None:
        if self.flow.rotary:
            self.start.zero_()
            self.start[1::2] = 1
        else:
            nn.init.xavier_uniform_(self.start.unsqueeze(0))

    def extra_repr(self) -> str:
        return f"{self.flow}"

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        return fuse(x, self.path(real_positions(layout)), "add")

    def path(self, times: Float[Tensor, "b L"]) -> Float[Tensor, "b L C"]:
        """``p`` at real times, in float64 where the device has it."""
        wide = widest(times.device)
        learned: list[Tensor] = self.dynamics()
        start, *weights = (weight.to(wide) for weight in (self.start, *learned))
        times = times.to(wide)
        with without_autocast(times.device):
            if not has_values(times) or is_transformed():
                return flow_at(times, [start, *weights], self._settings)
            blocks = self._together()
            parameters = [*(block.start for block in blocks), *learned]

            def reached(numbers: Tensor) -> Tensor:
                states = self.solutions.reached(self.flow, parameters, numbers)
                return states[:, blocks.index(self)]

            return self.flow.vectors(times, start, weights, reached)

    def _together(self) -> list[Floater]:
        """The blocks of the same dynamics, settings and kind of initial value."""
        found = [
            block
            for block in self.solutions.blocks
            if (block.dynamics, block.flow) == (self.dynamics, self.flow)
            and type(block.start) is type(self.start)
            and (block.start.dtype, block.start.device) == (self.start.dtype, self.start.device)
            and block.start.untyped_storage().nbytes()  # FSDP frees it
        ]
        return found if self in found else [self]


def _share(blocks: Sequence[Floater]) -> None:
    solutions = Solutions(blocks)
    for block in blocks:
        block.dynamics, block.solutions = blocks[0].dynamics, solutions


ENTRY = Entry(
    factory=Floater,
    summary="Adds, in every block, the state of a learned differential equation at the position.",
    relative=False,
    trainable=True,
    extrapolates="Any real time exists; use past the trained ones is uncertain.",
    cost="C·E·max t / step in sequential steps, for all blocks together",
    sharing=_share,
)
