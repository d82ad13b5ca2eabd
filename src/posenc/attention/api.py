"""``attend``: attention with any encoding, and ``explain``: how it would be computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.base import Backend
from posenc.attention.backends.flex import Flex
from posenc.attention.backends.reference import Reference
from posenc.attention.backends.sdpa import Sdpa
from posenc.attention.backends.tiled import Tiled
from posenc.attention.backends.triton import Triton
from posenc.attention.choice import preference
from posenc.attention.posing import Posing
from posenc.attention.validation import validate
from posenc.encoding import Encoding
from posenc.errors import ArgumentError, BackendRefusal, UnknownNameError
from posenc.grid import Grid, zero_invalid_signals
from posenc.layout.padding import zero_invalid
from posenc.runtime import without_autocast

__all__ = ["BACKENDS", "VARIANTS", "Explanation", "attend", "explain", "transformed"]

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Sdpa(), Triton(), Flex(), Tiled(), Reference())
}
"""All backends by name. ``choice`` says in which order ``auto`` tries them."""

VARIANTS: dict[str, Backend] = {backend.name: backend for backend in (Triton(fuses=False),)}
"""Backends with an option, which are to be had by name only."""


@dataclass(frozen=True)
class Explanation:
    """What ``attend`` would do, and why.

    Args:
        backend: the name of the one that would run.
        how: what it would do, in a sentence.
        rule: what the order in which backends were tried depended on.
        refusals: why others could not; under ``auto``, of all that there are.
    """

    backend: str
    how: str
    rule: str
    refusals: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.backend} ({self.rule}): {self.how}."]
        lines += [f"Not {name}, because {reason}." for name, reason in self.refusals.items()]
        return "\n".join(lines)


@overload
def attend(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    grid: Grid,
    encoding: Encoding,
    *,
    backend: str = "auto",
    dropout: float = 0.0,
    scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Float[Tensor, "B H Q E"]: ...


@overload
def attend(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    grid: Grid,
    encoding: Encoding,
    *,
    backend: str = "auto",
    dropout: float = 0.0,
    scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Float[Tensor, "B H Q E"], Float[Tensor, "B H Q"]]: ...


def attend(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    grid: Grid,
    encoding: Encoding,
    *,
    backend: str = "auto",
    dropout: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with ``encoding``'s query_key, score and value parts.

    ``softmax(scale · f(q)·f(k) + score) · (v + value)`` over the keys each query may see. The
    embedding part, if any, belongs before the projections and is not applied here.

    Args:
        q: ``[B, H, Q, D]``, not yet transformed (unrotated, for RoPE).
        k: ``[B, G, K, D]`` likewise; v: ``[B, G, K, E]``. H is a multiple of G.
        grid: where queries and keys are, and who sees whom. Tokens that its layouts mark invalid
            may hold anything in q, k and v, NaN and infinities included: no other token's output
            or gradient depends on them, and their own gradients are zero.
        encoding: which encoding; ``Encoding()`` for none.
        backend: ``"auto"`` takes the fastest that serves the call; a named one does the job or
            refuses. ``"triton"`` rotates queries and keys as it reads them, where the encoding
            does that alone and nothing of it is learned; ``"triton@unfused"`` has it done before.
        dropout: probability of dropping an attention weight.
        scale: factor of the logits; ``(terms · D) ** -0.5`` by default (T5 models use 1).
        return_lse: also return the logarithm of each query's sum of exponentiated logits, by
            which outputs over parts of the keys are joined; dropout is not in it. Backends return
            what their kernels compute anyway; only ``"sdpa"`` on devices other than the CPU, and
            under ``torch.func``, takes one more product of queries and keys. ``"reference"`` gives
            it gradients; that of all others is detached, so that outputs joined by it have
            gradients with respect to the parts' outputs only, which are not the whole's.

    Returns:
        ``[B, H, Q, E]`` in ``v``'s dtype (the autocast dtype under autocast). A row that sees
        nothing is zero. With ``return_lse`` also ``[B, H, Q]`` in float32 (float64 for float64
        inputs), -inf for such a row.

    Raises:
        ArgumentError: on arguments that do not fit together.
        BackendRefusal: when the named backend cannot do this.
        UnknownNameError: when there is no such backend.
    """
    validate(q, k, v, grid, encoding, dropout=dropout, scale=scale)
    if return_lse and encoding.score is not None and encoding.score.replaces_softmax:
        raise ArgumentError(
            "return_lse",
            expected=f"False with {type(encoding.score).__name__}, which replaces the softmax",
            got=True,
            remedy="Its weights have no sum that they are divided by.",
        )
    q, k, v = _autocast(q, k, v)
    with without_autocast(q.device):
        if not (q.shape[0] and q.shape[2] and k.shape[2]):
            nothing = _nothing(q, k, v)
            return (nothing, _no_lse(q)) if return_lse else nothing
        posing = _pose(q, k, v, grid, encoding, dropout, scale)
        chosen = _choose(posing, backend)[0]
        output, lse = chosen.run(posing.problem(chosen), lse=return_lse)
        if lse is None:
            return output
        lse = lse.to(torch.promote_types(q.dtype, torch.float32))
        return output, lse if chosen.lse_has_gradient else lse.detach()


def transformed(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    grid: Grid,
    encoding: Encoding,
) -> tuple[Float[Tensor, "B H Q D"], Float[Tensor, "b g K D"]]:
    """Queries and keys after ``encoding``'s query_key part, as ``attend`` computes with them.

    Args: as ``attend``.

    Raises:
        ArgumentError: as ``attend``.
    """
    validate(q, k, v, grid, encoding, dropout=0.0, scale=None)
    if encoding.query_key is None:
        return q, k
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = _autocast(q, k, v)
        turned: tuple[Tensor, Tensor] = encoding.query_key(q, k, grid)
        return turned


def explain(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    grid: Grid,
    encoding: Encoding,
    *,
    backend: str = "auto",
    dropout: float = 0.0,
    scale: float | None = None,
) -> Explanation:
    """What ``attend`` would do with the same arguments, and why. Computes no attention.

    Raises: as ``attend``.
    """
    validate(q, k, v, grid, encoding, dropout=dropout, scale=scale)
    q, k, v = _autocast(q, k, v)
    with without_autocast(q.device):
        posing = _pose(q, k, v, grid, encoding, dropout, scale)
        chosen, rule, refusals = _choose(posing, backend)
        if backend == "auto":
            others = {name: _refusal(each, posing) for name, each in BACKENDS.items()}
            refusals |= {name: reason for name, reason in others.items() if reason is not None}
        how = chosen.describe(posing.problem(chosen))
        return Explanation(chosen.name, how, rule, refusals)


def _pose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid,
    encoding: Encoding,
    dropout: float,
    scale: float | None,
) -> Posing:
    """The call with zeros at invalid tokens, so that no backend meets what padding holds."""
    q = zero_invalid(q, grid.query, dim=2)
    k, v = (zero_invalid(x, grid.key, dim=2) for x in (k, v))
    return Posing(q, k, v, zero_invalid_signals(grid), encoding, dropout, scale)


def _nothing(
    q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B G K D"], v: Float[Tensor, "B G K E"]
) -> Float[Tensor, "B H Q E"]:
    """The output without batch rows, queries or keys: empty or zero, with gradients of zero."""
    zero = 0.0 * (q.sum() + k.sum() + v.sum())
    return v.new_zeros(*q.shape[:3], v.shape[3]) + zero


def _no_lse(q: Float[Tensor, "B H Q D"]) -> Float[Tensor, "B H Q"]:
    """LSE over no keys."""
    return q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast would make of the operands; positions and biases are kept out of it."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _choose(posing: Posing, name: str) -> tuple[Backend, str, dict[str, str]]:
    """The backend called ``name``, or the preferred one that does not refuse; why; refusals."""
    if name != "auto":
        named = BACKENDS.get(name) or VARIANTS.get(name)
        if named is None:
            raise UnknownNameError.of("backend", name, ["auto", *BACKENDS, *VARIANTS])
        reason = _refusal(named, posing)
        if reason is not None:
            raise BackendRefusal(
                "backend",
                expected="one that can do this job",
                got=f"{name!r}, which cannot, because {reason}",
                remedy="Use backend='auto', and posenc.explain(...) to see what it takes.",
            )
        return named, "named", {}
    rule, order = preference(posing.q.device, posing.transformed)
    refusals: dict[str, str] = {}
    for candidate in order:
        if candidate not in BACKENDS:
            continue
        reason = _refusal(BACKENDS[candidate], posing)
        if reason is None:
            return BACKENDS[candidate], rule, refusals
        refusals[candidate] = reason
    raise BackendRefusal(
        "backend", expected="one that can do this job", got=refusals, remedy="Report this."
    )


def _refusal(backend: Backend, posing: Posing) -> str | None:
    """Why a backend cannot do it, on this machine or at all."""
    return backend.unavailable(posing.q.device) or backend.refusal(posing.problem(backend))
