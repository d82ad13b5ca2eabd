"""PyTorch's own fused kernel, wherever an encoding can be put in the form it takes.

A bias that depends on the offset alone is a Toeplitz matrix. With the queries in reversed order it
is a Hankel matrix, whose entry (r, j) is ``bias[r + j]``: a view of the biases of all offsets with
both strides 1. The CPU kernel takes that view as its mask, so that no Q×K bias is ever written.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posenc.attention.backends.common.base import (
    Attend,
    Backend,
    Plan,
    Refusal,
    Result,
    join_queries,
    refuse_rare,
)
from posenc.attention.backends.common.definition import lse_by_definition
from posenc.attention.backends.common.flash_cpu import flash_forward, prepare_flash
from posenc.attention.backends.common.fused import (
    are_few,
    fold_heads,
    fused_attention,
    plainly_causal,
)
from posenc.attention.problem.lowering import bias_by_offset, is_constant_table
from posenc.attention.problem.problem import Problem
from posenc.attention.softmax import add_sinks
from posenc.encoding import BucketedTerms, LowRank, repeat_heads
from posenc.grid import FARTHEST, Grid
from posenc.runtime import (
    differentiates_forward,
    differentiates_twice,
    has_values,
    is_exporting,
    is_transformed,
)

CAUSAL_BLOCK = 512
"""Queries a kernel call when a causal grid has a bias: keys ahead of a whole block are skipped.
Of 128, 256, 512 and 1024 the fastest forward and backward at 2048 on two cores."""

WIDTH_MULTIPLE = 16
"""Head widths that are no multiple of this leave the kernel's vectorised path."""


FEWEST_KEYS = 16
"""Keys below which the CPU kernel of AVX-512 takes NaN for the logit of a hidden key: rows of NaN
come out as zeros."""


class Sdpa(Backend):
    """PyTorch's fused kernel: no score part, constant tables on regular layouts, and low rank."""

    name = "sdpa"

    def plan(self, problem: Problem) -> Plan | Refusal:
        refusal = refuse_rare(problem, "sinks") or _unsupported(problem)
        if refusal is not None:
            return refusal
        compute, prepare = partial(_run, problem), partial(_prepare, problem)
        return Plan(_description(problem), compute, prepare=prepare)


def _prepare(problem: Problem) -> Attend | None:
    if problem.sinks is not None or problem.rotation is not None or _loses_nan(problem):
        return None  # other kernels rotate as they read
    mask, causal = None, not problem.lowered and plainly_causal(problem.grid)
    if problem.lowered or not (problem.grid.dense or causal):
        mask = _mask_of_few(problem)
        if mask is None:
            return None
    operands = (problem.q, problem.k, problem.v)
    flash = prepare_flash(*operands, mask, causal=causal, scale=problem.scale)
    return flash and (lambda q, k, v: Result(*flash(q, k, v)))


def _unsupported(problem: Problem) -> Refusal | None:
    if problem.encoding.value is not None:
        return Refusal("the fused kernel has no place for a value part")
    if problem.sinks is not None:
        if problem.q.device.type != "cpu":
            return Refusal("only its CPU kernel has the LSE that sinks are joined by")
        if is_exporting():
            return Refusal("sinks are joined by an LSE that other runtimes do not have")
    if differentiates_forward():
        return Refusal("the fused kernel has no forward-mode derivative")
    if differentiates_twice():
        return Refusal("the fused kernel has no second derivatives under torch.func")
    on_cpu = problem.q.device.type == "cpu"
    if problem.dropout and on_cpu:
        return Refusal("the fused CPU kernel has no dropout")
    lowered = problem.lowered
    if lowered is None:
        return Refusal("the score part has no structured form on this grid")
    if any(not is_constant_table(term) and not isinstance(term, LowRank) for term in lowered):
        return Refusal("the score part is neither a table without gradient nor of low rank")
    if any(isinstance(term, LowRank) for term in lowered) and problem.q.dtype.itemsize < 4:
        return Refusal(f"extra columns of positions would be rounded to {problem.q.dtype}")
    if any(is_constant_table(term) for term in lowered):
        if is_transformed():
            return Refusal("under torch.func a table cannot be viewed as a bias")
        if not on_cpu:
            return Refusal("only the CPU kernel reads a table through an unaligned view")
        if problem.grid.shift is None:
            return Refusal("a table can be viewed as a bias over regular layouts only")
        if problem.grid.segmented:
            return Refusal("documents and padding do not fit in a table of offsets")
    return None


def _description(problem: Problem) -> str:
    lowered = problem.lowered or ()
    ways = []
    if any(is_constant_table(term) for term in lowered):
        ways.append("the table as a zero-copy view for its mask")
    if any(isinstance(term, LowRank) for term in lowered):
        ways.append("extra columns on queries and keys")
    if not ways and not problem.grid.dense and not plainly_causal(problem.grid):
        ways.append("a mask of Q×K booleans")
    return "PyTorch's fused kernel" + (f" with {' and '.join(ways)}" if ways else "")


def _run(problem: Problem, *, lse: bool) -> Result:
    problem, sinks = replace(problem.rotated, sinks=None), problem.sinks
    needed = lse or sinks is not None
    # Only the CPU's kernel is called without PyTorch's choice among kernels.
    traced = is_transformed() or torch.compiler.is_compiling()
    needs_lse = needed and problem.q.device.type == "cpu" and not traced
    result = _attend(problem, lse=needs_lse)
    if _loses_nan(problem):
        result = _with_nan(result, problem)
    if needed and result.lse is None:
        result = result._replace(lse=lse_by_definition(problem))
    return add_sinks(result, sinks, lse=lse)


def _loses_nan(problem: Problem) -> bool:
    """True for few keys on a CPU outside of graphs (of dynamic length)."""
    few = problem.q.device.type == "cpu" and not torch.compiler.is_compiling()
    return few and problem.k.shape[2] < FEWEST_KEYS


def _with_nan(result: Result, problem: Problem) -> Result:
    """NaN for queries that hold NaN and see a key, zeros for those that see none."""
    seen = problem.grid.visible.any(-1)
    lost = problem.q.isnan().any(-1) & seen
    output = result.output.masked_fill(lost.unsqueeze(-1), torch.nan)
    output = output.masked_fill(~seen.unsqueeze(-1), 0.0)
    return Result(output, None if result.lse is None else result.lse.masked_fill(lost, torch.nan))


def _attend(problem: Problem, *, lse: bool) -> Result:
    lowered = problem.lowered or ()
    factors = [term for term in lowered if isinstance(term, LowRank)]
    tables = [bias_by_offset(t, problem.grid) for t in lowered if isinstance(t, BucketedTerms)]
    q, k, v = _widen(problem, factors)
    if tables:
        result = _attend_biased(q, k, v, torch.stack(tables).sum(0), problem, lse=lse)
    else:
        result = _attend_masked(q, k, v, problem, lse=lse)
    return Result(result.output[..., : problem.v.shape[-1]], result.lse)


def _widen(
    problem: Problem, factors: list[LowRank]
) -> tuple[Float[Tensor, "B H Q W"], Float[Tensor, "B G K W"], Float[Tensor, "B G K W"]]:
    """Queries and keys with the factors as extra columns, and all three of one width."""
    q, k, v = problem.q, problem.k, problem.v
    if factors:
        k = repeat_heads(k, problem.heads)
        v = repeat_heads(v, problem.heads)
        rows, lanes = q.shape[0], problem.heads
        q_columns = [f.query / problem.scale for f in factors]
        q = torch.cat([q, *(c.expand(rows, lanes, -1, -1).to(q) for c in q_columns)], dim=-1)
        k = torch.cat([k, *(f.key.expand(rows, lanes, -1, -1).to(k) for f in factors)], dim=-1)
    width = max(q.shape[-1], v.shape[-1])
    if q.shape[-1] != v.shape[-1] or factors:
        width = -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    return _pad(q, width), _pad(k, width), _pad(v, width)


def _pad(x: Float[Tensor, "*dims D"], width: int) -> Float[Tensor, "*dims W"]:
    missing = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, lse: bool) -> Result:
    """Attention without a bias, with the cheapest mask that equals the mask of the grid."""
    grid = problem.grid
    if grid.dense:
        return _kernel(q, k, v, problem, lse=lse)
    if plainly_causal(grid):
        return _kernel(q, k, v, problem, causal=True, lse=lse)
    if q.device.type == "cpu" and grid.shift is not None and not grid.segmented:
        bias = torch.zeros_like(grid.distinct_offsets(device=q.device), dtype=torch.float32)
        return _attend_biased(q, k, v, bias.unsqueeze(0), problem, lse=lse)
    mask = grid.visible
    if q.device.type == "cpu" and not is_exporting():
        return _masked(_kernel(q, k, v, problem, mask=mask, lse=lse), ~mask.any(-1))
    # Elsewhere, in runtimes of exported programs too, a row that sees nothing may come out as NaN
    # or as a mean: let it see all, then clear it.
    empty = ~mask.any(dim=-1, keepdim=True)
    result = _kernel(q, k, v, problem, mask=mask | empty, lse=lse)
    return result._replace(output=result.output.masked_fill(empty, 0.0))


def _mask_of_few(problem: Problem) -> Float[Tensor, "1 h Q K"] | None:
    """Bias and mask added to the logits of few queries over regular layouts.

    None where there is more than tables, or a query sees no key.
    """
    grid, lowered = problem.grid, problem.lowered or ()
    tables = [term for term in lowered if isinstance(term, BucketedTerms)]
    few = are_few(problem.q) and len(tables) == len(lowered)
    if not few or grid.shift is None or grid.segmented or _empty_rows(grid, problem.q).any():
        return None
    dtype = torch.promote_types(problem.q.dtype, torch.float32)
    offsets = grid.distinct_offsets(device=problem.q.device)
    bias = torch.zeros_like(offsets, dtype=dtype).unsqueeze(0)
    for term in tables:
        bias = bias + bias_by_offset(term, grid).detach().to(dtype)
    first, last = _visible_offsets(grid, grid.shift)
    bias = bias.masked_fill((offsets < first) | (offsets > last), -torch.inf)
    return bias.unfold(1, problem.k.shape[2], 1).flip(1).contiguous().unsqueeze(0)


def _empty_rows(grid: Grid, q: Float[Tensor, "B H Q D"]) -> Bool[Tensor, " Q"]:
    """Queries of a regular grid that see no key."""
    shift = grid.require_shift()
    first, last = _visible_offsets(grid, shift)
    rows = torch.arange(grid.query.length, device=q.device)
    ends = (rows + last - shift).clamp(max=grid.key.length - 1)
    return (rows + first - shift).clamp(min=0) > ends


def _attend_biased(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Float[Tensor, "h offsets"],
    problem: Problem,
    *,
    lse: bool,
) -> Result:
    """Attention with ``bias[h, j - i + Q - 1]`` added to the logits of a regular grid."""
    grid = problem.grid
    queries, keys = q.shape[2], k.shape[2]
    shift = grid.require_shift()
    first, last = _visible_offsets(grid, shift)
    # The kernel reads a float32 mask beside half-precision queries, and float64 beside float64.
    bias = bias.detach().to(torch.promote_types(q.dtype, torch.float32))
    bias = _drop_negligible(bias, q, k, problem)
    if not grid.dense:
        offsets = grid.distinct_offsets(device=q.device)
        bias = bias.masked_fill((offsets < first) | (offsets > last), -torch.inf)
    bias = bias.contiguous()
    parts = []
    for begin, end in _blocks(queries, one_sided=grid.band != (-FARTHEST, FARTHEST)):
        low = max(0, begin + first - shift)
        high = min(keys, end + last - shift)
        if low >= high:
            parts.append(_nothing(q[:, :, begin:end], k, v, lse=lse))
            continue
        # Row r of the reversed block is query end-1-r, so the pair (r, j) is at r + j + Q - end.
        size = (1, bias.shape[0], end - begin, high - low)
        # From a slice, which carries the storage offset: torch.compile cannot trace reading it.
        line = bias.view(-1)[queries - end + low :]
        view = line.as_strided(size, (0, bias.shape[1], 1, 1))
        block = (_reversed(q[:, :, begin:end]), k[:, :, low:high], v[:, :, low:high])
        output, sums = _kernel(*block, problem, mask=view, lse=lse)
        parts.append(Result(_reversed(output), None if sums is None else _reversed(sums)))
    result = join_queries(parts)
    if last >= shift and queries + first <= keys + shift:  # the first and the last query see a key
        return result
    return _masked(result, _empty_rows(grid, q))


def _reversed(x: Tensor) -> Tensor:
    """Queries ``[B, H, Q, …]`` in the opposite order."""
    return x if x.shape[2] == 1 else x.flip(2)


def _masked(result: Result, empty: Bool[Tensor, "*b Q"]) -> Result:
    """Zeros and an LSE of -inf for queries that see no key, where the kernel has NaN or 0."""
    output = result.output.masked_fill(empty.unsqueeze(-1), 0.0)
    return Result(output, None if result.lse is None else result.lse.masked_fill(empty, -torch.inf))


def _nothing(q: Tensor, k: Tensor, v: Tensor, *, lse: bool) -> Result:
    """Zeros for queries that see no key, with gradients of zero to all three."""
    tied = q + k[:, :1, :1] + v[:, :1, :1]
    output = tied.masked_fill(torch.ones_like(tied, dtype=torch.bool), 0.0)
    wide = torch.promote_types(q.dtype, torch.float32)
    return Result(output, q.new_full(q.shape[:3], -torch.inf, dtype=wide) if lse else None)


def _drop_negligible(
    bias: Float[Tensor, "h offsets"], q: Tensor, k: Tensor, problem: Problem
) -> Float[Tensor, "h offsets"]:
    """The bias with -inf where no weight can matter.

    Weights so small that they are subnormal slow the kernel down several times. A row that sees
    its own position has a logit of at least ``bias[0] - B`` there, B = scale · max‖q‖ · max‖k‖,
    and at offset Δ none above ``bias[Δ] + B``: its weight is at most e^(bias[Δ] - bias[0] + 2B).
    Where that is below eps³, all such weights together change an output by less than K · eps³ of
    the largest value: far below the rounding of the result for any K that fits in memory.
    """
    grid = problem.grid
    shift, queries, keys = grid.require_shift(), grid.query.length, grid.key.length
    if shift > 0 or queries > shift + keys:
        return bias  # some query does not see its own position
    if are_few(q):
        return bias  # the norms of all keys cost as much as the attention
    if is_exporting():
        return bias  # a saving on this kernel, which the program may not run on
    limit = 3 * math.log(torch.finfo(bias.dtype).eps)
    if has_values(bias) and float(bias.min() - bias.max()) > limit:
        return bias
    longest_query, longest_key = (x.detach().norm(dim=-1).amax().to(bias.dtype) for x in (q, k))
    largest = problem.scale * longest_query * longest_key
    here = bias.narrow(1, queries - 1 - shift, 1)
    return bias.masked_fill(bias - here + 2 * largest < limit, -torch.inf)


def _blocks(queries: int, *, one_sided: bool) -> list[tuple[int, int]]:
    """Ranges of queries, so that keys hidden from a whole range can be left out.

    One range while compiling: a loop over a symbolic length would be compiled anew a length.
    """
    if not one_sided or torch.compiler.is_compiling() or queries <= CAUSAL_BLOCK:
        return [(0, queries)]
    starts = range(0, queries, CAUSAL_BLOCK)
    return [(start, min(start + CAUSAL_BLOCK, queries)) for start in starts]


def _visible_offsets(grid: Grid, shift: int) -> tuple[int, int]:
    """Smallest and largest offset that a regular grid lets through."""
    far = grid.query.length + grid.key.length + abs(shift)
    return max(-far, grid.band[0]), min(far, grid.band[1])


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    mask: Bool[Tensor, "b h Q K"] | Float[Tensor, "b h Q K"] | None = None,
    causal: bool = False,
    lse: bool,
) -> Result:
    if lse:
        rows, mask = (q, mask) if causal else fold_heads(q, k, mask)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        output, sums = flash_forward(rows, k, v, mask, causal=causal, scale=problem.scale)
        return Result(output.reshape(*q.shape[:3], -1), sums.reshape(q.shape[:3]))
    dropout, scale = problem.dropout, problem.scale
    return Result(fused_attention(q, k, v, mask, causal=causal, dropout=dropout, scale=scale), None)


ENTRY = Sdpa()
