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
from jaxtyping import Int
from torch import Tensor

from posenc.attention.backends.common.base import kernel_gradients
from posenc.attention.backends.common.operator import results_of
from posenc.attention.backends.native.op import NATIVE
from posenc.attention.backends.native.posing import Form, read_own_terms
from posenc.attention.problem.lowering import sinks_beside
from posenc.attention.problem.offsets import Offsets
from posenc.attention.problem.problem import Problem
from posenc.attention.problem.record import KernelProblem, PairTerm, Rotary, Segments
from posenc.attention.problem.terms import Terms
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


def chunks_blocks(form: BlockTransforms) -> bool:
    """True if the operands of all heads are too large to be held at once."""
    batch, heads, keys, _ = form.key.shape
    return batch * heads * keys >= MANY and not torch.compiler.is_compiling()


def chunks_rows(problem: Problem) -> bool:
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
class ChunkedHeads(ABC):
    """A call of the kernels whose operands are computed for some heads at a time.

    Args:
        problem: of all heads; keys and values of as many heads as the queries.
        offsets: of its pairs.
        seed: of dropout.
    """

    problem: Problem
    offsets: Offsets
    seed: Int[Tensor, "1"] | None

    def __call__(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Output and LSE, as of ``op.attend``."""
        x = self.problem
        sinks = sinks_beside(x.sinks, x.lowered or ())
        return _ChunkedHeads.apply(self, x.q, x.k, x.v, sinks, *parameters)  # type: ignore[no-any-return, no-untyped-call]

    def groups(self) -> Iterator[slice]:
        """Heads that are computed at once: as many as there are threads for."""
        batch, heads = self.problem.q.shape[:2]
        size = -(-torch.get_num_threads() // (batch * SPLITS))
        return (slice(at, min(heads, at + size)) for at in range(0, heads, size))

    def of_heads(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, heads: slice
    ) -> KernelProblem:
        """The record of some heads, of which q, k and v are, but the sinks of all."""
        x, seed = self.problem, None if self.seed is None else self.seed + heads.start
        return replace(
            self.record(q, k, v, heads),
            dropout=x.dropout,
            seed=seed,
            sinks=None if sinks is None else sinks[:, heads],
            softcap=x.softcap or 0.0,
            splits=SPLITS,
        )

    @abstractmethod
    def record(self, q: Tensor, k: Tensor, v: Tensor, heads: slice) -> KernelProblem:
        """``of_heads`` without dropout, sinks and cap."""

    @abstractmethod
    def differentiate(
        self,
        sides: tuple[Tensor, Tensor],
        into: tuple[Tensor, Tensor],
        heads: slice,
        found: dict[str, Tensor],
        wanted: list[Tensor],
    ) -> list[Tensor]:
        """Gradients of the wanted parameters through some heads.

        Args:
            sides: q and k of the heads.
            into: where their gradients are written.
            found: gradients of the record by their paths, but for v's and sinks'; they are taken
                out, so that none is kept longer than it is needed.
        """


@dataclass(frozen=True, eq=False)
class ChunkedBlocks(ChunkedHeads):
    """With block transforms.

    Args:
        form: the score's.
    """

    form: BlockTransforms

    def record(self, q: Tensor, k: Tensor, v: Tensor, heads: slice) -> KernelProblem:
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
        return KernelProblem(
            *(query, key, v.to(query.dtype), 1.0),
            terms=Terms(),
            pairs=PairTerm("blocks", tuple(pairs)),
            geometry=self.offsets.geometry(),
            segments=Segments(),
            rotary=Rotary(),
        )

    def differentiate(
        self,
        sides: tuple[Tensor, Tensor],
        into: tuple[Tensor, Tensor],
        heads: slice,
        found: dict[str, Tensor],
        wanted: list[Tensor],
    ) -> list[Tensor]:
        (q, k), (dq, dk), totals = sides, into, list[Tensor]()
        of_parts = [found[path] for path in ("q", "k", "pairs.tensors.0", "pairs.tensors.1")]
        for tokens, queries, blocks in self._chunks():
            inputs = [x.detach().requires_grad_() for x in (q[:, :, queries], k[:, :, tokens])]
            with torch.enable_grad(), without_autocast(q.device):
                parts = self.form.compute(inputs[0], inputs[1], heads, tokens)
            places = queries, tokens, blocks, queries
            given = [x[:, :, place] for x, place in zip(of_parts, places, strict=True)]
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
class ChunkedRows(ChunkedHeads):
    """With terms in structured form, on a regular grid."""

    def record(self, q: Tensor, k: Tensor, v: Tensor, heads: slice) -> KernelProblem:
        problem = replace(self.problem, q=q, k=k, v=v, dropout=0.0, sinks=None)
        return Form(problem, self.offsets, self._lowered(q, k, heads)).record()

    def differentiate(
        self,
        sides: tuple[Tensor, Tensor],
        into: tuple[Tensor, Tensor],
        heads: slice,
        found: dict[str, Tensor],
        wanted: list[Tensor],
    ) -> list[Tensor]:
        for gradient, path in zip(into, "qk", strict=True):
            gradient.copy_(found.pop(path))
        inputs = [x.detach().requires_grad_() for x in sides]
        with torch.enable_grad(), without_autocast(inputs[0].device):
            lowered = self._lowered(inputs[0], inputs[1], heads)
            problem = replace(self.problem, q=inputs[0], k=inputs[1])
            terms = read_own_terms(lowered, problem, self.offsets)
        parts = [getattr(terms, path.removeprefix("terms.")) for path in found]
        more_q, more_k, *rest = _pull_back(parts, list(found.values()), inputs + wanted)
        for gradient, more in zip(into, (more_q, more_k), strict=True):
            if more is not None:
                gradient += more
        return [torch.zeros_like(x) if d is None else d for x, d in zip(wanted, rest, strict=True)]

    def _lowered(self, q: Tensor, k: Tensor, heads: slice) -> tuple[StructuredScore, ...]:
        score, grid, scale = self.problem.encoding.score, self.problem.grid, self.problem.scale
        assert score is not None
        terms = score.lower_heads(heads, q, k, grid, scale=scale)
        assert terms is not None
        return terms


def _pull_back(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: list[Tensor]
) -> list[Tensor | None]:
    """Gradients of the inputs from those of the outputs, None where nothing depends on one."""
    pairs = [(x, d) for x, d in zip(outputs, gradients, strict=True) if x.requires_grad]
    found = torch.autograd.grad(
        [x for x, _ in pairs], inputs, [d for _, d in pairs], allow_unused=True
    )
    return list(found)


class _ChunkedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: ChunkedHeads,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        output = lse = q.new_empty(0)
        for heads in call.groups():
            record = call.of_heads(q[:, heads], k[:, heads], v[:, heads], sinks, heads)
            part, part_lse = NATIVE.attend(record)
            del record
            if not len(output):
                output = part.new_empty(*q.shape[:3], v.shape[3])
                lse = part_lse.new_empty(q.shape[:3])
            output[:, heads], lse[:, heads] = part, part_lse
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, output, lse, *parameters)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @kernel_gradients
    def backward(
        ctx: Any, gradient: Tensor | None, of_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        call: ChunkedHeads = ctx.call
        q, k, v, sinks, output, lse, *parameters = ctx.saved_tensors
        whole = results_of((gradient, of_lse), output, lse)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        dsinks = None if sinks is None else torch.empty_like(sinks)
        wanted = [x for x in parameters if x.requires_grad]
        totals = [torch.zeros_like(x) for x in wanted]
        for heads in call.groups():
            sides = q[:, heads], k[:, heads]
            results = [x[:, heads] for x in whole]
            results[2] = results[2].contiguous()
            record = call.of_heads(*sides, v[:, heads], sinks, heads)
            found = NATIVE.differentiate(record, results)
            del record
            dv[:, heads] = found.pop("v")
            if dsinks is not None:
                dsinks[:, heads] = found.pop("sinks")
            into = dq[:, heads], dk[:, heads]
            rest = call.differentiate(sides, into, heads, found, wanted)
            for total in totals:
                total += rest.pop(0)  # none is kept while the next heads are computed
        gradients = iter(totals)
        of_parameters = [next(gradients) if x.requires_grad else None for x in parameters]
        return None, dq, dk, dv, dsinks, *of_parameters
