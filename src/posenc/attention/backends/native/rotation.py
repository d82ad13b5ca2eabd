"""Rotations of queries and keys in one pass over their memory."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import increment_version

from posenc.attention.backends.native.build import library, missing
from posenc.attention.backends.native.library import TYPES, CRotaryFactors, CRotation, CTokens
from posenc.encoding import Pairing, Rotation, apply_rotation
from posenc.runtime import has_values, is_transformed

FEW = 2**13
"""Numbers in queries or keys up to which a call of the kernel costs more than the definition."""

STREAMED = 2**21
"""Bytes from which on rotated keys are written past the processor's caches."""

QUERIES = 32
"""Queries from which on keys are rotated inside, times the query heads that share a key head."""


def rotate(
    rotation: Rotation, q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B G K D"]
) -> tuple[Float[Tensor, "B H Q D"], Float[Tensor, "B G K D"]]:
    """``rotation.apply(q, k)``, by the compiled kernel where it serves.

    A compiled graph fuses the definition by itself, and transforms of ``torch.func`` need it.
    """
    if not torch.compiler.is_compiling() and _are_one_token(rotation, q, k):
        both = rotate_one(torch.cat([q, k], dim=1), rotation.query, rotation.pairing)
        rotated, keys = torch.split(both, [q.shape[1], k.shape[1]], dim=1)
        return rotated, keys
    return rotate_one(q, rotation.query, rotation.pairing), rotate_one(
        k, rotation.key, rotation.pairing
    )


def _are_one_token(rotation: Rotation, q: Tensor, k: Tensor) -> bool:
    """True for one query and the key of the same token, which one kernel call can rotate."""
    if rotation.query is not rotation.key or rotation.query[0].shape[1] != 1:
        return False
    return (q.shape[2], q.shape[0], q.dtype) == (1, k.shape[0], k.dtype)


def rotate_one(
    x: Float[Tensor, "B H L D"], factors: tuple[Tensor, Tensor], pairing: Pairing
) -> Float[Tensor, "B H L D"]:
    """Queries or keys rotated, by the compiled kernel where it serves."""
    if not _serves(x, factors):
        return apply_rotation(x, *factors, pairing)
    rows = (factor.detach().contiguous() for factor in factors)
    rotated: Tensor = _Rotate.apply(x, *rows, pairing == "adjacent", False)
    return rotated


def rotate_into(
    out: Float[Tensor, "B H L D"],
    x: Float[Tensor, "B H L D"],
    factors: tuple[Tensor, Tensor],
    pairing: Pairing,
) -> None:
    """Write queries or keys rotated into ``out``, which may be ``x`` itself; without gradients."""
    if _serves(x, factors) and x.stride(-1) == out.stride(-1) == 1:
        cosine, sine = (factor.contiguous() for factor in factors)
        stream = out.nbytes >= STREAMED and out.data_ptr() != x.data_ptr()
        _write(out, x, cosine, sine, pairing == "adjacent", False, stream=stream)
        increment_version(out)
    else:
        out.copy_(apply_rotation(x, *factors, pairing))


def serves_inside(rotation: Rotation, q: Tensor, k: Tensor) -> bool:
    """True if the kernels of attention rotate while they read.

    They rotate keys once for each query head, which takes long beside few queries, but for those
    of ``few_rows``.
    """
    many = q.shape[2] * k.shape[1] >= QUERIES * q.shape[1]
    return many and _serves(q, rotation.query) and _serves(k, rotation.key)


def fits_inside(rotation: Rotation, q: Tensor, k: Tensor) -> bool:
    """True if the kernels of attention can rotate while they read."""
    return _fits(q, rotation.query) and _fits(k, rotation.key)


def _serves(x: Tensor, factors: tuple[Tensor, Tensor]) -> bool:
    if torch.compiler.is_compiling():  # no size is read
        return False
    return x.numel() > FEW and _fits(x, factors)


def _fits(x: Tensor, factors: tuple[Tensor, Tensor]) -> bool:
    if torch.compiler.is_compiling() or is_transformed():
        return False
    if x.device.type != "cpu" or x.dtype not in TYPES or not has_values(x):
        return False
    if any(factor.requires_grad for factor in factors):
        return False
    if {factor.dtype for factor in factors} != {torch.promote_types(x.dtype, torch.float32)}:
        return False
    cosine = factors[0]
    shape = (*x.shape[:3], cosine.shape[-1])
    fits = all(n in (1, full) for n, full in zip(cosine.shape, shape, strict=True))
    return fits and missing() is None


def _write(
    out: Tensor,
    x: Tensor,
    cosine: Tensor,
    sine: Tensor,
    adjacent: bool,
    conjugate: bool,
    *,
    stream: bool = False,
) -> None:
    """Call the kernel; features are contiguous."""
    problem = CRotation(
        *(CTokens.of(x), CTokens.of(out), CRotaryFactors.of(cosine, sine)),
        *(*x.shape, cosine.shape[-1], adjacent, conjugate, stream),
    )
    library().call("rotate", problem, cosine.dtype)


class _Rotate(torch.autograd.Function):
    """One tensor by the kernel; the derivative is the product with the conjugate factors."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, adjacent: bool, conjugate: bool
    ) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.adjacent, ctx.conjugate = adjacent, conjugate
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty_like(x)  # each token's heads stay where they are
        _write(out, x, cosine, sine, adjacent, conjugate)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rotated = _Rotate.apply(gradient, *ctx.saved_tensors, ctx.adjacent, not ctx.conjugate)
        return rotated, None, None, None, None
