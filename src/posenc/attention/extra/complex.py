"""``attend_complex``: attention of complex-valued models."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from posenc.attention.api import attend
from posenc.attention.call import Call, validate
from posenc.encoding import Encoding, ScoreTerm
from posenc.errors import ArgumentError, UnknownNameError
from posenc.grid import Grid

ComplexProduct = Literal["real", "modulus"]


def attend_complex(
    q: Complex[Tensor, "B H Q D"],
    k: Complex[Tensor, "B G K D"],
    v: Complex[Tensor, "B G K E"],
    grid: Grid,
    encoding: Encoding,
    *,
    product: ComplexProduct = "real",
    backend: str = "auto",
    dropout: float = 0.0,
    scale: float | None = None,
) -> Complex[Tensor, "B H Q E"]:
    """Attention of complex queries and keys: a real softmax that weighs complex values.

    The logit is made real before the softmax, from the Hermitian product
    ``⟨q, k⟩ = Σ_d q_d · conj(k_d)``: its real part, or its modulus ``|⟨q, k⟩|``. Weights are then
    real, not negative, and sum to one; a softmax of complex numbers would have none of that. The
    real part is the product of the real and imaginary parts side by side, so that every backend
    serves it, and it tells a phase from its opposite; the modulus does not see a phase common to
    all features, and no fused kernel computes it.

    The encoding's parts see real numbers: queries and keys as their D real parts, then their D
    imaginary ones (RoPE's halves then turn each complex number by its angle). The official code of
    complex-order embeddings takes the modulus of ``Σ_d q_d · k_d``, without the conjugate: pass
    ``k.conj()`` for that.

    Args:
        q: ``[B, H, Q, D]`` complex; k: ``[B, G, K, D]``; v: ``[B, G, K, E]``. H is a multiple of G.
        grid: where queries and keys are, and who sees whom.
        encoding: its query_key, score and value parts; a score is added to the real logit.
        product: ``"real"`` part or ``"modulus"``.
        backend, dropout: see ``attend``.
        scale: factor of the logits; ``(terms · D) ** -0.5`` by default.

    Returns:
        ``[B, H, Q, E]`` in ``v``'s dtype. A row that sees nothing is zero.

    Raises:
        ArgumentError: on arguments that are not complex or do not fit together, or a modulus with
            an encoding that replaces the product.
        BackendRefusal: when the named backend cannot do this.
        UnknownNameError: for another ``product`` or ``backend``.
    """
    if product not in ("real", "modulus"):
        raise UnknownNameError.of("product", product, ("real", "modulus"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_complex():
            raise ArgumentError(
                name,
                expected="a complex dtype",
                got=x.dtype,
                remedy="Use attend for real ones, or torch.complex(x, torch.zeros_like(x)).",
            )
    if scale is None:
        scale = encoding.default_scale(q.shape[-1])
    queries, keys, values = side_by_side(q), side_by_side(k), side_by_side(v)
    if product == "modulus":
        validate(Call(queries, keys, values, grid, encoding, dropout, scale))
        encoding = _with_modulus(encoding)
    output = attend(
        queries, keys, values, grid, encoding, backend=backend, dropout=dropout, scale=scale
    )
    real, imaginary = output.to(v.real.dtype).chunk(2, dim=-1)
    return torch.complex(real.contiguous(), imaginary.contiguous())


def side_by_side(x: Complex[Tensor, "*dims D"]) -> Float[Tensor, "*dims 2*D"]:
    """The real parts, then the imaginary ones."""
    return torch.cat([x.real, x.imag], dim=-1)


def _with_modulus(encoding: Encoding) -> Encoding:
    if encoding.score is not None and encoding.score.replaces_product:
        raise ArgumentError(
            "product",
            expected=f"'real' with {type(encoding.score).__name__}, which replaces the product",
            got="'modulus'",
            remedy="Use product='real', or another encoding.",
        )
    return Encoding(
        query_key=encoding.query_key, score=Modulus(encoding.score), value=encoding.value
    )


class Modulus(ScoreTerm):
    """``scale · |⟨q, k⟩|``, and what ``summand`` adds to it.

    Queries and keys hold their real parts, then their imaginary ones.
    """

    replaces_product = True
    axes = None

    def __init__(self, summand: ScoreTerm | None) -> None:
        super().__init__()
        self.summand = summand
        if summand is not None:
            self.heads, self.head_dim, self.causal = (
                summand.heads,
                summand.head_dim,
                summand.causal,
            )

    def forward(
        self, q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B H K D"], grid: Grid, *, scale: float
    ) -> Float[Tensor, "b H Q K"]:
        (q_real, q_imaginary), (k_real, k_imaginary) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
        real = q_real @ k_real.mT + q_imaginary @ k_imaginary.mT
        imaginary = q_imaginary @ k_real.mT - q_real @ k_imaginary.mT
        # The modulus of a complex tensor, unlike a root of squares, has a gradient at 0.
        logits = scale * torch.complex(real, imaginary).abs()
        if self.summand is not None:
            logits = logits + self.summand(q, k, grid, scale=scale)
        return logits
