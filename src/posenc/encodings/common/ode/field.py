"""FLOATER's equation in a rotating frame."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from posenc.encodings.common.frequencies import geometric_frequencies

Activation = Literal["relu", "tanh"]


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
        self.paired = len(start) // 2 * 2 if rotary else 0
        self.rates = geometric_frequencies(self.paired // 2, len(start), 10000.0, like=start)

    def with_weights(self, weights: Sequence[Tensor]) -> Field:
        """A copy with other weights."""
        copied = copy.copy(self)
        copied.weights = list(weights)
        return copied

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
        time = (self.unit * times).unsqueeze(-1).expand(*p.shape[:-1], 1)
        first, first_bias, second, second_bias = self.weights
        hidden = F.linear(torch.cat([p, time], dim=-1), first, first_bias)
        hidden = hidden.relu() if self.activation == "relu" else hidden.tanh()
        return self.unit * F.linear(torch.cat([hidden, time], dim=-1), second, second_bias)

    def velocity(
        self, times: Float[Tensor, "*dims"], p: Float[Tensor, "*dims C"]
    ) -> Float[Tensor, "*dims C"]:
        """``h(t, p)`` per token, including the rotation."""
        learned = self.learned(times, p)
        if not self.paired:
            return learned
        rotation = _times(p[..., : self.paired], torch.complex(0 * self.rates, -self.rates))
        return learned + F.pad(rotation, (0, p.shape[-1] - self.paired))

    def rotated(
        self, z: Float[Tensor, "*dims C"], times: Float[Tensor, "*dims"]
    ) -> Float[Tensor, "*dims C"]:
        """``exp(R t) z``."""
        if not self.paired:
            return z
        angles = times.unsqueeze(-1) * self.rates
        return _times(z, torch.complex(angles.cos(), -angles.sin()))


def _times(p: Float[Tensor, "*dims C"], rotation: Tensor) -> Float[Tensor, "*dims C"]:
    """Pairs of features as complex numbers times ``rotation``; an odd last feature is copied.

    The pair (sin α, cos α) times ``exp(-iβ)`` is that of ``α + β``. Lazy conjugates are avoided:
    they are lost inside an operator of a compiled graph. So are complex views: ``vmap`` gives them
    gradients in strides that they do not take.
    """
    paired = 2 * rotation.shape[-1]
    pairs = torch.complex(p[..., 0:paired:2], p[..., 1:paired:2])
    product = pairs * rotation
    rotated = torch.stack([product.real, product.imag], dim=-1).flatten(-2)
    return rotated if paired == p.shape[-1] else torch.cat([rotated, p[..., paired:]], dim=-1)
