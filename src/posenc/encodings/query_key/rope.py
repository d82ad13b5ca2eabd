"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Base, Divisor, Factor, Fraction, Width
from posenc.encoding import Entry, Pairing
from posenc.encoding.prepared import constant
from posenc.encodings.common.precision import angles_at, geometric_frequencies, wider
from posenc.encodings.common.rotation import Rotary
from posenc.errors import ArgumentError
from posenc.layout import Layout


class Rope(Rotary):
    """RoPE: rotates each pair of query and key features by an angle proportional to position.

    ``q'_i = R(p_i) q_i``, ``k'_j = R(p_j) k_j``, where R(p) rotates pair t by ``p · θ_t``,
    ``θ_t = base^(-2t/d)``; ``⟨q'_i, k'_j⟩`` depends on ``p_i - p_j`` only.

    ``p`` is a position in tokens, any real; ``θ_t`` in radians per token, t = 0 … d/2 - 1; ``d``
    the rotated width. Differs from the paper in nothing with ``pairing="adjacent"``; the default
    ``"half"``, used by Llama checkpoints, is the same up to a permutation of features.

    Args:
        head_dim: width D of a head.
        base: sets the slowest frequency.
        pairing: ``"half"`` pairs feature t with t + d/2 (Llama, NeoX), ``"adjacent"`` 2t with
            2t + 1 (GPT-J, RoFormer).
        fraction: rotated fraction of each head, its first ``d = fraction · D`` features.
        learned: frequencies are parameters, initially θ.
        divisors: ``[d/2]``, divisors of the frequencies; 1 by default, ``math.inf`` stops a pair.
            Context extension sets them (``posenc.extension``).
        gain: factor of the rotated features of queries and of keys, which scales their products by
            ``gain²`` (YaRN's temperature).

    Raises:
        ArgumentError: when the rotated width is odd or zero, or an option is out of its domain.
        UnknownNameError: for another ``pairing``.

    Reference: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding",
    https://arxiv.org/abs/2104.09864.

    >>> import posenc, torch
    >>> grid = posenc.Grid.of(posenc.Layout.sequence(3))
    >>> q = torch.randn(1, 2, 3, 8)
    >>> posenc.create("rope", head_dim=8).query_key(q, q, grid)[0].shape
    torch.Size([1, 2, 3, 8])
    """

    head_dim: Width
    base: Base = 10000.0
    pairing: Pairing = "half"
    fraction: Fraction = 1.0
    learned: bool = False
    divisors: Sequence[Divisor] | None = None
    gain: Factor = 1.0

    def __post_init__(self) -> None:
        rotated = self.fraction * self.head_dim
        if rotated < 2 or rotated % 2:
            raise ArgumentError(
                "head_dim",
                expected="an even number of rotated features (fraction · head_dim)",
                got=f"{rotated:g}",
                remedy="Change head_dim or fraction: features are rotated in pairs.",
            )
        self.rotated = int(rotated)
        if self.divisors is not None and len(self.divisors) != self.rotated // 2:
            raise ArgumentError(
                "divisors",
                expected=f"{self.rotated // 2} divisors, one per rotated pair",
                got=f"{len(self.divisors)}",
                remedy="Pass one per pair, or None for no division.",
            )
        pairs = torch.empty(self.rotated // 2)
        self.log_frequencies = nn.Parameter(pairs) if self.learned else None

    def reset_parameters(self) -> None:
        """Set learned frequencies to θ."""
        if self.log_frequencies is not None:
            with torch.no_grad():
                self.log_frequencies.copy_(self._theta(like=self.log_frequencies).log())

    def _theta(self, *, like: Tensor) -> Float[Tensor, " T"]:
        return geometric_frequencies(self.rotated // 2, self.rotated, self.base, like=like)

    def frequencies(self, *, like: Tensor) -> Float[Tensor, " T"]:
        """Frequency of each pair in radians per token, in ``like``'s dtype and on its device."""
        if self.log_frequencies is None:
            theta = self._theta(like=like)
        else:
            theta = self.log_frequencies.to(like.dtype).exp()
        if self.divisors is None:
            return theta
        return theta / constant(self.divisors, like=like)

    def angles(self, layout: Layout) -> Float[Tensor, "b L T"]:
        positions = layout.positions[..., :1]
        return angles_at(positions, self.frequencies(like=wider(positions)))

    def stretched(self, divisors: Sequence[float], *, gain: float = 1.0) -> Rope:
        """A copy with other ``divisors`` and ``gain``; learned frequencies are shared.

        Raises:
            ArgumentError: as the constructor.
        """
        rope = Rope(**{**self.given, "learned": False, "divisors": divisors, "gain": gain})
        rope.log_frequencies = self.log_frequencies
        return rope


ENTRY = Entry(
    factory=Rope,
    summary="Rotates pairs of query and key features by angles proportional to position.",
    relative=True,
    trainable=False,
    extrapolates="Degrades past the training length; can be extended (posenc.extension).",
    cost="(Q + K)·D·H",
    sharing="layers",
)
