"""PyTorch's FlexAttention, with a function that adds the bias of each pair to its logit.

Terms by offset are read from tables by the pair's entry, which follows from the places of
its tokens in a sequence or an image. Vectors of tokens are multiplied with all rows beforehand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.attention.backends.common.base import Backend, Plan, Refusal, Result, refuse_rare
from posenc.attention.problem.lowering import add_rows, has_rows
from posenc.attention.problem.offsets import Offsets, find_spacing
from posenc.attention.problem.problem import Problem
from posenc.attention.problem.terms import reads_offsets
from posenc.attention.softmax import add_sinks
from posenc.encoding import BucketedTerms, LowRank, StructuredScore, TokenTableProduct
from posenc.encoding.prepared import reused_of_grid
from posenc.grid import Grid
from posenc.layout.integers import exact_dtype
from posenc.runtime import is_transformed

if TYPE_CHECKING:  # takes 25 ms to import
    from torch.nn.attention.flex_attention import BlockMask


MOST_ROWS = 1024
"""Rows that vectors of tokens are multiplied with: as many numbers a token."""

NARROWEST, WIDEST = 16, 256

DEVICE = "cuda"

KINDS = 256
"""Kernels that are compiled in a process at most."""

_COMPILE = inspect.signature(torch.compile).parameters

Mod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A ``score_mod``: a pair's logit from its product, batch row, head, query and key."""


class Flex(Backend):
    """Tables, biases by token, and products with few rows, on sequences and whole images.

    What depends on no offset is served for any layout, and all of it where tokens are one position
    apart in each document.

    Args:
        kernel_options: of ``flex_attention``, such as tile sizes. Numbers that are read pair by
            pair are not fetched ahead unless it says otherwise: PyTorch's own choice of stages
            would take more shared memory than devices have.
    """

    name = "flex"

    def __init__(self, *, kernel_options: Mapping[str, Any] | None = None) -> None:
        self.kernel_options = dict(kernel_options or {})

    def plan(self, problem: Problem) -> Plan | Refusal:
        problem = _by_offset_if_needed(problem)
        unsupported = refuse_rare(problem, "sinks", "softcap") or _unsupported(problem)
        if unsupported is not None:
            return unsupported
        how = "PyTorch's FlexAttention, its terms read pair by pair"
        return Plan(how, partial(_run, problem, self.kernel_options), trial="")


def _by_offset_if_needed(problem: Problem) -> Problem:
    """The problem with the structured form that it has on sequences, if it has no other."""
    if problem.lowered is not None or problem.q.device.type != DEVICE or is_transformed():
        return problem
    spacing = find_spacing(problem.grid)
    if isinstance(spacing, str):
        return problem
    first, last = Offsets.shifted(problem.grid, spacing.shift).reach
    return replace(problem, lowered=problem.lower_on_sequences(first, last))


def _unsupported(problem: Problem) -> Refusal | None:
    q, v = problem.q, problem.v
    if q.device.type != DEVICE:
        return Refusal(f"its kernels run on CUDA devices, not on {q.device.type}")
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return Refusal(f"its kernels compute in float32 at most, not in {q.dtype}")
    if problem.dropout:
        return Refusal("it has no dropout")
    if is_transformed():
        return Refusal("its kernels are unknown to torch.func and forward-mode differentiation")
    narrowest, widest = sorted((q.shape[-1], v.shape[-1]))
    if narrowest < NARROWEST or widest > WIDEST:
        return Refusal(
            f"it takes heads of width {NARROWEST} to {WIDEST}, not {narrowest} and {widest}"
        )
    if problem.softcap is not None and has_rows(problem.lowered or ()):
        return Refusal("a cap takes sums of gates, which it leaves out of the logits")
    reason = refuse_terms(problem.lowered, problem.grid)
    if reason is None and torch.are_deterministic_algorithms_enabled() and _learns(problem):
        return Refusal("it adds up the gradients of terms in no fixed order")
    return reason


def _run(problem: Problem, kernel_options: dict[str, Any], *, lse: bool) -> Result:
    from torch.nn.attention.flex_attention import AuxRequest

    problem = problem.rotated
    mod = score_mod(problem)
    if mod is not None:
        kernel_options = {"num_stages": 1} | kernel_options
    result = _kernels()[0](
        problem.q,
        problem.k,
        problem.v,
        score_mod=mod,
        block_mask=None if problem.grid.dense else _block_mask(problem.grid),
        scale=problem.scale,
        enable_gqa=problem.q.shape[1] != problem.k.shape[1],
        kernel_options=kernel_options or None,
        return_aux=AuxRequest(lse=True) if lse or problem.sinks is not None else None,
    )
    if not lse and problem.sinks is None:
        return Result(result, None)
    output, aux = result
    without_sinks = Result(output, add_rows(aux.lse, problem.lowered or ()))
    return add_sinks(without_sinks, problem.sinks, lse=lse)


def _learns(problem: Problem) -> bool:
    """True if anything that is read pair by pair needs a gradient."""
    if not torch.is_grad_enabled():
        return False
    tensors: list[Tensor | None] = []
    for term in problem.lowered or ():
        if isinstance(term, BucketedTerms):
            products = [product for product in (term.left, term.right) if product is not None]
            tensors += [term.table, term.column]
            tensors += [x for product in products for x in (product.tokens, product.rows)]
    return any(x is not None and x.requires_grad for x in tensors)


def refuse_terms(lowered: tuple[StructuredScore, ...] | None, grid: Grid) -> Refusal | None:
    """The reason why terms cannot be read pair by pair; None if they can."""
    if lowered is None:
        return Refusal("the score or value part has no structured form on this grid")
    groups = [term for term in lowered if isinstance(term, BucketedTerms)]
    if len(groups) < len(lowered):
        return Refusal("it has no place for extra columns in float32")
    if any(group.value is not None for group in groups):
        return Refusal("it has no place for a value part")
    if not any(reads_offsets(group) for group in groups):
        return None
    if Entries.of(grid) is None:
        reason = find_spacing(grid)
        if grid.query.axes > 1 or not isinstance(reason, str):
            reason = "its tokens are not known to be those of a whole image"
        return Refusal(reason)
    products = [
        product for group in groups for product in (group.left, group.right) if product is not None
    ]
    rows = max([0, *(product.rows.shape[1] for product in products)])
    if rows > MOST_ROWS:
        return Refusal(
            f"vectors of tokens would be multiplied with {rows} rows, more than {MOST_ROWS}"
        )
    return None


@dataclass(frozen=True)
class Entries:
    """All offsets of a grid, numbered; a sequence is an image of one row.

    Args:
        query, key: rows and columns of cells on both sides.
        lowest: smallest offset along each axis.
    """

    query: tuple[int, int]
    key: tuple[int, int]
    lowest: tuple[int, ...]

    @classmethod
    def of(cls, grid: Grid) -> Entries | None:
        """Entries of a grid of (packed, padded) sequences or of whole images; None for others."""
        query, key = grid.query, grid.key
        spacing = find_spacing(grid)
        if not isinstance(spacing, str):
            lowest = spacing.shift - (query.length - 1)
            return cls((1, query.length), (1, key.length), (lowest,))
        if query.extent is None or key.extent is None:
            return None
        if query.special is not None or key.special is not None:
            return None
        return cls(query.extent, key.extent, (1 - query.extent[0], 1 - query.extent[1]))

    def offsets(self, device: torch.device) -> Float[Tensor, "entries A"]:
        """The offset of each entry."""
        sizes = [mine + theirs - 1 for mine, theirs in zip(self.query, self.key, strict=True)]
        axes = [
            torch.arange(low, low + size, device=device, dtype=exact_dtype(low, low + size, device))
            for low, size in zip(self.lowest, sizes[-len(self.lowest) :], strict=True)
        ]
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)

    def varying(self, max_distance: int | None) -> tuple[int, int] | None:
        """First and last entry of a sequence between which what offsets read changes; None: no
        such ones are known."""
        if len(self.lowest) > 1:
            return None
        lowest, last = self.lowest[0], self.query[1] + self.key[1] - 2
        if max_distance is None:
            return 0, last
        first = min(max(-max_distance - lowest, 0), last)
        return first, min(max(max_distance - lowest, first), last)

    def entry(self, i: Int[Tensor, "*i"], j: Int[Tensor, "*j"]) -> Int[Tensor, "*ij"]:
        """The entry of pairs of queries and keys."""
        if len(self.lowest) == 1:
            return j - i + (self.query[1] - 1)
        (rows, columns), (_, key_columns) = self.query, self.key
        down = j // key_columns - i // columns + (rows - 1)
        across = j % key_columns - i % columns + (columns - 1)
        return down * (columns + key_columns - 1) + across


def score_mod(problem: Problem) -> Mod | None:
    """The function from the product of a pair to its logit; None for the identity."""
    entries = Entries.of(problem.grid)
    mods: list[Mod] = []
    for term in problem.lowered or ():
        if isinstance(term, LowRank):
            continue
        if term.column is not None:
            mods.append(_by_key(_rows(term.column, problem)))
        if reads_offsets(term) and entries is not None:
            mods += _by_offset(term, entries, problem)
    if problem.softcap is not None:
        cap = problem.softcap
        mods.append(lambda score, b, h, i, j: cap * torch.tanh(score / cap))
    if not mods:
        return None

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for add in mods:
            score = add(score, b, h, i, j)
        return score

    return mod


def _by_offset(group: BucketedTerms, entries: Entries, problem: Problem) -> list[Mod]:
    bucket = group.bucket(entries.offsets(problem.q.device))
    mods: list[Mod] = []
    if group.table is not None:
        bias = group.table[:, bucket].float()
        mods.append(lambda score, b, h, i, j: score + bias[h, entries.entry(i, j)])
    products = [product for product in (group.left, group.right) if product is not None]
    fewest = min([MOST_ROWS, *(product.rows.shape[1] for product in products)])
    span = entries.varying(group.max_distance)
    by_offset = span is not None and span[1] - span[0] < min(2 * fewest, MOST_ROWS)

    def place(i: Tensor, j: Tensor) -> Tensor:
        """The column of products that a pair reads."""
        entry = entries.entry(i, j)
        if span is None or not by_offset:
            return bucket[entry]
        return entry.clamp(*span) - span[0]

    def read(product: TokenTableProduct) -> Tensor:
        rows = product.rows
        if span is not None and by_offset:  # in place of a number read for each pair
            rows = rows[:, bucket[span[0] : span[1] + 1]]
        return _rows(product.tokens.float() @ rows.float().mT, problem)

    if group.left is not None:
        left = read(group.left)
        mods.append(lambda score, b, h, i, j: score + left[b, h, i, place(i, j)])
    if group.right is not None:
        right = read(group.right)
        mods.append(lambda score, b, h, i, j: score + right[b, h, j, place(i, j)])
    return mods


def _by_key(column: Float[Tensor, "B H K"]) -> Mod:
    return lambda score, b, h, i, j: score + column[b, h, j]


def _rows(x: Tensor, problem: Problem) -> Tensor:
    """``x`` in float32, expanded to all batch rows."""
    return x.float().expand(problem.q.shape[0], *x.shape[1:]).contiguous()


@cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., BlockMask]]:
    """FlexAttention, and what finds the blocks that it skips, both compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # In one graph: a call that fell back to eager would hold all logits in memory. There are more
    # kinds of calls than the eight that PyTorch compiles by default before it fails.
    options: dict[str, Any] = {"recompile_limit": KINDS} if "recompile_limit" in _COMPILE else {}
    compiled = torch.compile(flex_attention, fullgraph=True, **options)
    return compiled, torch.compile(create_block_mask)


def _block_mask(grid: Grid) -> BlockMask:
    """Mask of the blocks with visible pairs, computed once for each pair of layouts."""

    def compute(grid: Grid) -> BlockMask:
        rows = grid.batch if grid.batch > 1 else None
        sizes = (rows, None, grid.query.length, grid.key.length)
        return _kernels()[1](grid.mask_mod(), *sizes, device=grid.query.device)

    return reused_of_grid(compute, "block mask", grid=grid)


ENTRY = Flex()
