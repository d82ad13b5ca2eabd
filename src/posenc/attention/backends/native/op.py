"""Attention by the compiled kernels, as an operator."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from posenc.attention.backends.common.operator import Gradients, Operator
from posenc.attention.backends.native.arguments import Arguments, empty_like_tokens
from posenc.attention.backends.native.build import library
from posenc.attention.backends.native.gradients import OPTIONAL, GradientBuffers
from posenc.attention.backends.native.library import CTokens
from posenc.attention.problem.record import KernelProblem

WITHOUT_GRADIENT = ("terms.bucket", "geometry.intervals", "geometry.bands", "seed")


def compute_output(record: KernelProblem) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, E]`` and LSE ``[B, H, Q]``, in float64."""
    call = Arguments(record)
    out, lse = _empty_output(record)
    call.struct.out, call.struct.lse = CTokens.of(out), lse.data_ptr()
    library().call("forward", call.struct, call.dtype)
    return out, lse


def compute_gradients(
    record: KernelProblem, results: Sequence[Tensor], wanted: Container[str], global_lse: bool
) -> Gradients:
    """Gradients by path; see ``Operator``. Paths in ``OPTIONAL`` are computed only if wanted."""
    call = Arguments(record)
    x, (gradient, output, lse, *of_lse) = call.struct, results
    x.global_lse, x.lse = global_lse, lse.data_ptr()
    if of_lse:
        x.lse_gradient = call.keep(of_lse[0].double().contiguous()).data_ptr()
    x.gradient, x.out = call.tokens(gradient), call.tokens(output)
    buffers = GradientBuffers(call, wanted)
    library().call("backward", x, call.dtype)
    return buffers.summed()


def _empty_output(record: KernelProblem) -> tuple[Tensor, Tensor]:
    q, v = record.q, record.v
    lse = q.new_empty(q.shape[:3], dtype=torch.float64)
    return empty_like_tokens(v, (*q.shape[:3], v.shape[-1])), lse


def _empty_gradient(path: str, x: Tensor, wanted: bool) -> Tensor | None:
    if path in WITHOUT_GRADIENT or path.startswith("rotary.") or (path in OPTIONAL and not wanted):
        return None
    if path in ("q", "k", "v") or path.endswith("factor"):
        return empty_like_tokens(x, x.shape)
    return x.new_empty(x.shape)


NATIVE = Operator(
    "native", compute_output, compute_gradients, _empty_output, _empty_gradient, direct=True
)
