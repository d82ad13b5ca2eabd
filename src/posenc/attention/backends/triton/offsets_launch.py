"""All gradients of a problem, and the launches for what depends on the offset. Imports Triton."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from posenc.attention.backends.triton.form import shared_memory, tile_memory
from posenc.attention.backends.triton.forms import padded
from posenc.attention.backends.triton.kernels import arguments
from posenc.attention.backends.triton.kernels.configs import (
    FP_FUSION,
    PROGRAMS,
    bytes_per_token,
    diagonal_block,
)
from posenc.attention.backends.triton.kernels.offsets import offsets_kernel
from posenc.attention.backends.triton.launch import Launch
from posenc.attention.backends.triton.posing import CURVE
from posenc.attention.problem.record import KernelProblem


class _Sums(NamedTuple):
    """Sums of all programs.

    Args:
        entries: ``[splits, h, n, 2 · block]``, of biases or numbers; rows: those with a width.
        curve: of the function's pieces, ``[splits, h, n, pieces]`` each.
        start: as of ``_joined``.
    """

    entries: Tensor | None
    rows: Tensor | None
    curve: arguments.CurveGradients | None
    start: int


def gradients_by_path(
    record: KernelProblem, results: Sequence[Tensor], wanted: Container[str]
) -> dict[str, Tensor]:
    """Gradients by path; gradients of tables are computed only if wanted.

    Args:
        results: as of ``Operator``.
    """
    launch, terms = Launch(record, *results), record.terms
    gradients, query_sums, weights = launch.tokens(for_keys=False)
    of_keys, key_sums, _ = launch.tokens(for_keys=True)
    gradients |= of_keys
    if launch.x.sinks is not None and launch.delta is not None and launch.lse is not None:
        shares = (launch.x.sinks - launch.lse).exp().masked_fill(launch.lse.isneginf(), 0.0)
        gradients["sinks"] = -(shares * launch.delta).sum_to_size(launch.x.sinks.shape)
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
        if takes_bias and of_bias is not None:
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


def offset_gradients(
    launch: Launch, rows: str | None, *, bias_wanted: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the offset bias ``[H, N]`` and of one table, without the sums at its ends.

    Args:
        rows: ``"left_rows"``, ``"right_rows"`` or ``"value_rows"``; None: none.
        bias_wanted: whether that of the offset bias is wanted.
    """
    for_keys, count = rows in ("left_rows", "value_rows"), launch.entries
    sums = _sums(launch, rows, entries=bias_wanted, curve=False)
    of_bias, of_rows = (
        None if each is None else _joined(each, sums.start, count, reverse=for_keys)
        for each in (sums.entries, sums.rows)
    )
    if of_rows is not None and rows is not None and len(getattr(launch.x.terms, rows)) == 1:
        of_rows = of_rows.sum(0, keepdim=True)
    return of_bias, of_rows


def curve_gradients(launch: Launch) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the numbers ``[1, N]``, slopes and intercepts ``[H, M]`` of the function."""
    sums = _sums(launch, None, entries=True, curve=True)
    assert sums.entries is not None
    assert sums.curve is not None
    numbers = _joined(sums.entries, sums.start, launch.entries, reverse=False)
    pieces = launch.x.pairs.tensors[2].shape[1]
    slope, intercept = (each.sum((0, 2))[:, :pieces] for each in sums.curve)
    return numbers.sum(0, keepdim=True), slope, intercept


def _sums(launch: Launch, rows: str | None, *, entries: bool, curve: bool) -> _Sums:
    x = launch.x
    table: Tensor | None = None if rows is None else getattr(x.terms, rows)
    for_keys = rows in ("left_rows", "value_rows")
    width, itemsize, tables = _tile_needs(launch)
    shared = shared_memory(x.q.device)
    block = diagonal_block(
        bytes_per_token(width, itemsize, tables),
        lambda side: tile_memory(side, width, itemsize, tables) <= shared,
    )
    band = launch.band(for_keys=for_keys)
    low_steps, high_steps = _steps(launch, band)
    first, count = _diagonals(launch, band, for_keys=for_keys, block=block)
    heads = 1 if table is not None and len(table) == 1 and not entries else launch.heads
    splits = max(1, min(PROGRAMS // max(1, count * heads), 64))
    size = (splits, heads, count)

    def made(*rest: int) -> Tensor:
        return x.q.new_empty(*size, *rest, dtype=torch.float32)

    of_entries = made(2 * block) if entries else None
    of_rows = None if table is None else made(2 * block, table.shape[-1])
    of_curve = None
    if curve:
        pieces = 2 * padded(x.pairs.tensors[2].shape[1] - 1)
        of_curve = arguments.CurveGradients(made(pieces), made(pieces))
    if count:
        offsets_kernel[(count * heads * splits,)](
            **launch.common(for_keys=for_keys, sums=f"{rows} {entries} {curve}"),
            bias_ptr=of_entries,
            rows_ptr=of_rows,
            of_curve=of_curve,
            first_diagonal=first,
            diagonals=count,
            low_steps=low_steps,
            high_steps=high_steps,
            span=launch.span,
            out_heads=heads,
            splits=splits,
            width=0 if table is None else table.shape[-1],
            of_values=rows == "value_rows",
            for_keys=for_keys,
            block=block,
            enable_fp_fusion=FP_FUSION,
        )
    middle = first * block + int(band.origin)
    start = -(middle + count * block - 1) if for_keys else middle - (block - 1)
    return _Sums(of_entries, of_rows, of_curve, start)


def _tile_needs(launch: Launch) -> tuple[int, int, int]:
    """Width and size of the numbers of vectors, and how many tables are unrolled."""
    x = launch.x
    tables = (x.terms.left_rows, x.terms.right_rows, x.terms.value_rows)
    vectors = [x.q, x.v, *(each for each in tables if each is not None)]
    width = max(padded(each.shape[-1]) for each in vectors)
    return width, x.q.element_size(), len(vectors) - 2


def _steps(launch: Launch, band: arguments.Band) -> tuple[int, int]:
    """Distances in squares up to which, and from which on, pairs read a single entry."""
    margin = launch.span - 1
    low = (band.low - band.origin - margin) // launch.span
    return low, -((band.origin - band.high - margin) // launch.span)


def _diagonals(
    launch: Launch, band: arguments.Band, *, for_keys: bool, block: int
) -> tuple[int, int]:
    """The first diagonal of tiles with visible pairs between the ends, and how many."""
    lengths = launch.queries, launch.keys
    x_length, y_length = lengths[::-1] if for_keys else lengths
    low, high = _steps(launch, band)
    least = -((band.origin + block - 1 - band.first) // block)
    most = (band.last - band.origin + block - 1) // block
    ratio = launch.span // block
    least = max(least, low * ratio + 1, 1 - triton.cdiv(x_length, block))
    most = min(most, high * ratio - 1, triton.cdiv(y_length, block) - 1)
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
