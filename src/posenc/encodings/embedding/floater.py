"""FLOATER: position vectors from a learned differential equation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Interval, Positive, Width, checked
from posenc.encoding import EmbeddingEncoding, Encoding
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.fusion import fuse
from posenc.encodings.common.ode.field import Activation
from posenc.encodings.common.ode.flow import Flow, Gradient, Method, load_solvers, vectors_at
from posenc.encodings.common.ode.solutions import Solutions, flow_at
from posenc.encodings.common.table import real_positions
from posenc.entry import Claims, Entry
from posenc.layout import Layout
from posenc.runtime import has_values, is_transformed, widest, without_autocast

Start = Literal["sinusoidal", "random"]

Step = Annotated[float, Interval(1e-3, 1e3)]
"""Tokens a step; the solver keeps a state for each step."""

Tolerance = Annotated[float, Interval(1e-9, 1)]


class Affine(nn.Module):
    """Weight ``[O, I]`` and bias ``[O]`` of an affine map that a solver applies."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Weight and bias."""
        return self.weight, self.bias


class Dynamics(nn.Module):
    """The weights of the trained part of h: two layers, both with time as an extra input."""

    def __init__(self, dim: int, hidden: int, *, zero: bool) -> None:
        super().__init__()
        self.zero = zero
        self.first = Affine(dim + 1, hidden)
        self.second = Affine(hidden + 1, dim)
        self.solutions = Solutions()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values; with ``zero``, such that h is 0."""
        for layer in (self.first, self.second):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        if self.zero:
            nn.init.zeros_(self.second.weight)

    def forward(self) -> list[Tensor]:
        """Weight and bias of the first layer, then of the second."""
        return [*self.first(), *self.second()]


class Floater(EmbeddingEncoding):
    """FLOATER: a position's vector is the state of a learned differential equation at that time.

    ``x + p(t)`` in every block, ``dp/dt = h(t, p)``, ``p(0)`` trained (section 3), with
    ``h(t, p) = R p + u · (W_2 [a(W_1 [p; u t] + b_1); u t] + b_2)``.

    ``t`` is the position ``[B|1, L]`` in tokens, any real; ``p(0)`` ``[C]``, one per block; ``W_1``
    ``[E, C+1]``, ``W_2`` ``[C, E+1]``, shared by all blocks; ``u`` the time per token. Claims:
    absolute, one axis, trainable; p(t) does not depend on the other requested times. Solved for
    the sorted distinct times, in float64. Cost: C·E for each of ``max |t| / step`` sequential
    steps (set by the tolerance with "dopri5"), independent of the number of rows and tokens.
    Blocks that share the dynamics take fixed steps as one batch. Without a graph, solved states
    are cached until a parameter changes, up to 128 MiB per stack (and per process for compiled
    code), so decoding a token takes one step; with "dopri5" states every 64 tokens are. With a
    graph, memory grows with the distinct times and one state per 64 steps. At most 2^20 steps are
    taken.

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
        gradient: ``"direct"`` through all steps, or by the ``"adjoint"`` equation, which stores no
            steps.
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
        self._settings = self.flow.to_text()
        self.dynamics = Dynamics(dim, hidden, zero=start == "sinusoidal")
        self.start = nn.Parameter(torch.empty(dim))
        self._adaptive = Solutions()
        self.dynamics.solutions.join(self)
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.dynamics.solutions.join(self)

    def extra_repr(self) -> str:
        return f"{self.flow}"

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        return fuse(x, self.path(real_positions(layout)), "add")

    def path(self, times: Float[Tensor, "b L"]) -> Float[Tensor, "b L C"]:
        """``p`` at real times, in float64 where the device has it."""
        wide = widest(times.device)
        weights = [weight.to(wide) for weight in (self.start, *self.weights())]
        with without_autocast(times.device):
            if not has_values(times) or is_transformed():
                return flow_at(times.to(wide), weights, self._settings)
            return self._solved(times.to(wide), *weights)

    def weights(self) -> list[Tensor]:
        """Weight and bias of both layers of the dynamics."""
        weights: list[Tensor] = self.dynamics()
        return weights

    def _solved(
        self, times: Float[Tensor, "b L"], start: Tensor, *weights: Tensor
    ) -> Float[Tensor, "b L C"]:
        """``path`` with cached states, or states solved for all blocks at once."""
        inputs = (start, *weights)
        graph = torch.is_grad_enabled() and any(part.requires_grad for part in inputs)
        if self.flow.method == "dopri5" and not graph:
            with self._adaptive.bounds(self) as bounds:
                return vectors_at(times, start, weights, self.flow, bounds=bounds)
        if self.flow.method == "dopri5" or (self.flow.gradient == "adjoint" and graph):
            return vectors_at(times, start, weights, self.flow)
        solutions = self.dynamics.solutions
        return vectors_at(
            times, start, weights, self.flow, lambda numbers: solutions.reached(self, numbers)
        )


def _share(layers: int, arguments: Mapping[str, Any]) -> list[Encoding]:
    """Blocks with their own ``p(0)`` and shared dynamics."""
    blocks = [Floater(**arguments) for _ in range(layers)]
    for block in blocks[1:]:
        block.dynamics = blocks[0].dynamics
        block.dynamics.solutions.join(block)
    return [Encoding.of(block) for block in blocks]


ENTRY = Entry(
    factory=Floater,
    summary="Adds, in every block, the state of a learned differential equation at the position.",
    claims=Claims(
        relative=False,
        trainable=True,
        extrapolates="Any real time exists; use past the trained ones is uncertain.",
        cost="C·E·max t / step in sequential steps, for all blocks together",
    ),
    sharing=_share,
)
