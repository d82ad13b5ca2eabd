"""All gradients of a problem: launches of the kernels of the backward pass. Imports Triton."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
import triton
from torch import Tensor
from triton.language import constexpr

from posenc.attention.backends.triton.form import CURVE, RATES, empty_as, shared_memory, tile_memory
from posenc.attention.backends.triton.kernels.arguments import (
    DiagonalSums,
    Gradients,
    KernelArguments,
)
from posenc.attention.backends.triton.kernels.configs import (
    PROGRAMS,
    bytes_per_token,
    diagonal_block,
)
from posenc.attention.backends.triton.kernels.gradients import gradients_kernel, offsets_kernel
from posenc.attention.backends.triton.launch import (
    Ends,
    Launch,
    blocks,
    low_and_high,
    maybe,
    numbers,
    padded,
    tokens,
)
from posenc.attention.problem.record import KernelProblem


def gradients_by_path(
    record: KernelProblem, results: Sequence[Tensor], wanted: Container[str]
) -> dict[str, Tensor]:
    """Gradients by path; gradients of tables are computed only if wanted.

    Args:
        results: as of ``Operator``.
    """
    launch, terms = Launch(record, *results), record.terms
    gradients, query_sums, weights = token_gradients(launch, for_keys=False)
    of_keys, key_sums, _ = token_gradients(launch, for_keys=True)
    gradients |= of_keys
    sinks, delta, lse = launch.sinks, launch.delta, launch.lse
    if record.sinks is not None and sinks is not None and delta is not None and lse is not None:
        shares = (sinks - lse).exp().masked_fill(lse.isneginf(), 0.0)
        gradients["sinks"] = -(shares * delta).sum_to_size(record.sinks.shape)
    bias, bias_wanted = "terms.bias_by_offset", "terms.bias_by_offset" in wanted
    sources = (
        ("left_rows", terms.left, query_sums),
        ("right_rows", terms.right, key_sums),
        ("value_rows", launch.gradient, weights),
    )
    for name, vectors, sums in sources:
        path, rows = f"terms.{name}", getattr(terms, name)
        if rows is None or vectors is None or path not in wanted:
            continue
        takes_bias = bias_wanted and name != "value_rows"
        of_bias, of_rows = offset_gradients(launch, name, bias_wanted=takes_bias)
        if of_bias is not None:
            gradients[bias], bias_wanted = of_bias, False
        if of_rows is not None:
            gradients[path] = (of_rows if sums is None else sums.add_to_rows(of_rows, vectors)).to(
                rows.dtype
            )
    if bias_wanted:
        of_bias, _ = offset_gradients(launch, None, bias_wanted=True)
        if of_bias is not None:
            gradients[bias] = of_bias
    if any(path in wanted for path in CURVE):
        gradients.update(zip(CURVE, curve_gradients(launch), strict=True))
    if bias in gradients and query_sums is not None:
        gradients[bias][:, 0] += query_sums.first.sum((0, 2))
        gradients[bias][:, -1] += query_sums.last.sum((0, 2))
    return gradients


def token_gradients(
    launch: Launch, *, for_keys: bool
) -> tuple[dict[str, Tensor], Ends | None, Ends | None]:
    """Gradients of queries and their terms; or of keys, values and keys' terms if ``for_keys``.

    By their paths, with the sums of the gradients of logits, and of weights, over the pairs at
    both ends.
    """
    x, terms, queries = launch.x, launch.x.terms, launch.x.q.shape[:3]
    paths = ["q", "", "terms.left", "terms.query_factor", ""]
    operands = [x.q, None, terms.left, terms.query_factor, None]
    if for_keys:
        paths = ["k", "v", "terms.right", "terms.key_factor", "terms.column"]
        operands = [x.k, x.v, terms.right, terms.key_factor, terms.column]
    of_tokens = [None if x is None else empty_as(x, x.shape[-1]) for x in operands[:4]]
    last = operands[4]
    column = None if last is None else last.new_empty(last.shape)
    rates = sums = weights = None
    if launch.curve is not None and not for_keys:
        rates = x.q.new_empty(queries, dtype=torch.float32)
    length = launch.keys if for_keys else launch.queries
    if launch.ended:
        sums = Ends.of(launch.batch, launch.heads, length, like=x.q)
        if terms.value_rows is not None and not for_keys:
            weights = Ends.of(launch.batch, launch.heads, length, like=x.q)
    first, second, term, factor = (maybe(tokens, x) for x in of_tokens)
    ends = *low_and_high(sums, for_keys=for_keys), *low_and_high(weights, for_keys=for_keys)
    single = maybe(numbers, column), *ends, maybe(numbers, rates)
    into = Gradients(first, second, term, factor, *single)
    programs = blocks(length, launch.batch * (x.k if for_keys else x.q).shape[1])
    launch.run(gradients_kernel, programs, launch.arguments(for_keys=for_keys), into)
    gradients = dict(zip(paths, (*of_tokens, column), strict=True))
    if rates is not None:
        gradients[RATES] = rates.sum(1).sum_to_size(x.pairs.tensors[-1].shape)
    return {path: x for path, x in gradients.items() if x is not None}, sums, weights


def offset_gradients(
    launch: Launch, rows: str | None, *, bias_wanted: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the offset bias ``[H, N]`` and of one table, without the sums at its ends.

    Args:
        rows: ``"left_rows"``, ``"right_rows"`` or ``"value_rows"``; None: none.
        bias_wanted: whether that of the offset bias is wanted.
    """
    for_keys, count = rows in ("left_rows", "value_rows"), launch.entries
    sums, start = _diagonal_sums(launch, rows, entries=bias_wanted, curve=False)
    of_bias, of_rows = (
        None if x is None else _joined(x, start, count, reverse=for_keys)
        for x in (sums.entries, sums.rows)
    )
    if of_rows is not None and rows is not None and len(getattr(launch.x.terms, rows)) == 1:
        of_rows = of_rows.sum(0, keepdim=True)
    return of_bias, of_rows


def curve_gradients(launch: Launch) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the numbers ``[1, N]``, slopes and intercepts ``[H, M]`` of the function."""
    sums, start = _diagonal_sums(launch, None, entries=True, curve=True)
    of_numbers = _joined(sums.entries, start, launch.entries, reverse=False)
    pieces = launch.x.pairs.tensors[2].shape[1]
    slope, intercept = (x.sum((0, 2))[:, :pieces] for x in (sums.slope, sums.intercept))
    return of_numbers.sum(0, keepdim=True), slope, intercept


def _diagonal_sums(
    launch: Launch, rows: str | None, *, entries: bool, curve: bool
) -> tuple[DiagonalSums, int]:
    """Sums of all programs, and where their windows start, as of ``_joined``."""
    x = launch.x
    table: Tensor | None = None if rows is None else getattr(x.terms, rows)
    for_keys = rows in ("left_rows", "value_rows")
    args, block = launch.arguments(for_keys=for_keys), _diagonal_block(launch)
    low_steps, high_steps = _steps(launch, args)
    first, count = _diagonals(launch, args, block)
    heads = 1 if table is not None and len(table) == 1 and not entries else launch.heads
    splits = max(1, min(PROGRAMS // max(1, count * heads), 64))

    def made(*rest: int) -> Tensor:
        return x.q.new_empty(splits, heads, count, *rest, dtype=torch.float32)

    width = 0 if table is None else table.shape[-1]
    pieces = 2 * padded(x.pairs.tensors[2].shape[1] - 1) if curve else 0
    into = DiagonalSums(
        entries=made(2 * block) if entries else None,
        rows=made(2 * block, width) if table is not None else None,
        slope=made(pieces) if curve else None,
        intercept=made(pieces) if curve else None,
        first=first,
        diagonals=count,
        low_steps=low_steps,
        high_steps=high_steps,
        heads=heads,
        splits=splits,
        width=constexpr(width),
        of_values=constexpr(rows == "value_rows"),
    )
    if count:
        kind = (*launch.kind, rows, entries, curve)
        programs = (count * heads * splits,)
        launch.run(offsets_kernel, programs, args, into, kind=kind, block=block)
    middle = first * block + int(args.band.origin)
    return into, -(middle + count * block - 1) if for_keys else middle - (block - 1)


def _diagonal_block(launch: Launch) -> int:
    """Side of the tiles of ``offsets_kernel``."""
    x = launch.x
    tables = (x.terms.left_rows, x.terms.right_rows, x.terms.value_rows)
    vectors = [x.q, x.v, *(table for table in tables if table is not None)]
    width = max(padded(vector.shape[-1]) for vector in vectors)
    kind = (width, x.q.element_size(), len(vectors) - 2)
    shared = shared_memory(x.q.device)
    return diagonal_block(bytes_per_token(*kind), lambda side: tile_memory(side, *kind) <= shared)


def _steps(launch: Launch, args: KernelArguments) -> tuple[int, int]:
    """Distances in squares up to which, and from which on, pairs read a single entry."""
    margin, band = launch.span - 1, args.band
    low = (band.low - band.origin - margin) // launch.span
    return low, -((band.origin - band.high - margin) // launch.span)


def _diagonals(launch: Launch, args: KernelArguments, block: int) -> tuple[int, int]:
    """The first diagonal of tiles with visible pairs between the ends, and how many."""
    band, ratio = args.band, launch.span // block
    low, high = _steps(launch, args)
    least = -((band.origin + block - 1 - band.first) // block)
    most = (band.last - band.origin + block - 1) // block
    least = max(least, low * ratio + 1, 1 - triton.cdiv(args.x.length, block))
    most = min(most, high * ratio - 1, triton.cdiv(args.y.length, block) - 1)
    return least, max(0, most - least + 1)


def _joined(sums: Tensor, start: int, entries: int, *, reverse: bool) -> Tensor:
    """Windows ``[splits, h, n, 2 · block, …]`` at steps of a block, added up to ``[h, N, …]``.

    Args:
        start: entry at which the first window begins (the last, where ``reverse``). What is before
            the first entry and beyond the last is theirs.
    """
    windows = sums.sum(0)
    if reverse:
        windows = windows.flip(1)
    heads, count, span = windows.shape[:3]
    rest = windows.shape[3:]
    block = span // 2
    joined = windows.new_zeros(heads, (count + 1) * block, *rest)
    joined[:, : count * block] += windows[:, :, :block].flatten(1, 2)
    joined[:, block:] += windows[:, :, block:].flatten(1, 2)
    result = windows.new_zeros(heads, entries, *rest)
    low, high = (min(max(entry - start, 0), joined.shape[1]) for entry in (0, entries))
    result[:, start + low : start + high] = joined[:, low:high]
    result[:, 0] += joined[:, :low].sum(1)
    result[:, -1] += joined[:, high:].sum(1)
    return result
