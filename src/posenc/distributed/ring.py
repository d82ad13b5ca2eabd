"""The ring form: keys and values circulate, and every rank attends to one block at a time.

Outputs over blocks are joined by their LSE. In the backward pass the blocks travel once more, with
their gradients; gradients through a block follow from the output and LSE over all keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.api import attend_block, attend_block_backward
from posenc.attention.backends.common.base import Result
from posenc.attention.call import Call
from posenc.attention.problem.problem import GlobalSoftmax
from posenc.attention.softmax import add_sinks
from posenc.distributed.call import ShardedCall
from posenc.distributed.gathered import attend_gathered
from posenc.distributed.group import Group, first_derivative
from posenc.distributed.shards import Piece, Shards, pieces
from posenc.distributed.sums import crosses_ties, running_sums
from posenc.encoding import Encoding
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import widest, without_autocast


def refusal(call: ShardedCall) -> str | None:
    """The reason why a ring cannot serve the call."""
    encoding = call.encoding
    for part in (encoding.query_key, encoding.score, encoding.value):
        if part is None:
            continue
        name = type(part).__name__
        if getattr(part, "replaces_softmax", False):
            return f"the weights of {name} are no softmax, and parts of them cannot be joined"
        if not part.pairwise and part.of_sums() is None:
            return f"the result of {name} for a pair depends on other tokens, too"
        if any(getattr(module, "attached", None) is not None for module in part.modules()):
            return f"{name} computes with parameters of the layer"
    shards = call.shards
    if shards.layout.positions.requires_grad:
        return "positions have gradients"
    if _summed(encoding) and crosses_ties(shards):
        return "tokens of one order are on several ranks, and sums up to them on none"
    if _summed(encoding) and not call.session.all(_are_one(call.grid), call.q.device):
        return "queries are other tokens than keys, and sums up to them on none"
    return None


def _are_one(grid: Grid) -> bool:
    """True if a rank's queries and keys are known to be the same tokens."""
    query, key = grid.query, grid.key
    return query.order is key.order and query.document is key.document


def attend_in_ring(call: ShardedCall) -> Float[Tensor, "B H L E"]:
    """Attention of this rank's queries, one block of keys after the other."""
    if call.session.group.size == 1:
        return attend_gathered(call)
    shards, group, encoding, grid = call.shards, call.session.group, call.encoding, call.grid
    query, key = grid.query.signal, grid.key.signal
    if _summed(encoding):
        query = key = running_sums(group, shards, grid.key)
        encoding = Encoding(
            query_key=encoding.query_key and _of_sums(encoding.query_key),
            score=encoding.score and _of_sums(encoding.score),
            value=encoding.value,
        )
    ring = Ring(group, shards, replace(grid, query=_plain(grid.query)), encoding, call)
    parameters = [p for p in encoding.parameters() if p.requires_grad]
    output: Tensor = _Attend.apply(
        ring, call.q, call.k, call.v, call.sinks, query, key, *parameters
    )
    return output


def _summed(encoding: Encoding) -> bool:
    return any(
        not part.pairwise for part in encoding.parts()[-3:] if part is not encoding.embedding
    )


def _of_sums(part: Any) -> Any:
    return part if part.pairwise else part.of_sums()


def _plain(layout: Layout) -> Layout:
    return layout if layout.signal is None else layout.with_signal(None)


@dataclass(frozen=True, eq=False)
class Ring:
    """A call without its tensors.

    Args:
        group: the ranks.
        shards: the key layouts of all ranks.
        grid: of this rank's queries; its key layout is not used.
        encoding: whose terms depend on pairs alone.
        call: for backend and scale.
    """

    group: Group
    shards: Shards
    grid: Grid
    encoding: Encoding
    call: ShardedCall

    def queries(self) -> list[Piece]:
        """Runs of this rank's queries."""
        same = self.grid.query.order is self.call.grid.key.order
        return self.shards.blocks[self.group.rank] if same else pieces(self.grid.query)

    def pairs(
        self, block: int, query_signal: Tensor | None, key_signal: Tensor | None
    ) -> Iterator[tuple[slice, slice, Grid]]:
        """Runs of queries and of the block's keys that may see each other, and their grids."""
        for query_run in self.queries():
            for other in self.shards.blocks[block]:
                if query_run.may_see(other, self.grid.band):
                    query, key = query_run.with_signal(query_signal), other.with_signal(key_signal)
                    grid = Grid(query, key, self.grid.causal, self.grid.window)
                    yield slice(query_run.begin, query_run.end), slice(other.begin, other.end), grid

    def block_call(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Call:
        """The call of some queries and keys, without sinks."""
        call = self.call
        return Call(
            *(q, k, v, grid, self.encoding),
            scale=call.scale,
            counter_dropout=call.counter_dropout(grid.query, grid.key),
            softcap=call.softcap,
        )

    def schedule(self) -> list[int]:
        """The blocks in the order in which this rank gets them: its own, then the previous ones."""
        return [(self.group.rank - step) % self.group.size for step in range(self.group.size)]

    def like(self, tensors: Sequence[Tensor], block: int) -> list[Tensor]:
        """Empty tensors for a block's tokens, which are in the last dimension but one."""
        length = self.shards.lengths[block]
        return [x.new_empty(*x.shape[:-2], length, x.shape[-1]) for x in tensors]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ring: Ring,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        query_signal: Tensor | None,
        key_signal: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        output, lse = _forward(ring, q, k, v, query_signal, key_signal)
        if sinks is not None:  # once, beside the blocks of all ranks
            output, joined = add_sinks(Result(output, lse), sinks, lse=True)
            assert joined is not None
            lse = joined
        output = output.to(v.dtype)
        ctx.ring, ctx.parameters = ring, parameters
        ctx.save_for_backward(q, k, v, query_signal, key_signal, output, lse, sinks)
        return output

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *saved, sinks = ctx.saved_tensors
        with without_autocast(gradient.device):
            gradients = _backward(ctx.ring, ctx.parameters, gradient, *saved)
        of_sinks = None if sinks is None else _of_sinks(sinks, gradient, *saved[-2:])
        return None, *gradients[:3], of_sinks, *gradients[3:]


def _of_sinks(sinks: Tensor, gradient: Tensor, output: Tensor, lse: Tensor) -> Tensor:
    weights = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp().masked_fill(lse.isneginf(), 0.0)
    delta = (gradient.to(lse.dtype) * output).sum(-1)
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def _forward(
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_signal: Tensor | None,
    key_signal: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output in float32 or better, and LSE in float64, over all keys."""
    wide = torch.promote_types(q.dtype, torch.float32)
    output = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=widest(q.device))
    held = [k, v] if key_signal is None else [k, v, key_signal]
    schedule = ring.schedule()
    for step, block in enumerate(schedule):
        arrive = None
        if step + 1 < len(schedule):
            arrive = ring.group.shift(held, ring.like(held, schedule[step + 1]))
        for rows, columns, grid in ring.pairs(block, query_signal, _signal(held)):
            keys, values = (x[:, :, columns] for x in held[:2])
            call = ring.block_call(q[:, :, rows], keys, values, grid)
            result = attend_block(call, ring.call.backend, return_lse=True)
            _join(output[:, :, rows], lse[:, :, rows], *result)
            del result  # before the next is computed
        if arrive is not None:
            held = arrive()
    return output, lse


def _join(output: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor | None) -> None:
    """Add attention over more keys to ``output`` and ``lse``, in place."""
    assert more_lse is not None  # it was asked for
    joined = torch.logaddexp(lse, more_lse)
    finite = joined.masked_fill(joined.isneginf(), 0.0)
    output.mul_((lse - finite).exp().unsqueeze(-1).to(output.dtype))
    output.addcmul_(more, (more_lse - finite).exp().unsqueeze(-1).to(output.dtype))
    lse.copy_(joined)


def _backward(
    ring: Ring,
    parameters: Sequence[Tensor],
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_signal: Tensor | None,
    key_signal: Tensor | None,
    output: Tensor,
    lse: Tensor,
) -> list[Tensor | None]:
    """Gradients of q, k, v, both signals and the parameters."""
    dq, dquery = _zeros(q), None if query_signal is None else _zeros(query_signal)
    of_parameters = [_zeros(parameter) for parameter in parameters]
    held = [k, v] if key_signal is None else [k, v, key_signal]
    schedule, summed = ring.schedule(), None
    for step, block in enumerate(schedule):
        last = step + 1 == len(schedule)
        arrive = None if last else ring.group.shift(held, ring.like(held, schedule[step + 1]))
        sums = [_zeros(x) for x in held]
        for rows, columns, grid in ring.pairs(block, query_signal, _signal(held)):
            global_softmax = GlobalSoftmax(output[:, :, rows], lse[:, :, rows])
            operands = (q[:, :, rows], *(x[:, :, columns] for x in held[:2]))
            into = [dq[:, :, rows], *(x[:, :, columns] for x in sums[:2])]
            if dquery is not None:
                into += [dquery[:, rows], sums[2][:, columns]]
            into += of_parameters
            _add_block_gradients(
                ring, operands, grid, global_softmax, gradient[:, :, rows], parameters, into
            )
        if summed is not None:
            _add(sums, summed())
        # The sums go on with their block; those that come are of the block that comes.
        summed = ring.group.shift(sums, ring.like(sums, schedule[(step + 1) % len(schedule)]))
        if arrive is not None:
            held = arrive()
    assert summed is not None  # there is at least one rank
    dk, dv, *dkey = summed()
    of_signals = [None, None] if dquery is None else [dquery, *dkey]
    made: list[Tensor | None] = [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *of_signals]
    return [*made, *(g.to(p.dtype) for g, p in zip(of_parameters, parameters, strict=True))]


def _add_block_gradients(
    ring: Ring,
    operands: Sequence[Tensor],
    grid: Grid,
    global_softmax: GlobalSoftmax,
    gradient: Tensor,
    parameters: Sequence[Tensor],
    into: Sequence[Tensor],
) -> None:
    """Add the gradients through one block, of q, k, v, the signals and the parameters."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in operands)
        sides = [side.signal for side in (grid.query, grid.key)]
        signals = [x.detach().requires_grad_() for x in sides if x is not None]
        if signals:
            query, key = (
                replace(side, signal=signal)
                for side, signal in zip((grid.query, grid.key), signals, strict=True)
            )
            grid = replace(grid, query=query, key=key)
        call = replace(ring.block_call(q, k, v, grid), global_softmax=global_softmax)
        output = attend_block_backward(call, ring.call.backend)
        inputs = [q, k, v, *signals, *parameters]
        _add(into, torch.autograd.grad(output, inputs, gradient, allow_unused=True))


def _add(totals: Sequence[Tensor], more: Sequence[Tensor | None]) -> None:
    for total, term in zip(totals, more, strict=True):
        if term is not None:
            total.add_(term)


def _signal(held: Sequence[Tensor]) -> Tensor | None:
    """The signal that travels with keys and values, if there is one."""
    return held[2] if len(held) > 2 else None


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
