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
from posenc.distributed.gathered import attend_gathered
from posenc.distributed.group import Group, first_derivative
from posenc.distributed.shards import Piece, ShardedCall, pieces
from posenc.runtime import widest, without_autocast


def refusal(call: ShardedCall) -> str | None:
    """The reason why a ring cannot serve the call."""
    encoding = call.local.encoding
    for part in (encoding.query_key, encoding.score, encoding.value):
        if part is None:
            continue
        name = type(part).__name__
        if getattr(part, "replaces_softmax", False):
            return f"the weights of {name} are no softmax, and parts of them cannot be joined"
        if not part.pairwise:
            return f"the result of {name} for a pair depends on other tokens, too"
        if any(getattr(module, "attached", None) is not None for module in part.modules()):
            return f"{name} computes with parameters of the layer"
    return "positions have gradients" if call.shards.layout.positions.requires_grad else None


def attend_in_ring(call: ShardedCall) -> Float[Tensor, "B H L E"]:
    """Attention of this rank's queries, one block of keys after the other."""
    if call.session.group.size == 1:
        return attend_gathered(call)
    local = call.local
    signals = local.grid.query.signal, local.grid.key.signal
    parameters = [p for p in local.encoding.parameters() if p.requires_grad]
    tensors = (local.q, signals[0], local.k, local.v, signals[1], local.sinks)
    output: Tensor = _Attend.apply(Ring(call), *tensors, *parameters)
    return output


@dataclass(frozen=True, eq=False)
class Ring:
    """A call whose terms depend on pairs alone.

    ``asked`` are tensors of queries: q, and signals if there are any; ``held`` are tensors of a
    block: k, v and signals. All have their tokens in the last dimension but one.
    """

    call: ShardedCall

    @property
    def group(self) -> Group:
        """The ranks."""
        return self.call.session.group

    def pairs(self, block: int) -> Iterator[tuple[Piece, Piece]]:
        """Runs of this rank's queries and of the block's keys that may see each other."""
        grid, blocks = self.call.local.grid, self.call.shards.blocks
        same = grid.query.order is grid.key.order
        for query in blocks[self.group.rank] if same else pieces(grid.query):
            for key in blocks[block]:
                if query.may_see(key, grid.band):
                    yield query, key

    def block_call(
        self, asked: Sequence[Tensor], held: Sequence[Tensor], query: Piece, key: Piece
    ) -> Call:
        """The call of two runs' tensors, without sinks."""
        (q, *query_signal), (k, v, *key_signal) = asked, held
        sides = [
            replace(run.layout, signal=signal[0]) if signal else run.layout
            for run, signal in ((query, query_signal), (key, key_signal))
        ]
        grid = replace(self.call.local.grid, query=sides[0], key=sides[1])
        return self.call.part(q, k, v, grid, sinks=None)

    def schedule(self) -> list[int]:
        """The blocks in the order in which this rank gets them: its own, then the previous ones."""
        return [(self.group.rank - step) % self.group.size for step in range(self.group.size)]

    def blocks(self, held: Sequence[Tensor]) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Each block and its tensors, the first being ``held``, while the next one travels."""
        block, *following = self.schedule()
        for coming in following:
            arrive = self.group.shift(held, self.like(held, coming))
            yield block, held
            block, held = coming, arrive()
        yield block, held

    def like(self, tensors: Sequence[Tensor], block: int) -> list[Tensor]:
        """Empty tensors for a block's tokens."""
        length = self.call.shards.lengths[block]
        return [x.new_empty(*x.shape[:-2], length, x.shape[-1]) for x in tensors]


class _Attend(torch.autograd.Function):
    """Attention from q, query signals, k, v, key signals and sinks; then come parameters."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, *tensors: Tensor | None) -> Tensor:
        output, lse = _forward(ring, _present(tensors[:2]), _present(tensors[2:5]))
        if tensors[5] is not None:  # once, beside the blocks of all ranks
            output, joined = add_sinks(Result(output, lse), tensors[5], lse=True)
            assert joined is not None
            lse = joined
        ctx.ring, ctx.parameters = ring, tensors[6:]
        output = output.to(ring.call.local.v.dtype)
        ctx.save_for_backward(*tensors[:6], output, lse)
        return output

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *tensors, sinks, output, lse = ctx.saved_tensors
        asked, held = _present(tensors[:2]), _present(tensors[2:])
        with without_autocast(gradient.device):
            (dq, *dquery), (dk, dv, *dkey), of_parameters = _backward(
                ctx.ring, asked, held, ctx.parameters, GlobalSoftmax(output, lse), gradient
            )
        of_sinks = None if sinks is None else _of_sinks(sinks, gradient, output, lse)
        of_signals = [dquery[0], dkey[0]] if dquery else [None, None]
        return None, dq, of_signals[0], dk, dv, of_signals[1], of_sinks, *of_parameters


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _of_sinks(sinks: Tensor, gradient: Tensor, output: Tensor, lse: Tensor) -> Tensor:
    weights = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp().masked_fill(lse.isneginf(), 0.0)
    delta = (gradient.to(lse.dtype) * output).sum(-1)
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def _forward(ring: Ring, asked: Sequence[Tensor], held: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Output in float32 or better, and LSE in float64, over all keys."""
    q, width = asked[0], held[1].shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    output = q.new_zeros(*q.shape[:3], width, dtype=wide)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=widest(q.device))
    for block, tensors in ring.blocks(held):
        for query, key in ring.pairs(block):
            call = ring.block_call(query.cut(asked), key.cut(tensors), query, key)
            result = attend_block(call, ring.call.backend, return_lse=True)
            _join(output[:, :, query.tokens], lse[:, :, query.tokens], *result)
            del result  # before the next is computed
        del tensors  # before the next are received
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
    asked: Sequence[Tensor],
    held: Sequence[Tensor],
    parameters: Sequence[Tensor],
    softmax: GlobalSoftmax,
    gradient: Tensor,
) -> list[list[Tensor]]:
    """Gradients of what is asked and held, and of the parameters."""
    of_asked, of_parameters = ([_zeros(x) for x in side] for side in (asked, parameters))
    summed = None
    for block, tensors in ring.blocks(held):
        sums = [_zeros(x) for x in tensors]
        for query, key in ring.pairs(block):
            rows = query.tokens
            part = GlobalSoftmax(softmax.output[:, :, rows], softmax.lse[:, :, rows])
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in query.cut(asked) + key.cut(tensors)]
                sides = inputs[: len(asked)], inputs[len(asked) :]
                call = replace(ring.block_call(*sides, query, key), global_softmax=part)
                output = attend_block_backward(call, ring.call.backend)
                into = [*query.cut(of_asked), *key.cut(sums), *of_parameters]
                inputs += parameters
                cotangent = gradient[:, :, rows]
                _add(into, torch.autograd.grad(output, inputs, cotangent, allow_unused=True))
        if summed is not None:
            _add(sums, summed())
        # The sums go on with their block; those that come are of the block that comes.
        summed = ring.group.shift(sums, ring.like(sums, (block - 1) % ring.group.size))
        del tensors  # before the next are received
    assert summed is not None  # there is at least one rank
    made = ((asked, of_asked), (held, summed()), (parameters, of_parameters))
    return [[g.to(x.dtype) for x, g in zip(*side, strict=True)] for side in made]


def _add(totals: Sequence[Tensor], more: Sequence[Tensor | None]) -> None:
    for summed, term in zip(totals, more, strict=True):
        if term is not None:
            summed.add_(term)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
