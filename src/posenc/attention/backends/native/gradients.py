"""Room for gradients by the kernels, and their sums by the names in the record."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import fields

import torch
from torch import Tensor

from posenc.attention.backends.native.arguments import Arguments, holds_all
from posenc.attention.backends.native.library import Tokens
from posenc.attention.backends.native.pairs import pair_gradients, sum_to_tensors
from posenc.attention.problem.spans import Spans
from posenc.attention.problem.terms import Terms

TERMS = tuple(field.name for field in fields(Terms) if field.name not in ("bucket", "first"))
"""Those with gradients."""

OPTIONAL = ("terms.bias_by_offset", "terms.column")
"""Paths of those that may be constants, whose gradients are computed where they are wanted only."""


class Room:
    """Room for the gradients of a call, which its kernel writes or adds to, and their sums.

    Args:
        call: with the gradient of the output.
        wanted: paths of what gradients are wanted of; of ``OPTIONAL`` others get none.
    """

    def __init__(self, call: Arguments, wanted: Container[str]) -> None:
        self.call = call
        x, record, splits = call.struct, call.record, call.splits
        x.splits, self.parts = splits, x.chunks * splits
        self.dq = torch.empty(record.q.shape, dtype=record.q.dtype)
        whole = splits == 1 and x.heads == x.groups
        self.dk, self.dv = (
            torch.empty(
                *(splits, x.batch, x.heads, *t.shape[2:]), dtype=t.dtype if whole else call.dtype
            )
            for t in (record.k, record.v)
        )
        x.dq, x.dk, x.dv = Tokens.of(self.dq), Tokens.of(self.dk[0]), Tokens.of(self.dv[0])
        x.dk_split, x.dv_split = self.dk.stride(0), self.dv.stride(0)
        given = {name: getattr(record.terms, name) for name in TERMS}
        left_out = [path for path in OPTIONAL if path not in wanted]
        self.terms: dict[str, Tensor] = {
            name: term
            for name, term in given.items()
            if term is not None and f"terms.{name}" not in left_out
        }
        self.room = {name: self._room(name, term) for name, term in self.terms.items()}
        self.of_pairs = pair_gradients(record.pairs.kind, x, call.pairs, self.parts)

    def _room(self, name: str, term: Tensor) -> Tensor:
        x, dtype, splits = self.call.struct, self.call.dtype, self.call.splits
        by_bucket = self.parts, x.heads, x.map.buckets
        match name:
            case "bias_by_offset":
                room = torch.zeros(self.parts, x.heads, x.bias_by_offset_count, dtype=dtype)
                x.bias_by_offset_gradient = room.data_ptr()
            case "column":
                room = torch.empty(splits, x.batch, x.heads, x.keys, dtype=torch.float64)
                x.column_gradient = room.data_ptr()
            case "left_rows":
                room = torch.empty(*by_bucket, x.left.features, dtype=dtype)
                x.left.rows_gradient = room.data_ptr()
            case "right_rows":
                room = torch.empty(*by_bucket, x.right.features, dtype=dtype)
                x.right.rows_gradient = room.data_ptr()
            case "value_rows":
                room = torch.empty(*by_bucket, x.value_dim, dtype=dtype)
                x.value_gradient = room.data_ptr()
            case "query_factor":
                room = in_order(term, 1, x.batch)
                x.dq_factor = Tokens.of(room[0])
            case "key_factor":
                room = in_order(term, splits, x.batch)
                x.dk_factor, x.dk_factor_split = Tokens.of(room[0]), room.stride(0)
            case "left":
                room = torch.empty(1, x.batch, *term.shape[1:], dtype=dtype)
                x.left.tokens_gradient = Tokens.of(room[0])
            case _:
                room = torch.empty(splits, x.batch, *term.shape[1:], dtype=dtype)
                x.right.tokens_gradient, x.right_split = Tokens.of(room[0]), room.stride(0)
        return room

    def summed(self) -> dict[str, Tensor]:
        """The gradients by their paths in the record, the parts that the kernel wrote added up."""
        x, record = self.call.struct, self.call.record
        found = {"q": self.dq}
        for name, like, parts in (("k", record.k, self.dk), ("v", record.v, self.dv)):
            total = _total(parts)
            if x.heads != x.groups:
                total = total.view(x.batch, x.groups, -1, *total.shape[2:]).sum(2)
            found[name] = total.to(like.dtype)
        for name, term in self.terms.items():
            found[f"terms.{name}"] = _of_term(name, self.room[name], term, self.call.spans)
        of_pairs = sum_to_tensors(self.of_pairs, record.pairs.tensors)
        return found | {f"pairs.tensors.{at}": x for at, x in enumerate(of_pairs)}


def in_order(term: Tensor, parts: int, batch: int) -> Tensor:
    """Room ``[parts, B, H, L, R]``, each token's heads side by side if those of the term are."""
    heads, tokens, rank = term.shape[1:]
    if term.stride(1) < term.stride(2):
        return term.new_empty(parts, batch, tokens, heads, rank).transpose(2, 3)
    return term.new_empty(parts, batch, heads, tokens, rank)


def _total(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _of_term(name: str, parts: Tensor, like: Tensor, spans: Spans | None) -> Tensor:
    """The gradient of a term from the parts of it."""
    total = _total(parts)
    if total.shape[0] != like.shape[0]:  # shared by heads, or by batch rows
        total = total.sum(0, keepdim=True)
    if name.endswith("rows") and spans is not None and not holds_all(spans, like):
        total = torch.zeros(like.shape, dtype=total.dtype).index_add_(1, spans.buckets, total)
    if name.endswith("factor") and (len(parts) > 1 or len(like) < parts.shape[1]):
        return in_order(like, 1, len(like))[0].copy_(total)
    return total.to(like.dtype)
