"""Prepared calls: a struct that is reused for queries, keys and values of the same strides."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.attention.backends.common.base import Attend, Result
from posenc.attention.backends.native.arguments import Arguments, contiguous_rows, empty_like_tokens
from posenc.attention.backends.native.build import library
from posenc.attention.backends.native.library import CProblem, CTokens
from posenc.attention.problem.record import KernelProblem


def prepare(record: KernelProblem) -> Attend | None:
    """Attention of other tokens than the record's; None if it would have to copy or transform them.

    Factors and columns of the record have to be the same for all tokens.
    """
    if record.terms.left is not None or record.terms.right is not None:
        return None
    if any(contiguous_rows(x) is not x for x in (record.q, record.k, record.v)):
        return None
    call = Arguments(record)
    shape = (*record.q.shape[:3], record.v.shape[3])
    call.struct.out = CTokens.of(empty_like_tokens(record.v, shape))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Result:
        struct = CProblem.from_buffer_copy(call.struct)  # threads may call at the same time
        out, lse = empty_like_tokens(v, shape), q.new_empty(shape[:3], dtype=torch.float64)
        struct.q.data, struct.k.data, struct.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
        for rows, tokens, operand in (
            (struct.terms.left_rows, struct.terms.left, struct.q),
            (struct.terms.right_rows, struct.terms.right, struct.k),
        ):
            if rows.rows:
                tokens.value.data = operand.data
        struct.out.data, struct.lse = out.data_ptr(), lse.data_ptr()
        library().call("forward", struct, call.dtype)
        return Result(out, lse)

    return attend
