"""One query a row against many keys: all terms become one bias a key and one value row a key."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.base import Problem, Result
from posenc.attention.backends.triton.form import rotary_of
from posenc.attention.lowering import add_rows, repeat_heads
from posenc.encoding import BucketedTerms, LowRank, StructuredScore

__all__ = ["attend_single_query"]


@torch.library.custom_op("posenc::triton_decode", mutates_args=())
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    bucket: Tensor | None,
    value_rows: Tensor | None,
    query_rotary: Tensor | None,
    key_rotary: Tensor | None,
    adjacent: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, 1, E]`` and LSE ``[B, H, 1]`` of queries ``[B, H, 1, D]``.

    Args:
        bias: ``[B, H, K]`` float32, -inf where hidden. bucket: ``[B, K]``, which of ``value_rows``
            ``[h, N, E]`` each key adds to its value. query_rotary, key_rotary, adjacent: as in
            ``Operands`` and ``Options``.
    """
    from posenc.attention.backends.triton.split_k import attend_split_k

    with torch.cuda.device(q.get_device()):
        # fmt: off
        return attend_split_k(
            q, k, v, bias, bucket, value_rows, query_rotary, key_rotary, adjacent, scale
        )
        # fmt: on


@decode.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    output = v.new_empty(*q.shape[:3], v.shape[-1])
    return output, q.new_empty(q.shape[:3], dtype=torch.float32)


def attend_single_query(problem: Problem, *, lse: bool) -> Result:
    """Attention for any layout: offsets are looked up key by key."""
    batch, heads = problem.q.shape[:2]
    lowered = problem.lowered
    if lowered is None:
        bias, value = _by_definition(problem), None
        if problem.encoding.value is not None:
            value = problem.encoding.value.lower(problem.grid)
    else:
        parts = [part for part in (_bias(term, problem) for term in lowered) if part is not None]
        bias = sum(parts[1:], parts[0]) if parts else None
        values = [t for t in lowered if isinstance(t, BucketedTerms) and t.value is not None]
        value = values[0] if values else None
    if not problem.grid.dense:
        hidden = ~problem.grid.visible[:, :, 0]
        blank = torch.zeros_like(hidden, dtype=torch.float32) if bias is None else bias
        bias = blank.masked_fill(hidden, -torch.inf)
    if bias is not None:
        bias = bias.expand(batch, heads, -1)
    bucket = rows = None
    if value is not None and value.value is not None:
        bucket = value.bucket(problem.grid.offset[:, 0]).expand(batch, -1)
        rows = value.value.to(problem.v.dtype)
    q, k, v = problem.q, problem.k, problem.v
    output, row_lse = decode(q, k, v, bias, bucket, rows, *rotary_of(problem), problem.scale)
    return Result(output, add_rows(row_lse, lowered or ()) if lse else None)


def _by_definition(problem: Problem) -> Float[Tensor, "b H K"] | None:
    score = problem.encoding.score
    if score is None:
        return None
    q, k = problem.q.float(), repeat_heads(problem.k, problem.heads).float()
    summand: Tensor = score(q, k, problem.grid, scale=problem.scale)
    return summand.squeeze(2).float()


def _bias(term: StructuredScore, problem: Problem) -> Float[Tensor, "b H K"] | None:
    """Bias of every key by one term; None: the same for all, or none."""
    if isinstance(term, LowRank):
        return (term.query.float() @ term.key.float().mT).squeeze(2)
    bucket = None
    if any(part is not None for part in (term.table, term.left, term.right)):
        bucket = term.bucket(problem.grid.offset[:, 0])
    parts = []
    if term.table is not None and bucket is not None:
        parts.append(term.table[:, bucket].transpose(0, 1).float())
    if term.left is not None and bucket is not None:
        products = (term.left.tokens.float() @ term.left.rows.float().mT).squeeze(2)
        size = (max(len(products), len(bucket)), products.shape[1], -1)
        parts.append(products.expand(size).gather(2, bucket.unsqueeze(1).expand(size)))
    if term.right is not None and bucket is not None:
        rows = term.right.rows[:, bucket].transpose(0, 1)
        parts.append((term.right.tokens.float() * rows.float()).sum(-1))
    if term.column is not None:
        parts.append(term.column.float())
    return sum(parts[1:], parts[0]) if parts else None
