"""Blocks of keys that transform queries, for a few heads at a time in long sequences.

The operands of all heads take many times the memory of queries and keys. Those of some heads are
computed just before they are used, again for the backward pass, and differentiated a few blocks at
a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posenc.attention.backends.native.op import native, native_backward
from posenc.encoding import BlockTransforms
from posenc.runtime import without_autocast

MANY = 2**15
"""Keys of all batch rows and heads from which on heads are taken apart."""

TOKENS = 32 * BlockTransforms.BLOCK
"""Keys whose operands are computed at once."""


def takes_heads_apart(form: BlockTransforms) -> bool:
    """True if the operands of all heads are too large to be held at once."""
    batch, heads, keys, _ = form.key.shape
    return batch * heads * keys >= MANY and not torch.compiler.is_compiling()


@dataclass(frozen=True, eq=False)
class HeadsApart:
    """A call with block transforms.

    Args:
        form: of the score.
        intervals, place, dropout, seed: as of ``op.native``.
    """

    form: BlockTransforms
    intervals: Tensor | None
    place: list[int]
    dropout: float
    seed: int

    def __call__(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and LSE, as of ``op.native``; v of as many heads as the queries."""
        form = self.form
        return _HeadsApart.apply(self, form.query, form.key, v, *form.parameters)  # type: ignore[no-any-return, no-untyped-call]

    def groups(self) -> Iterator[slice]:
        """Heads that are computed at once: as many as there are threads for."""
        batch, heads = self.form.query.shape[:2]
        size = -(-torch.get_num_threads() // batch)
        return (slice(at, min(heads, at + size)) for at in range(0, heads, size))

    def chunks(self) -> Iterator[tuple[slice, slice, slice]]:
        """Keys whose operands are computed at once, their queries and their blocks."""
        keys, size = self.form.key.shape[2], BlockTransforms.BLOCK
        for at in range(0, keys, TOKENS):
            tokens = slice(at, min(keys, at + TOKENS))
            yield tokens, self.form.queries_of(tokens), slice(at // size, -(-tokens.stop // size))

    def operands(self, q: Tensor, k: Tensor, heads: slice) -> list[Tensor]:
        """Queries, keys, matrices and logits of own blocks of some heads."""
        found: list[Tensor] = []
        for tokens, queries, blocks in self.chunks():
            parts = self.form.compute(q[:, heads, queries], k[:, heads, tokens], heads, tokens)
            if not found:
                counts = q.shape[2], k.shape[2], -(-k.shape[2] // BlockTransforms.BLOCK), q.shape[2]
                for part, count in zip(parts, counts, strict=True):
                    found.append(part.new_empty(*part.shape[:2], count, *part.shape[3:]))
            places = queries, tokens, blocks, queries
            for whole, part, place in zip(found, parts, places, strict=True):
                whole[:, :, place] = part
        return found

    def arguments(self, operands: list[Tensor], v: Tensor, heads: slice) -> tuple[Any, ...]:
        """The arguments of ``op.native``."""
        query, key, *pairs = operands
        terms = (None,) * 10
        rest = 1.0, self.place, self.dropout, self.seed + heads.start, [False] * 2
        v = v[:, heads].to(query.dtype)
        return query, key, v, *terms, self.intervals, pairs, *rest, "blocks_of_heads"


class _HeadsApart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: HeadsApart, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        output = lse = q.new_empty(0)
        for heads in call.groups():
            part, part_lse = native(*call.arguments(call.operands(q, k, heads), v, heads))
            if not len(output):
                output = part.new_empty(*q.shape[:3], v.shape[3])
                lse = part_lse.new_empty(q.shape[:3])
            output[:, heads], lse[:, heads] = part, part_lse
        ctx.call = call
        ctx.save_for_backward(q, k, v, output, lse, *parameters)
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        call: HeadsApart = ctx.call
        q, k, v, output, lse, *parameters = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        wanted = [x for x in parameters if x.requires_grad]
        totals = [torch.zeros_like(x) for x in wanted]
        for heads in call.groups():
            of_heads = gradient[:, heads], output[:, heads], lse[:, heads].contiguous()
            arguments = call.arguments(call.operands(q, k, heads), v, heads)
            dquery, dkey, dv[:, heads], *pairs = native_backward(*of_heads, *arguments)
            del arguments
            for tokens, queries, blocks in call.chunks():
                sides = q[:, heads, queries], k[:, heads, tokens]
                inputs = [*(x.detach().requires_grad_() for x in sides), *wanted]
                given = [dquery[:, :, queries], dkey[:, :, tokens]]
                given += [pairs[0][:, :, blocks], pairs[1][:, :, queries]]
                with torch.enable_grad(), without_autocast(q.device):
                    parts = call.form.compute(inputs[0], inputs[1], heads, tokens)
                graded = [at for at, part in enumerate(parts) if part.requires_grad]
                dq[:, heads, queries], dk[:, heads, tokens], *rest = torch.autograd.grad(
                    [parts[at] for at in graded], inputs, [given[at] for at in graded]
                )
                for total, part in zip(totals, rest, strict=True):
                    total += part
            del dquery, dkey, pairs, given, parts
        found = iter(totals)
        of_parameters = [next(found) if x.requires_grad else None for x in parameters]
        return None, dq, dk, dv, *of_parameters
