"""Attention by the kernels, as an operator."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from posenc.attention.backends.common.operator import Gradients, Operator
from posenc.attention.backends.triton.form import CURVE, KNOTS, empty_as, features_together
from posenc.attention.problem.record import KernelProblem, flatten, paths_of, restore
from posenc.attention.problem.terms import OF_TOKENS

CARRIED = ("counts", "sticks", "sticks_self")
"""Kinds of scores that carry sums from key to key."""

BY_OFFSET = (
    *(f"terms.{name}" for name in ("bias_by_offset", "left_rows", "right_rows", "value_rows")),
    *CURVE,
)
"""Paths of operands by offset, whose gradients are computed only if wanted."""

CONSTANT = ("geometry", "segments", "rotary", "seed")


def compute_output(record: KernelProblem) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, E]`` and LSE ``[B, H, Q]``, in float32.

    Of stick breaking, the binary logarithm of what is left in place of the LSE.
    """
    record = _ready(record)
    with torch.cuda.device(record.q.get_device()):
        if record.pairs.kind == "single":
            from posenc.attention.backends.triton.launch import attend_single_query

            return attend_single_query(record)
        if record.pairs.kind in CARRIED:
            from posenc.attention.backends.triton.sums_launch import SumsLaunch

            return SumsLaunch(record).forward()
        from posenc.attention.backends.triton.launch import Launch

        return Launch(record).forward()


def compute_gradients(
    record: KernelProblem, results: Sequence[Tensor], wanted: Container[str], global_lse: bool
) -> Gradients:
    """Gradients by path; see ``Operator``. Paths in ``BY_OFFSET`` are computed only if wanted."""
    assert not global_lse  # refused
    record, gradient = _ready(record), features_together(results[0])
    with torch.cuda.device(record.q.get_device()):
        if record.pairs.kind in CARRIED:
            from posenc.attention.backends.triton.sums_launch import SumsLaunch

            return SumsLaunch(record).backward(gradient, *results[1:])
        from posenc.attention.backends.triton.gradients_launch import gradients_by_path

        return gradients_by_path(record, (gradient, *results[1:]), wanted)


def _empty_output(record: KernelProblem) -> tuple[Tensor, Tensor]:
    q, v = record.q, record.v
    return empty_as(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _empty_gradient(path: str, x: Tensor, wanted: bool) -> Tensor | None:
    constant = path.split(".")[0] in CONSTANT or path == KNOTS
    if constant or (path in BY_OFFSET and not wanted):
        return None
    of_tokens = x.dim() == 4 and not path.startswith("pairs")
    return empty_as(x, x.shape[-1]) if of_tokens else x.new_empty(x.shape)


TRITON = Operator("triton", compute_output, compute_gradients, _empty_output, _empty_gradient)


def _ready(record: KernelProblem) -> KernelProblem:
    """The record, its tensors in strides that the kernels can read."""
    flat = flatten(record)
    ready = [
        x
        if path.startswith("rotary")
        else features_together(x)
        if x.dim() == 4 or (path.startswith("terms.") and path[6:] in OF_TOKENS)
        else x.contiguous()
        for path, x in zip(paths_of(flat.words), flat.tensors, strict=True)
    ]
    if all(x is original for x, original in zip(ready, flat.tensors, strict=True)):
        return record
    return restore(flat._replace(tensors=ready))
