"""Our own kernels for CUDA devices, one for each direction, for the whole formula."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.attention.backends.base import Backend, Problem, Result
from posenc.attention.backends.triton.decoding import attend_single_query
from posenc.attention.backends.triton.marks import labels_of
from posenc.attention.backends.triton.op import attention
from posenc.attention.backends.triton.situation import (
    Situation,
    is_single_query,
    refuse_device,
    refuse_machine,
    refuse_single_query,
    situation,
    turns_of,
)
from posenc.attention.lowering import add_rows
from posenc.attention.regular import read_offsets
from posenc.errors import BackendRefusal

__all__ = ["Triton"]


class Triton(Backend):
    """Structured terms over tokens that are one position apart in each document, in tiles.

    Queries and keys are rotated as they are read, so that rotated ones are never written, if that
    is all the encoding does with them (RoPE, p-RoPE, axial and M-RoPE, RoPE++, FoPE, and those
    stretched), no gradient is wanted of its angles, and no score part reads the rotated ones.
    Grouped key heads have to be rotated alike. ``Triton(fuses=False)``, by name
    ``"triton@unfused"``, has all rotations done before.

    What depends on no offset is served for any layout, and so is one query without gradients.
    Memory is linear in the length. Gradients of everything, dropout included; no second
    derivatives. The same bits at every call, as long as the tiles are the same: their sizes are
    chosen by measurement, once a process and kind of problem.

    Not yet run on a device: its kernels are tested by Triton's interpreter, on the CPU, and
    compiled for devices that are not there.
    """

    def __init__(self, *, fuses: bool = True) -> None:
        self.fuses = fuses
        self.name = "triton" if fuses else "triton@unfused"

    def unavailable(self, device: torch.device) -> str | None:
        return refuse_machine(device)

    def refusal(self, problem: Problem) -> str | None:
        reason = refuse_device(problem)
        if reason is not None:
            return reason
        if is_single_query(problem):
            return refuse_single_query(problem)
        found = situation(problem)
        return found if isinstance(found, str) else None

    def describe(self, problem: Problem) -> str:
        if is_single_query(problem):
            way = "a kernel for one query, the keys in shares"
        else:
            way = "kernels with the terms of every offset (memory linear in the length)"
        if problem.rotation is not None:
            return f"{way}, which rotate queries and keys as they read them"
        if problem.encoding.query_key is not None:
            return f"{way}, after queries and keys are transformed"
        return way

    def run(self, problem: Problem, *, lse: bool = False) -> Result:
        if is_single_query(problem):
            return attend_single_query(problem, lse=lse)
        found = situation(problem)
        if isinstance(found, str):
            raise BackendRefusal(
                "backend",
                expected="a problem that was not refused",
                got=f"one that is, because {found}",
                remedy="Ask for a refusal first.",
            )
        output, total = _attend(problem, found)
        return Result(output, add_rows(total, found.lowered) if lse else None)


def _attend(problem: Problem, found: Situation) -> tuple[Tensor, Tensor]:
    """Output, and LSE without the ``row`` terms."""
    q, place, grid = problem.q, found.place, problem.grid
    terms = read_offsets(found.lowered, place.offsets(), device=q.device)
    factors = [
        [side.float().expand(*q.shape[:2], -1, -1) for side in (each.query, each.key)]
        for each in terms.factors
    ]
    query_factor, key_factor = None, None
    if factors:
        query_factor, key_factor = (
            sides[0] if len(sides) == 1 else torch.cat(sides, dim=-1)
            for sides in zip(*factors, strict=True)
        )
    labels: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    orders: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    causal, window = False, None
    if grid.marked or not found.ordered:
        labels = labels_of(grid)
    if not found.ordered:
        orders = grid.query.order.contiguous(), grid.key.order.contiguous()
        causal, window = grid.causal, grid.window
    query_turn, key_turn, adjacent = turns_of(problem)
    result: tuple[Tensor, Tensor] = attention(
        q,
        problem.k,
        problem.v,
        _cast(terms.line, torch.float32),
        _of_tokens(terms.left, q),
        _cast(terms.left_rows, q.dtype),
        _of_tokens(terms.right, q),
        _cast(terms.right_rows, q.dtype),
        None if terms.column is None else terms.column.float().expand(*q.shape[:2], -1),
        _cast(terms.value_rows, q.dtype),
        query_factor,
        key_factor,
        *labels,
        *orders,
        query_turn,
        key_turn,
        [place.origin, place.first, place.last, int(causal), -1 if window is None else window],
        adjacent,
        problem.scale,
        problem.dropout,
        int(torch.randint(2**31 - 1, ()).item()) if problem.dropout else 0,
    )
    return result


def _cast(rows: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if rows is None else rows.to(dtype).contiguous()


def _of_tokens(vectors: Tensor | None, q: Tensor) -> Tensor | None:
    return None if vectors is None else vectors.to(q.dtype).expand(*q.shape[:2], -1, -1)
