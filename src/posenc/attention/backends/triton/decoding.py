"""One query a row against many keys: all terms become one bias a key and one value row a key."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.base import Result
from posenc.attention.backends.common.sinks import beside_sinks
from posenc.attention.backends.triton.posing import SINGLE_QUERY, SingleQuery, rotary_of
from posenc.attention.problem.flat import Flat, by_path, flatten, restore
from posenc.attention.problem.lowering import add_rows, repeat_heads
from posenc.attention.problem.problem import Problem
from posenc.encoding import BucketedTerms, LowRank, StructuredScore

__all__ = ["attend_single_query"]


@torch.library.custom_op("posenc::triton_decode", mutates_args=())
def decode(
    tensors: Sequence[Tensor], numbers: Sequence[int], reals: Sequence[float], words: str
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, 1, E]`` and LSE ``[B, H, 1]`` of a flat ``SingleQuery``."""
    from posenc.attention.backends.triton.split_k import attend_split_k

    record = restore(Flat(list(tensors), list(numbers), list(reals), words), SINGLE_QUERY)
    with torch.cuda.device(record.q.get_device()):
        return attend_split_k(record)


@decode.register_fake
def _(
    tensors: Sequence[Tensor], numbers: Sequence[int], reals: Sequence[float], words: str
) -> tuple[Tensor, Tensor]:
    given = by_path(tensors, words)
    q, v = given["q"], given["v"]
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
    record = SingleQuery(
        *(problem.q, problem.k, problem.v, problem.scale, rotary_of(problem.rotation)),
        *(bias, problem.softcap or 0.0, bucket, rows),
    )
    output, row_lse = decode(*flatten(record, SINGLE_QUERY))
    result = Result(output, add_rows(row_lse, lowered or ()))
    if problem.sinks is not None:
        return beside_sinks(result, problem.sinks, lse=lse)
    return result if lse else result._replace(lse=None)


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
