"""Long sequences a few heads at a time, where the operands of all heads would fill the memory.

Those of some heads are computed just before they are used, again for the backward pass, and
differentiated a piece at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from posenc.attention.backends.common.base import Problem, kernel_gradients
from posenc.attention.backends.native.op import TERMS, native, native_backward
from posenc.attention.backends.native.operands import Operands, operands
from posenc.attention.backends.native.place import Place
from posenc.encoding import BlockTransforms, LowRank, StructuredScore
from posenc.runtime import without_autocast

MANY = 2**15
"""Keys of all batch rows and heads from which on operands of block transforms are taken apart."""

TOKENS = 32 * BlockTransforms.BLOCK
"""Keys whose block transforms are computed at once."""

SPLITS = 2
"""Sums of gradients over the queries of a head, each by a thread."""

LARGE = 2**23
"""Numbers in the rows or factors of all heads from which on they are taken apart."""


def takes_blocks_apart(form: BlockTransforms) -> bool:
    """True if the operands of all heads are too large to be held at once."""
    batch, heads, keys, _ = form.key.shape
    return batch * heads * keys >= MANY and not torch.compiler.is_compiling()


def takes_rows_apart(problem: Problem) -> bool:
    """The same of the rows and factors of a score part that is lowered for some heads."""
    score, terms = problem.encoding.score, problem.lowered
    if score is None or not score.lowers_heads or problem.whole is not None:
        return False
    if torch.compiler.is_compiling():
        return False
    return sum(map(_size, terms or ())) >= LARGE and problem.encoding.value is None


def _size(term: StructuredScore) -> int:
    """Numbers in a term's factor of the queries, or in the rows that they are multiplied by."""
    if isinstance(term, LowRank):
        return term.query.numel()
    return 0 if term.left is None else term.left.rows.numel()


@dataclass(frozen=True, eq=False)
class HeadsApart(ABC):
    """A call of ``op.native`` whose operands are computed for some heads at a time.

    Args:
        problem: of all heads; keys and values of as many heads as the queries.
        place: of its pairs.
        seed: of dropout.
    """

    problem: Problem
    place: Place
    seed: int

    def __call__(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Output and LSE, as of ``op.native``."""
        x = self.problem
        return _HeadsApart.apply(self, x.q, x.k, x.v, *parameters)  # type: ignore[no-any-return, no-untyped-call]

    def groups(self) -> Iterator[slice]:
        """Heads that are computed at once: as many as there are threads for."""
        batch, heads = self.problem.q.shape[:2]
        size = -(-torch.get_num_threads() // (batch * SPLITS))
        return (slice(at, min(heads, at + size)) for at in range(0, heads, size))

    @abstractmethod
    def arguments(self, q: Tensor, k: Tensor, v: Tensor, heads: slice) -> tuple[Any, ...]:
        """The arguments of ``op.native`` for some heads, of which q, k and v are."""

    @abstractmethod
    def differentiate(
        self,
        sides: tuple[Tensor, Tensor],
        into: tuple[Tensor, Tensor],
        heads: slice,
        found: list[Tensor],
        wanted: list[Tensor],
    ) -> list[Tensor]:
        """Gradients of the wanted parameters through some heads.

        Args:
            sides: q and k of the heads.
            into: where their gradients are written.
            found: gradients of the arguments of ``op.native``, but for v's; they are taken out, so
                that none is kept longer than it is needed.
        """

    def rest(self, heads: slice, first: int, wants: list[bool], kind: str) -> tuple[Any, ...]:
        """The arguments of ``op.native`` from the place on."""
        numbers = [*self.place.numbers(), first - self.place.origin, 0, 0, SPLITS, 0]
        return numbers, self.problem.dropout, self.seed + heads.start, wants, kind


@dataclass(frozen=True, eq=False)
class BlocksApart(HeadsApart):
    """With block transforms.

    Args:
        form: the score's.
    """

    form: BlockTransforms

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, heads: slice) -> tuple[Any, ...]:
        found: list[Tensor] = []
        for tokens, queries, blocks in self._chunks():
            parts = self.form.compute(q[:, :, queries], k[:, :, tokens], heads, tokens)
            if not found:
                counts = q.shape[2], k.shape[2], -(-k.shape[2] // BlockTransforms.BLOCK), q.shape[2]
                for part, count in zip(parts, counts, strict=True):
                    found.append(part.new_empty(*part.shape[:2], count, *part.shape[3:]))
            places = queries, tokens, blocks, queries
            for whole, part, place in zip(found, parts, places, strict=True):
                whole[:, :, place] = part
        query, key, *pairs = found
        terms = (None,) * (len(TERMS) + 1)
        rest = self.rest(heads, 0, [False, False], "blocks")
        intervals = self.place.counted_intervals()
        return query, key, v.to(query.dtype), *terms, intervals, pairs, [], 1.0, *rest

    def differentiate(
        self,
        sides: tuple[Tensor, Tensor],
        into: tuple[Tensor, Tensor],
        heads: slice,
        found: list[Tensor],
        wanted: list[Tensor],
    ) -> list[Tensor]:
        (q, k), (dq, dk), totals = sides, into, list[Tensor]()
        for tokens, queries, blocks in self._chunks():
            inputs = [x.detach().requires_grad_() for x in (q[:, :, queries], k[:, :, tokens])]
            with torch.enable_grad(), without_autocast(q.device):
                parts = self.form.compute(inputs[0], inputs[1], heads, tokens)
            places = queries, tokens, blocks, queries
            given = [x[:, :, place] for x, place in zip(found, places, strict=True)]
            pulled = _pull_back(parts, given, inputs + wanted)
            dq[:, :, queries], dk[:, :, tokens], *rest = (
                torch.zeros_like(x) if d is None else d
                for x, d in zip(inputs + wanted, pulled, strict=True)
            )
            totals = [a + b for a, b in zip(totals, rest, strict=True)] if totals else rest
        return totals

    def _chunks(self) -> Iterator[tuple[slice, slice, slice]]:
        """Keys whose operands are computed at once, their queries and their blocks."""
        keys, size = self.form.key.shape[2], BlockTransforms.BLOCK
        for at in range(0, keys, TOKENS):
            tokens = slice(at, min(keys, at + TOKENS))
            yield tokens, self.form.queries_of(tokens), slice(at // size, -(-tokens.stop // size))


@dataclass(frozen=True, eq=False)
class RowsApart(HeadsApart):
    """With terms in structured form, on a regular grid."""

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, heads: slice) -> tuple[Any, ...]:
        x = self._operands(q, k, heads)
        terms = [getattr(x, name) for name in TERMS]
        rest = self.rest(heads, x.first, [x.line is not None, x.column is not None], "")
        return q, k, v, *terms, x.bucket, None, [], [], self.problem.scale, *rest

    def differentiate(
        self,
        sides: tuple[Tensor, Tensor],
        into: tuple[Tensor, Tensor],
        heads: slice,
        found: list[Tensor],
        wanted: list[Tensor],
    ) -> list[Tensor]:
        for gradient in into:
            gradient.copy_(found.pop(0))
        inputs = [x.detach().requires_grad_() for x in sides]
        with torch.enable_grad(), without_autocast(inputs[0].device):
            x = self._operands(inputs[0], inputs[1], heads)
            terms = [term for name in TERMS if (term := getattr(x, name)) is not None]
        more_q, more_k, *rest = _pull_back(terms, found, inputs + wanted)
        for gradient, more in zip(into, (more_q, more_k), strict=True):
            if more is not None:
                gradient += more
        return [torch.zeros_like(x) if d is None else d for x, d in zip(wanted, rest, strict=True)]

    def _operands(self, q: Tensor, k: Tensor, heads: slice) -> Operands:
        score, grid, scale = self.problem.encoding.score, self.problem.grid, self.problem.scale
        assert score is not None
        terms = score.lower_heads(heads, q, k, grid, scale=scale)
        assert terms is not None
        return operands(terms, replace(self.problem, q=q, k=k), self.place.domain, self.place.reach)


def _pull_back(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: list[Tensor]
) -> list[Tensor | None]:
    """Gradients of the inputs from those of the outputs, None where nothing depends on one."""
    pairs = [(x, d) for x, d in zip(outputs, gradients, strict=True) if x.requires_grad]
    found = torch.autograd.grad(
        [x for x, _ in pairs], inputs, [d for _, d in pairs], allow_unused=True
    )
    return list(found)


class _HeadsApart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: HeadsApart, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        output = lse = q.new_empty(0)
        for heads in call.groups():
            of_heads = call.arguments(q[:, heads], k[:, heads], v[:, heads], heads)
            part, part_lse = native(*of_heads)
            if not len(output):
                output = part.new_empty(*q.shape[:3], v.shape[3])
                lse = part_lse.new_empty(q.shape[:3])
            output[:, heads], lse[:, heads] = part, part_lse
        ctx.call = call
        ctx.save_for_backward(q, k, v, output, lse, *parameters)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @kernel_gradients
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        call: HeadsApart = ctx.call
        q, k, v, output, lse, *parameters = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        wanted = [x for x in parameters if x.requires_grad]
        totals = [torch.zeros_like(x) for x in wanted]
        for heads in call.groups():
            sides = q[:, heads], k[:, heads]
            results = gradient[:, heads], output[:, heads], lse[:, heads].contiguous()
            given = call.arguments(*sides, v[:, heads], heads)
            found = native_backward(*results, *given, False)
            del given
            dv[:, heads] = found.pop(2)
            into = dq[:, heads], dk[:, heads]
            rest = call.differentiate(sides, into, heads, found, wanted)
            for total in totals:
                total += rest.pop(0)  # none is kept while the next heads are computed
        gradients = iter(totals)
        of_parameters = [next(gradients) if x.requires_grad else None for x in parameters]
        return None, dq, dk, dv, *of_parameters
