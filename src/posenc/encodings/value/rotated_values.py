"""Values rotated by their position, and outputs back by the query's."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Base, Fraction, Width
from posenc.encoding import Entry, Pairing, ValueTransform, apply_rotation
from posenc.encoding.prepared import reused_of_layouts
from posenc.encoding.rotation import Factors
from posenc.encodings.query_key.rope import Rope
from posenc.layout import Layout


class RotatedValues(ValueTransform):
    """Rotated values: what a key adds to an output depends on its distance.

    ``o_i = R(p_i)ᵀ Σ_j a_ij R(p_j) v_j = Σ_j a_ij R(p_j - p_i) v_j``.

    R(p) rotates pair t by ``p · θ_t``, ``θ_t = base^(-2t/r)`` radians per token, as ``rope`` does;
    the first ``r = fraction · E`` features of values of width E are rotated; p: any reals. The
    weights a are those of the other parts: ``posenc.create("rope+rotated_values", …)``. A cache
    holds rotated values. DeepSeek-V4 has it with ``pairing="adjacent"`` on values that are its
    keys; there the last r features are rotated. Differs from the reference in what is a group
    element of a camera's pose there.

    Args:
        head_dim: width E of a value.
        base: sets the slowest frequency.
        pairing: ``"half"`` pairs feature t with t + r/2, ``"adjacent"`` 2t with 2t + 1.
        fraction: share of the features that is rotated.

    Raises:
        ArgumentError: when ``fraction · head_dim`` is no even number, or an argument is out of its
            domain.
        UnknownNameError: for another ``pairing``.

    Reference: Miyato et al. 2023, "GTA: A Geometry-Aware Attention Mechanism for Multi-View
    Transformers", https://arxiv.org/abs/2310.10375.

    >>> import posenc, torch
    >>> part = posenc.create("rotated_values", head_dim=8).value
    >>> v, layout = torch.randn(1, 2, 5, 8), posenc.Layout.sequence(5)
    >>> torch.allclose(part.undo(part(v, layout), layout), v, atol=1e-6)
    True
    """

    head_dim: Width
    base: Base = 10000.0
    pairing: Pairing = "half"
    fraction: Fraction = 1.0

    def __post_init__(self) -> None:
        self.rope = Rope(
            head_dim=self.head_dim, base=self.base, pairing=self.pairing, fraction=self.fraction
        )

    def forward(self, v: Float[Tensor, "B H L E"], layout: Layout) -> Float[Tensor, "B H L E"]:
        return apply_rotation(v, *self._factors(layout), self.pairing)

    def undo(self, v: Float[Tensor, "B H L E"], layout: Layout) -> Float[Tensor, "B H L E"]:
        cosine, sine = self._factors(layout)
        return apply_rotation(v, cosine, -sine, self.pairing)

    def _factors(self, layout: Layout) -> Factors:
        """Cosines and sines of the tokens, computed once in repeated calls."""

        def compute() -> Factors:
            return self.rope.factors(layout)

        return reused_of_layouts(compute, "values", layouts=(layout,), layers=(self,))


ENTRY = Entry(
    factory=RotatedValues,
    summary="Rotates values by their position, and outputs back by the query's.",
    relative=True,
    trainable=False,
    extrapolates="Degrades past the training length as RoPE does.",
    cost="(Q + K)·E·H",
    sharing="layers",
)
