"""The operator of the compiled kernels, with its gradients."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.operator import Gradients, Operator
from posenc.attention.backends.native.arguments import (
    Arguments,
    compute_output,
    empty_like_tokens,
    empty_output,
    four_axes,
    holds_all,
)
from posenc.attention.backends.native.build import library
from posenc.attention.backends.native.library import COperand, CTokens
from posenc.attention.backends.native.pairs import pair_gradients, sum_to_tensors
from posenc.attention.problem.record import KernelProblem
from posenc.attention.problem.terms import AXES, OF_TOKENS, Spans

OPTIONAL = ("terms.bias_by_offset", "terms.column")
"""Paths of operands whose gradients are computed only where requested; they may be constants."""


class GradientBuffers:
    """Buffers that the kernel of a call writes gradients to, or adds them to, and their sums.

    Args:
        call: with the gradient of the output.
        wanted: paths of what gradients are wanted of; of ``OPTIONAL`` others get none.
    """

    def __init__(self, call: Arguments, wanted: Container[str]) -> None:
        self.call = call
        x, record, splits = call.struct, call.record, call.splits
        x.splits, self.parts = splits, x.chunks * splits
        self.dq = empty_like_tokens(record.q, record.q.shape)
        is_final = splits == 1 and x.heads == x.groups
        self.dk, self.dv = (
            empty_like_tokens(
                like,
                (splits, x.batch, x.heads, *like.shape[2:]),
                like.dtype if is_final else call.dtype,
            )
            for like in (record.k, record.v)
        )
        x.dq, x.dk, x.dv = CTokens.of(self.dq), CTokens.of(self.dk[0]), CTokens.of(self.dv[0])
        x.dk_split, x.dv_split = self.dk.stride(0), self.dv.stride(0)
        operands = record.terms.operands()
        left_out = [path for path in OPTIONAL if path not in wanted]
        self.terms = {n: term for n, term in operands.items() if f"terms.{n}" not in left_out}
        self.buffers = {name: self._allocate(name, term) for name, term in self.terms.items()}
        self.sinks = torch.empty(record.q.shape[:3], dtype=torch.float64)
        x.sinks_gradient = self.sinks.data_ptr()
        self.of_pairs = pair_gradients(record.pairs.kind, x, call.pairs, self.parts)

    def _allocate(self, name: str, term: Tensor) -> Tensor:
        """Allocate an operand's gradient: ``[parts, batch, heads, rows, features]``.

        Each tile of queries is one worker's, each block of queries adds to those of keys, and
        each chunk of the batch and block of queries to those of offsets and buckets.
        """
        call, x = self.call, self.call.struct
        operand: COperand = getattr(x.terms, name)
        size = x.batch if name in OF_TOKENS else 1, x.heads, operand.rows, operand.features
        dtype = torch.float64 if name == "column" else call.dtype
        parts = 1 if "Q" in AXES[name] else call.splits if name in OF_TOKENS else self.parts
        buffer = _empty(name, term, (parts, *size), dtype)
        operand.gradient, operand.part_stride = CTokens.of(buffer[0]), buffer.stride(0)
        return buffer

    def summed(self) -> dict[str, Tensor]:
        """The gradients by their paths in the record, the parts that the kernel wrote added up."""
        x, record = self.call.struct, self.call.record
        gradients = {"q": self.dq}
        for name, like, parts in (("k", record.k, self.dk), ("v", record.v, self.dv)):
            total = parts[0] if len(parts) == 1 else _sum(parts, 0, like)
            if x.heads != x.groups:
                total = _sum(total.view(x.batch, x.groups, -1, *total.shape[2:]), 2, like)
            gradients[name] = total.to(like.dtype)
        for name, term in self.terms.items():
            gradients[f"terms.{name}"] = _of_term(name, self.buffers[name], term, self.call.spans)
        if record.sinks is not None:
            gradients["sinks"] = self.sinks.sum_to_size(record.sinks.shape).to(record.sinks.dtype)
        of_pairs = sum_to_tensors(self.of_pairs, record.pairs.tensors)
        return gradients | {f"pairs.tensors.{at}": x for at, x in enumerate(of_pairs)}


def _empty(
    name: str, like: Tensor, size: tuple[int, ...], dtype: torch.dtype
) -> Float[Tensor, "parts B H L F"]:
    """Uninitialised memory for the gradient of an operand."""
    if name.endswith("factor"):
        return empty_like_tokens(like, size, dtype)
    return like.new_empty(size, dtype=dtype)


def _sum(x: Tensor, dim: int, like: Tensor) -> Float[Tensor, "B H L F"]:
    """A sum that lies in memory as ``like`` does."""
    size = [n for at, n in enumerate(x.shape) if at != dim]
    return torch.sum(x, dim, out=empty_like_tokens(like, size, x.dtype))


def _of_term(name: str, parts: Tensor, like: Tensor, spans: Spans | None) -> Tensor:
    """The gradient of an operand from the parts of it."""
    total = parts[0] if len(parts) == 1 else parts.sum(0)
    batch, heads, *_ = four_axes(name, like).shape
    total = total.sum_to_size(batch, heads, *total.shape[2:])
    if name.endswith("factor") and (len(parts) > 1 or total.shape != parts.shape[1:]):
        return empty_like_tokens(like, like.shape).copy_(total)
    if "N" in AXES[name] and spans is not None and not holds_all(spans, like):
        all_rows = torch.zeros(1, *like.shape, dtype=total.dtype)
        total = all_rows.index_add_(2, spans.buckets, total)
    return total.reshape(like.shape).to(like.dtype)


WITHOUT_GRADIENT = ("terms.bucket", "geometry.intervals", "geometry.bands", "seed")


def compute_gradients(
    record: KernelProblem, results: Sequence[Tensor], wanted: Container[str], global_lse: bool
) -> Gradients:
    """Gradients by path; see ``Operator``. Paths in ``OPTIONAL`` are computed only if wanted."""
    call = Arguments(record)
    x, (gradient, output, lse, *of_lse) = call.struct, results
    x.global_lse, x.lse = global_lse, lse.data_ptr()
    if of_lse:
        x.lse_gradient = call.keep(of_lse[0].double().contiguous()).data_ptr()
    x.gradient, x.out = call.tokens(gradient), call.tokens(output)
    buffers = GradientBuffers(call, wanted)
    library().call("backward", x, call.dtype)
    return buffers.summed()


def _empty_gradient(path: str, x: Tensor, wanted: bool) -> Tensor | None:
    if path in WITHOUT_GRADIENT or path.startswith("rotary.") or (path in OPTIONAL and not wanted):
        return None
    if path in ("q", "k", "v") or path.endswith("factor"):
        return empty_like_tokens(x, x.shape)
    return x.new_empty(x.shape)


NATIVE = Operator("native", compute_output, compute_gradients, empty_output, _empty_gradient)
