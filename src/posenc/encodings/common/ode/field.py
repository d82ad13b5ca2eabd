"""FLOATER's equation in a rotating frame."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from posenc.encodings.common.frequencies import geometric_frequencies

Activation = Literal["relu", "tanh"]

Slope = Callable[[Tensor], Tensor]
"""From ``z [*dims, C]`` to ``dz/dt`` at a time, or at times ``[*dims]``."""


class Field:
    """``dz/dt`` for ``z = exp(-R t) p``, the equation in the rotating frame.

    The rotation is exact there; the solver integrates the trained part only.
    """

    def __init__(
        self,
        start: Float[Tensor, " C"],
        weights: Sequence[Tensor],
        *,
        activation: Activation,
        unit: float,
        rotary: bool,
    ) -> None:
        self.weights = list(weights)
        self.activation, self.unit = activation, unit
        self.rotates = rotary and len(start) > 1
        pairs, odd = len(start) // 2, len(start) % 2
        rates = geometric_frequencies(pairs, len(start), 10000.0, like=start)
        self.rates = F.pad(torch.stack([rates, -rates], dim=-1).flatten(), (0, odd))  # [C]
        features = torch.arange(len(start), device=start.device)
        self.partner = (features ^ 1).clamp(max=len(start) - 1)  # [C]: the other one of each pair

    def with_weights(self, weights: Sequence[Tensor]) -> Field:
        """A copy with other weights."""
        copied = copy.copy(self)
        copied.weights = list(weights)
        return copied

    def __call__(
        self, times: Float[Tensor, "*dims"], z: Float[Tensor, "*dims C"]
    ) -> Float[Tensor, "*dims C"]:
        return self.at(times)(z)

    def at(self, times: Float[Tensor, "*dims"]) -> Slope:
        """``dz/dt`` at a time, or at one time for each ``z``."""
        return partial(self.slope, *self._maps(), *self._tables(times))

    def each(self, times: Float[Tensor, " N"]) -> list[Slope]:
        """``dz/dt`` at each of N times; all that depends on time alone is computed at once."""
        maps, tables = self._maps(), (table.unbind() for table in self._tables(times))
        return [partial(self.slope, *maps, *row) for row in zip(*tables, strict=True)]

    def slope(
        self,
        first: Float[Tensor, "E C"],
        second: Float[Tensor, "C E"],
        cosine: Float[Tensor, "*dims C"],
        sine: Float[Tensor, "*dims C"],
        first_bias: Float[Tensor, "*dims E"],
        second_bias: Float[Tensor, "*dims C"],
        z: Float[Tensor, "*dims C"],
    ) -> Float[Tensor, "*dims C"]:
        """``dz/dt``, given weights without time and what depends on time."""
        p = self._rotate(z, cosine, sine)
        hidden = _affine(p, first, first_bias)
        hidden = hidden.relu() if self.activation == "relu" else hidden.tanh()
        return self._rotate(_affine(hidden, second, second_bias), cosine, sine, -1)

    def velocity(
        self, times: Float[Tensor, "*dims"], p: Float[Tensor, "*dims C"]
    ) -> Float[Tensor, "*dims C"]:
        """``h(t, p)`` per token, including the rotation."""
        cosine, sine, *_ = self._tables(times)
        learned = self._rotate(self(times, self._rotate(p, cosine, sine, -1)), cosine, sine)
        return learned + self.rates * p.index_select(-1, self.partner) if self.rotates else learned

    def rotated(
        self, z: Float[Tensor, "*dims C"], times: Float[Tensor, "*dims"]
    ) -> Float[Tensor, "*dims C"]:
        """``exp(R t) z``."""
        angles = times.unsqueeze(-1) * self.rates
        return self._rotate(z, angles.cos(), angles.sin())

    def _maps(self) -> tuple[Tensor, Tensor]:
        """Weights of both layers without those of time."""
        first, _, second, _ = self.weights
        return first[:, :-1], self.unit * second[:, :-1]

    def _tables(self, times: Float[Tensor, "*dims"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Cosines and sines of the rotation, and biases of both layers with time's part."""
        angles, time = times.unsqueeze(-1) * self.rates, self.unit * times.unsqueeze(-1)
        first, first_bias, second, second_bias = self.weights
        biases = (first_bias + time * first[:, -1], second_bias + time * second[:, -1])
        return angles.cos(), angles.sin(), biases[0], self.unit * biases[1]

    def _rotate(self, z: Tensor, cosine: Tensor, sine: Tensor, sign: int = 1) -> Tensor:
        """Pairs (sin α, cos α) to ``α + sign · β``; an odd last feature, of rate 0, is itself.

        ``sine`` has the sign of each feature's rate.
        """
        if not self.rotates:
            return z
        return torch.addcmul(z * cosine, z.index_select(-1, self.partner), sine, value=sign)


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``weight x + bias``, in one operation where there is one bias for all of ``x``."""
    return F.linear(x, weight, bias) if bias.dim() == 1 else F.linear(x, weight) + bias
