"""Position vectors by recursion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Width
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.precision import geometric_frequencies
from posenc.encodings.common.recurrence import gated_at, gated_orbit, linear_at, linear_orbit
from posenc.encodings.common.table import fuse, real_positions
from posenc.errors import LengthError
from posenc.layout import Layout
from posenc.runtime import has_values, widest, without_autocast

StepKind = Literal["linear", "free", "gru"]
AngleFunction = Callable[[Tensor], Tensor]


class Step(nn.Module, ABC):
    """The map from a position's vector to the next; called, it gives ``p_0`` and its parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.empty(dim))

    @abstractmethod
    def reset_parameters(self) -> None:
        """Set the initial values."""

    @abstractmethod
    def forward(self) -> list[Tensor]:
        """``p_0`` and the step's parameters, in float64 where the device has it."""

    def _wide(self, *weights: Tensor) -> list[Tensor]:
        return [weight.to(widest(weight.device)) for weight in weights]


class LinearStep(Step):
    """``p -> c + A (p - c)``."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.centre = nn.Parameter(torch.empty(dim))
        self.weight = nn.Parameter(torch.empty(dim, dim))

    @abstractmethod
    def transition(self) -> Float[Tensor, "C C"]:
        """A, in float64 where the device has it."""

    def forward(self) -> list[Tensor]:
        return [*self._wide(self.start, self.centre), self.transition()]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.centre.zero_()
        self.start.zero_()
        self.start[1::2] = 1
        self.weight.zero_()

    def _rotation(
        self, diagonal_of: AngleFunction, off_diagonal_of: AngleFunction
    ) -> Float[Tensor, "C C"]:
        """The matrix with blocks ``[[a, b], [-b, a]]`` of the sinusoidal encoding's angles.

        Recomputed at each call, so that narrow dtypes round trained values only.
        """
        (start,) = self._wide(self.start)
        dim = len(start)
        angles = geometric_frequencies(dim // 2, dim, 10000.0, like=start)
        diagonal = torch.ones_like(start)
        diagonal[: 2 * len(angles)] = diagonal_of(angles).repeat_interleave(2)
        off_diagonal = torch.zeros_like(start)[1:]
        off_diagonal[::2] = off_diagonal_of(angles)
        return diagonal.diag() + off_diagonal.diag(1) - off_diagonal.diag(-1)


class RotationStep(LinearStep):
    """A is a rotation for any weight: ``(I + S)(I - S)^-1``, ``S = S_0 + W - W^T``."""

    def transition(self) -> Float[Tensor, "C C"]:
        (weight,) = self._wide(self.weight)
        one = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        skew = weight - weight.mT + self._rotation(torch.ones_like, half_tangent) - one
        # I - S is invertible for every skew-symmetric S, so the solver's status is not read.
        rotation: Tensor = torch.linalg.solve_ex(one - skew, one + skew, left=False)[0]
        return rotation


class FreeStep(LinearStep):
    """A is ``A_0 + W``."""

    def transition(self) -> Float[Tensor, "C C"]:
        return self._wide(self.weight)[0] + self._rotation(torch.cos, torch.sin)


def half_tangent(angles: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Entries of S for which ``(I + S)(I - S)^-1`` rotates by the angles."""
    return torch.tan(angles / 2)


class GatedStep(Step):
    """A gated recurrent unit without input."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.recurrent = nn.Parameter(torch.empty(3 * dim, dim))
        self.input_bias = nn.Parameter(torch.empty(3 * dim))
        self.state_bias = nn.Parameter(torch.empty(3 * dim))

    def reset_parameters(self) -> None:
        bound = len(self.start) ** -0.5
        for weight in (self.recurrent, self.input_bias, self.state_bias):
            nn.init.uniform_(weight, -bound, bound)
        nn.init.uniform_(self.start, -1.0, 1.0)

    def forward(self) -> list[Tensor]:
        return self._wide(self.start, self.recurrent, self.input_bias, self.state_bias)


class Recursive(EmbeddingEncoding):
    """Recursive positions: each position's vector is a trained function of the previous one.

    ``x + p_k``, ``p_0`` trained, ``p_{k+1} = f(p_k)``; linear:
    ``f(p) = A · p + b = c + A · (p - c)``, so ``p_k = c + A^k · (p_0 - c)``.

    ``k`` = 0, 1, … in tokens, unbounded; fractional positions are interpolated linearly. ``p_0``,
    ``c`` ``[C]``; ``b = c - A · c``. ``A`` ``[C, C]`` is ``(I + S)(I - S)^-1`` with
    ``S = S_0 + W - W^T``: a rotation for any W, so ``‖p_k - c‖`` is constant and neither vectors
    nor gradients grow or vanish. ``W`` starts at 0, where S_0 makes A rotate pair t by
    ``10000^(-2t/C)`` radians per token, and ``p_0`` at (0, 1, 0, 1, …): the sinusoidal encoding
    (for even C).

    Computed in log2 L matrix products by doubling, ``[p_k; A^n] · A^n = [p_{k+n}; A^2n]``, plus
    log2 of the first position, in float64, since squaring A doubles its error. C² parameters. The
    GRU steps through all positions from 0.

    Args:
        dim: width C.
        step: ``"linear"`` as above; ``"free"`` the same with unconstrained A, whose powers may
            grow without bound; ``"gru"`` a gated recurrent unit without input,
            ``f(p) = z·p + (1 - z)·tanh(a + r·(U_n p + b_n))`` with gates
            ``r, z = σ(U p + b)``, whose vectors stay within (-1, 1).

    Raises:
        ArgumentError: when ``dim`` is below 1.
        UnknownNameError: for another ``step``.
        LengthError: in ``forward``, for a position below 0.

    Reference: Su 2021, "Transformer position encodings that rack researchers' brains",
    https://kexue.fm/archives/8130, section on recursive positions; the plain recursion is what Liu
    et al. 2020 make continuous.

    >>> import posenc, torch
    >>> encoding = posenc.create("recursive", dim=4)
    >>> encoding.embed(torch.zeros(1, 2, 4), posenc.Layout.sequence(2))[0, 0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """

    dim: Width
    step: StepKind = "linear"

    def __post_init__(self) -> None:
        steps: dict[str, type[Step]] = {"linear": RotationStep, "free": FreeStep, "gru": GatedStep}
        self.recursion = steps[self.step](self.dim)

    def reset_parameters(self) -> None:
        """Set the initial values; the GRU's are drawn."""
        self.recursion.reset_parameters()

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        return fuse(x, self.table(layout), "add")

    def table(self, layout: Layout) -> Float[Tensor, "b L C"]:
        """``p`` at a layout's positions, in float64 where the device has it."""
        with without_autocast(layout.device):
            weights: list[Tensor] = self.recursion()
            gated = self.step == "gru"
            orbit, at = (gated_orbit, gated_at) if gated else (linear_orbit, linear_at)
            if layout.start is not None and has_values(layout.positions):
                require_forward(float(layout.start))
                return orbit(weights, layout.start, layout.length).unsqueeze(0)
            positions = real_positions(layout)
            if has_values(positions) and positions.numel():
                require_forward(float(positions.detach().min()))
            return at(positions.to(weights[0].dtype), weights, "")


def require_forward(first: float) -> None:
    """LengthError for positions below 0."""
    if first < 0:
        raise LengthError(
            "positions",
            expected="0 or more, since the recursion starts at 0",
            got=f"{first:g}",
            remedy="Shift the positions, so that the first is 0.",
        )


ENTRY = Entry(
    factory=Recursive,
    summary="Computes each position's vector from the previous one by a trained rotation or a GRU.",
    relative=False,
    trainable=True,
    extrapolates="Any position exists and is bounded; use past the trained ones is uncertain.",
    cost="L·C² once, in log L products",
    sharing="layers",
)
