"""Attention by the kernels, as an operator."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posenc.attention.backends.common.operator import Gradients, Operator
from posenc.attention.backends.triton.strides import empty_as, features_together
from posenc.attention.problem.flat import flatten, paths_of, restore
from posenc.attention.problem.record import SCHEMA, KernelProblem
from posenc.attention.problem.terms import of_tokens

if TYPE_CHECKING:
    from posenc.attention.backends.triton.launch import Call
    from posenc.attention.backends.triton.sums_launch import SumsCall

FUNCTION = tuple(f"pairs.tensors.{at}" for at in range(5))
"""Paths of the numbers, knots, slopes, intercepts and rates of a function of the distance."""

CURVE = (FUNCTION[0], FUNCTION[2], FUNCTION[3])

ROWS = ("terms.left_rows", "terms.right_rows", "terms.value_rows")

BY_OFFSET = ("terms.bias_by_offset", *ROWS, *CURVE)
"""Paths of what depends on the offset, whose gradients are computed if they are wanted only."""

CONSTANT = ("geometry", "segments", "rotary", "seed")


def compute_output(record: KernelProblem) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, E]`` and LSE ``[B, H, Q]``, in float32.

    Of stick breaking, the binary logarithm of what is left in place of the LSE.
    """
    record = _ready(record)
    with torch.cuda.device(record.q.get_device()):
        if record.pairs.kind == "single":
            from posenc.attention.backends.triton.split_k import attend_split_k

            return attend_split_k(record)
        return _sums(record).forward() if _carries(record) else _call(record).forward()


def compute_gradients(
    record: KernelProblem, results: Sequence[Tensor], wanted: Container[str], part: bool
) -> Gradients:
    """Gradients by their paths; see ``Operator``. Of ``BY_OFFSET``, those that are wanted only."""
    assert not part  # refused
    record = _ready(record)
    gradient, output, lse, *of_lse = results
    with torch.cuda.device(record.q.get_device()):
        gradient = features_together(gradient)
        if _carries(record):
            return _sums(record).backward(gradient, output, lse, *of_lse)
        return _gradients(_call(record, gradient, output, lse, *of_lse), wanted)


def _empty_output(record: KernelProblem) -> tuple[Tensor, Tensor]:
    q, v = record.q, record.v
    return empty_as(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _empty_gradient(path: str, x: Tensor, wanted: bool) -> Tensor | None:
    if _is_constant(path) or (path in BY_OFFSET and not wanted):
        return None
    of_tokens = x.dim() == 4 and not path.startswith("pairs")
    return empty_as(x, x.shape[-1]) if of_tokens else x.new_empty(x.shape)


TRITON = Operator("triton", compute_output, compute_gradients, _empty_output, _empty_gradient)


def _is_constant(path: str) -> bool:
    return path.split(".")[0] in CONSTANT or path == FUNCTION[1]


def _carries(record: KernelProblem) -> bool:
    """True for scores that carry sums from key to key."""
    return record.pairs.kind in ("counts", "sticks", "sticks_self")


def _call(
    record: KernelProblem,
    gradient: Tensor | None = None,
    output: Tensor | None = None,
    lse: Tensor | None = None,
    of_lse: Tensor | None = None,
) -> Call:
    from posenc.attention.backends.triton.launch import Call

    return Call(record, gradient=gradient, output=output, lse=lse, of_lse=of_lse)


def _sums(record: KernelProblem) -> SumsCall:
    from posenc.attention.backends.triton.sums_launch import SumsCall

    return SumsCall(record)


def _gradients(call: Call, wanted: Container[str]) -> Gradients:
    """Gradients by their paths; only those that are wanted of tables."""
    from posenc.attention.backends.triton.offsets_launch import curve_gradients, offset_gradients

    terms = call.x.terms
    found, query_sums, weights = call.tokens(for_keys=False)
    of_keys, key_sums, _ = call.tokens(for_keys=True)
    found |= of_keys
    if call.x.sinks is not None and call.delta is not None and call.lse is not None:
        shares = (call.x.sinks - call.lse).exp().masked_fill(call.lse.isneginf(), 0.0)
        found["sinks"] = -(shares * call.delta).sum_to_size(call.x.sinks.shape)
    bias, bias_wanted = "terms.bias_by_offset", "terms.bias_by_offset" in wanted
    sources = (
        ("left_rows", terms.left, query_sums),
        ("right_rows", terms.right, key_sums),
        ("value_rows", call.gradient, weights),
    )
    for name, vectors, sums in sources:
        path, rows = f"terms.{name}", getattr(terms, name)
        if rows is None or vectors is None or path not in wanted:
            continue
        takes_bias = bias_wanted and name != "value_rows"
        of_bias, of_rows = offset_gradients(call, name, bias_wanted=takes_bias)
        if takes_bias and of_bias is not None:
            found[bias], bias_wanted = of_bias, False
        if of_rows is not None:
            found[path] = (of_rows if sums is None else sums.add_to_rows(of_rows, vectors)).to(
                rows.dtype
            )
    if bias_wanted:
        of_bias, _ = offset_gradients(call, None, bias_wanted=True)
        if of_bias is not None:
            found[bias] = of_bias
    if any(path in wanted for path in CURVE):
        found.update(zip(CURVE, curve_gradients(call), strict=True))
    if bias in found and query_sums is not None:
        found[bias][:, 0] += query_sums.first.sum((0, 2))
        found[bias][:, -1] += query_sums.last.sum((0, 2))
    return found


def _ready(record: KernelProblem) -> KernelProblem:
    """The record, its tensors in strides that the kernels can read."""
    flat = flatten(record, SCHEMA)
    ready = [
        x
        if path.startswith("rotary")
        else features_together(x)
        if x.dim() == 4 or (path.startswith("terms.") and of_tokens(path[6:]))
        else x.contiguous()
        for path, x in zip(paths_of(flat.words), flat.tensors, strict=True)
    ]
    found: KernelProblem = restore(flat._replace(tensors=ready), SCHEMA)
    return found
