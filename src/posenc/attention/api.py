"""``attend``: attention with any encoding, and ``explain``: how it would be computed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypedDict, Unpack, overload

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import check
from posenc.attention.backends.common.base import Attend, Backend, Result
from posenc.attention.call import Call, require_softmax, validate
from posenc.attention.differentiation import differentiable_twice
from posenc.attention.dispatch import NAMED, choose, preparing, refusals
from posenc.encoding import DistanceFunction, Encoding
from posenc.encoding.prepared import entering, reused_later, stored
from posenc.grid import Grid
from posenc.runtime import needs_dispatch, without_autocast


@dataclass(frozen=True)
class Explanation:
    """The backend that ``attend`` takes, and the reasons.

    Args:
        backend: its name.
        how: how it computes the call, in a sentence.
        rule: the rule that set the order in which backends were tried.
        refusals: reasons of the backends that cannot; of all of them under ``"auto"``.
    """

    backend: str
    how: str
    rule: str
    refusals: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.backend} ({self.rule}): {self.how}."]
        lines += [f"Not {name}, because {reason}." for name, reason in self.refusals.items()]
        return "\n".join(lines)


class Options(TypedDict, total=False):
    """Options of ``attend`` that do not change what it returns."""

    backend: str | Backend
    dropout: float
    scale: float | None
    sinks: Float[Tensor, " H"] | None
    softcap: float | None


@overload
def attend(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    grid: Grid,
    encoding: Encoding,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Float[Tensor, "B H Q E"]: ...


@overload
def attend(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    grid: Grid,
    encoding: Encoding,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Float[Tensor, "B H Q E"], Float[Tensor, "B H Q"]]: ...


def attend(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    grid: Grid,
    encoding: Encoding,
    *,
    backend: str | Backend = "auto",
    dropout: float = 0.0,
    scale: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with ``encoding``'s query_key, score and value parts.

    ``softmax(scale · f(q)·f(k) + score) · (v + value)`` over the keys each query may see, or
    ``g⁻¹(softmax(…) · g(v))`` with a value part that is a transform g. The embedding part, if any,
    belongs before the projections and is not applied here.

    Args:
        q: ``[B, H, Q, D]``, not yet transformed (unrotated, for RoPE).
        k: ``[B, G, K, D]`` likewise; v: ``[B, G, K, E]``. H is a multiple of G.
        grid: where queries and keys are, and who sees whom. Tokens that its layouts mark invalid
            may hold anything in q, k and v, NaN and infinities included: no other token's output
            or gradient depends on them, and their own gradients are zero.
        encoding: which encoding; ``Encoding()`` for none.
        backend: ``"auto"`` takes the fastest that supports the call; a backend that is given by
            name or as an instance, such as ``Triton(fuse_rotations=False)``, computes it or raises.
        dropout: probability of dropping an attention weight.
        scale: factor of the logits; ``(terms · D) ** -0.5`` by default (T5 models use 1).
        sinks: ``[H]``, a logit a head that joins the sum of the softmax and has no value: weights
            of keys sum to less than 1 (gpt-oss). In the LSE too.
        softcap: c; logits s, scores included, become ``c · tanh(s / c)`` before they are masked
            (Gemma 2: 50).
        return_lse: also return the logarithm of each query's sum of exponentiated logits, by
            which outputs over parts of the keys are joined; dropout is not in it. It has gradients
            as the output has. Backends return what their kernels compute anyway; only ``"sdpa"``,
            on devices other than the CPU and where it is compiled or under ``torch.func``, takes
            one more product of queries and keys.

    Returns:
        ``[B, H, Q, E]`` in ``v``'s dtype (the autocast dtype under autocast). A row that sees
        nothing is zero. With ``return_lse`` also ``[B, H, Q]`` in float32 (float64 for float64
        inputs), -inf or the sink for such a row.

    Raises:
        ArgumentError: on arguments that do not fit together.
        BackendRefusal: when the backend that was asked for does not support the call.
        UnknownNameError: when there is no backend of that name.
    """
    if type(return_lse) is not bool:
        check("return_lse", bool, return_lse, False)
    call = Call(q, k, v, grid, encoding, dropout, scale, sinks=sinks, softcap=softcap)
    output, lse = attend_block(call, backend, return_lse=return_lse)
    if lse is None:
        return output
    return output, lse.to(torch.promote_types(output.dtype, torch.float32))


def attend_block(call: Call, backend: str | Backend, *, return_lse: bool = False) -> Result:
    """``attend``, perhaps to some of the keys, in a form that blocks can be joined in.

    The LSE is in the precision that the backend has it in, up to float64. Of several blocks, one
    has the sinks.

    Raises: as ``attend``.
    """
    encoding = call.encoding
    if not isinstance(encoding, Encoding):
        validate(call)  # says so
    transform = encoding.value_transform()
    if transform is not None:
        validate(call)
        with entering(encoding.prepared):
            inside = call.with_values(*transform)
            output, lse = attend_block(inside, backend, return_lse=return_lse)
            return Result(transform[0].undo(output, call.grid.query), lse)
    repeatable = _kind_of(call) if isinstance(backend, str) and backend == "auto" else None
    prepared: Attend | None = None
    if repeatable is not None:
        kind, numbers = repeatable
        prepared = stored("attend", kind, (encoding,), numbers, encoding.prepared)
    if prepared is None:
        validate(call)
    if return_lse:
        require_softmax("return_lse", "False", encoding)
    if prepared is None:
        with entering(encoding.prepared):
            if repeatable is not None:
                prepared = reused_later(
                    partial(_prepared, call), "attend", *kind, layers=(encoding,), tensors=numbers
                )
            if prepared is None:
                return _attend(call, backend, return_lse=return_lse)
    result = prepared(call.q, call.k, call.v)
    return result if return_lse else Result(result.output, None)


def _kind_of(call: Call) -> tuple[tuple[Hashable, ...], list[Tensor | None]] | None:
    """The kind of a repeatable call, and the tensors of its layouts; None for other calls.

    A kind holds shapes, strides and dtypes, layouts by value, and options. Calls with gradients,
    dropout or sinks, in graphs or dispatch modes, and on other devices than CPUs are not
    repeatable. The call may be invalid; no tensor is read.
    """
    q, k, v, grid, scale, softcap = call.q, call.k, call.v, call.grid, call.scale, call.softcap
    if needs_dispatch(q, k, v) or torch._C._is_tracing() or torch.is_autocast_enabled("cpu"):
        return None
    if type(grid) is not Grid or grid.intervals is not None or call.sinks is not None:
        return None
    # True equals 1, and would find its kind.
    if type(call.dropout) not in (float, int) or call.dropout:
        return None
    if not {type(scale), type(softcap)} <= {float, int, type(None)}:
        return None
    if call.global_softmax or call.counter_dropout:
        return None
    kind: list[Hashable] = [grid.causal, grid.window, scale, softcap]
    for x in (q, k, v):
        if not (type(x) is Tensor and x.is_cpu and x.layout is torch.strided) or x.is_nested:
            return None
        if x.requires_grad and torch.is_grad_enabled():
            return None
        kind += (x.shape, x.stride(), x.dtype)
    numbers: list[Tensor | None] = []
    is_image = grid.query.start is None and grid.dense
    for side in (grid.query,) if grid.key is grid.query else (grid.query, grid.key):
        positions, order, special = side.positions, side.order, side.special
        # All tokens before the cells of an image are special, and nothing reads the order.
        known = side.start is not None and special is None
        if is_image:
            known = side.extent is not None
        plain = side.document is None and side.valid is None and side.signal is None
        if not (known and plain) or positions.requires_grad:
            return None
        kind += (side.start, side.extent, positions.shape, positions.dtype, order.shape)
        numbers += (positions, special if is_image else order)
    return tuple(kind), numbers


def _prepared(call: Call) -> Attend | None:
    """Attention of calls like this one, planned once; None where that is of no use."""
    if not (call.q.numel() and call.k.numel() and call.v.numel()):
        return None
    score = call.encoding.score
    if score is not None and not (score.by_position or score.rows_by_position):
        return None
    problem = call.problem()
    untransformed = problem.q is call.q and problem.k is call.k and problem.v is call.v
    structured = problem.lowered is not None or isinstance(problem.fused(), DistanceFunction)
    if not (untransformed and structured and call.without_hidden() is call):
        return None
    for plan in preparing(call):
        prepared = plan.prepare()
        if prepared is not None:
            return prepared
    return None


def _attend(call: Call, backend: str | Backend, *, return_lse: bool) -> Result:
    call = call.autocast()
    q, k = call.q, call.k
    with without_autocast(q.device):
        if not (q.shape[0] and q.shape[2] and k.shape[2]):
            output, lse = _empty_result(call)
            return Result(output, lse if return_lse else None)
        call = call.without_hidden().without_padding()
        choice = choose(call, backend)
        result = choice.plan.run(lse=return_lse)
        if choice.plan.by_definition or not result.output.requires_grad:
            return result
        return differentiable_twice(result, call.problem())


def attend_block_backward(call: Call, backend: str | Backend) -> Float[Tensor, "B H Q E"]:
    """Backward pass of one block of keys, given output and LSE over all keys.

    The gradients of all blocks sum to those of attention to all keys; no block has to be stored or
    computed again.

    Args:
        call: with ``global_softmax``, output and LSE over all keys.
        backend: as of ``attend``.

    Returns:
        ``[B, H, Q, E]``, any with this gradient.

    Raises: as ``attend``; ArgumentError for weights that are no softmax.
    """
    validate(call)
    require_softmax("global_softmax", "none", call.encoding)
    transform = call.encoding.value_transform()
    if transform is not None:
        output = attend_block_backward(call.with_values(*transform), backend)
        return transform[0].undo(output, call.grid.query)
    call = call.autocast()
    q, k = call.q, call.k
    with without_autocast(q.device):
        if not (q.shape[0] and q.shape[2] and k.shape[2]):
            return _empty_result(call)[0]
        return choose(call.without_padding(), backend).plan.run().output


def transformed(call: Call) -> tuple[Float[Tensor, "B H Q D"], Float[Tensor, "b g K D"]]:
    """Queries and keys after the query_key part, as ``attend`` computes with them.

    Raises:
        ArgumentError: as ``attend``.
    """
    validate(call)
    transform = call.encoding.query_key
    if transform is None:
        return call.q, call.k
    with torch.autocast(call.q.device.type, enabled=False):
        call = call.autocast()
        rotated: tuple[Tensor, Tensor] = transform(call.q, call.k, call.grid)
        return rotated


def explain(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    grid: Grid,
    encoding: Encoding,
    *,
    backend: str | Backend = "auto",
    dropout: float = 0.0,
    scale: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    softcap: float | None = None,
) -> Explanation:
    """Explain which backend ``attend`` takes for the same arguments. Computes no attention.

    Args: as ``attend``.

    Raises: as ``attend``.
    """
    call = Call(q, k, v, grid, encoding, dropout, scale, sinks=sinks, softcap=softcap)
    validate(call)
    transform = encoding.value_transform()
    call = (call if transform is None else call.with_values(*transform)).autocast()
    with without_autocast(q.device):
        call = call.without_hidden().without_padding()
        choice = choose(call, backend)
        refused = choice.refusals | (refusals(call) if choice.rule is not NAMED else {})
        how = choice.plan.description
        build = choice.backend.build()
        how += "" if build is None else f"; kernels: {build}"
        return Explanation(choice.backend.name, how, choice.rule.name, refused)


def _empty_result(call: Call) -> tuple[Tensor, Tensor]:
    """Output and LSE without batch rows, queries or keys: empty or zero, or the LSE of sinks."""
    q, k, v, sinks = call.q, call.k, call.v, call.sinks
    zero = 0.0 * (q.sum() + k.sum() + v.sum())
    output = v.new_zeros(*q.shape[:3], v.shape[3]) + zero
    wide = torch.promote_types(q.dtype, torch.float32)
    if sinks is None:
        return output, q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    return output, sinks.to(wide).unsqueeze(-1).expand(q.shape[:3])
