"""Triton kernels for CUDA devices, forward and backward, for all structured terms."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from posenc.attention.backends.common.base import (
    Backend,
    Compute,
    Plan,
    Refusal,
    Result,
    refuse_rare,
)
from posenc.attention.backends.triton.form import (
    KernelForm,
    SumsForm,
    is_single_query,
    kernel_form,
    refuse_device,
    refuse_machine,
    refuse_single_query,
    sums_form,
)
from posenc.attention.backends.triton.op import TRITON
from posenc.attention.backends.triton.posing import record, single_query_record, sums_record
from posenc.attention.problem.lowering import add_rows, given_encoding, map_term
from posenc.attention.problem.problem import Problem
from posenc.attention.softmax import add_sinks
from posenc.encoding import GateCounts, repeat_heads

__all__ = ["Triton"]


FUSED_KEYS, FUSED_KEYS_BY_CAPABILITY = 1024, {9: 8192, 10: 8192}
"""Keys up to which kernels rotate queries and keys as they read them, by major capability."""


NOT_SINGLE = Refusal("there are many queries, gradients or dropout")


class Triton(Backend):
    """Structured terms over tokens that are one position apart in each document, in tiles.

    Queries and few keys are rotated as they are read, so that rotated ones are never written, if
    that is all the encoding does with them (RoPE, p-RoPE, axial and M-RoPE, RoPE++, FoPE, and those
    stretched), no gradient is wanted of its angles, and no score part reads the rotated ones.
    Grouped key heads have to be rotated alike. ``Triton(fuse_rotations=False)``
    has all rotations done before.

    What depends on no offset is served for any layout, and so is one query without gradients.
    FIRE's function of the distance is computed by its pieces. Stick breaking and contextual
    positions have kernels of their own.
    Memory is linear in the length. Gradients of everything, dropout included; no second
    derivatives. The same bits at every call, as long as the tiles are the same: their sizes are
    chosen by measurement, once a process and kind of problem, unless ``tuned`` is False.

    Tested by Triton's interpreter, on the CPU, by compiling for devices that are not there, and on
    one H100 (``benchmarks/results/gpu_tests.md``).
    """

    def __init__(self, *, fuse_rotations: bool = True, tuned: bool = True) -> None:
        self.fuse_rotations, self.tuned = fuse_rotations, tuned
        self.name = "triton" if fuse_rotations else "triton-unfused"

    def untuned(self) -> Triton:
        return Triton(fuse_rotations=self.fuse_rotations, tuned=False)

    def unavailable(self, device: torch.device) -> Refusal | None:
        return refuse_machine(device)

    def plan(self, problem: Problem) -> Plan | Refusal:
        refusal = refuse_rare(problem, "sinks", "softcap") or refuse_device(problem)
        if refusal is not None:
            return refusal
        if not self.fuse_rotations:
            problem = problem.rotated
        compute: Compute
        kernels = ""
        single = refuse_single_query(problem) if is_single_query(problem) else NOT_SINGLE
        fused = None if single is None or problem.lowered is not None else problem.fused()
        sums = sums_form(problem, fused)
        if isinstance(sums, Refusal):
            return sums
        if sums is not None:
            how = "kernels that carry sums from key to key (memory linear in the length)"
            kernels = "counts" if isinstance(sums, GateCounts) else "sticks"
            compute = partial(_attend_with_sums, problem, sums, tuned=self.tuned)
        elif single is None:
            how = "a kernel for one query, the keys split"
            compute = partial(_attend_single_query, problem)
        elif single is not NOT_SINGLE:
            return single
        else:
            form = kernel_form(problem, fused)
            if isinstance(form, Refusal):
                return form
            how = "kernels with the terms of every offset (memory linear in the length)"
            if form.function is not None:
                how = "kernels with a function of the distance (memory linear in the length)"
                kernels = "distance"
            compute = partial(_attend, problem, form, tuned=self.tuned)
        if problem.rotation is not None and not _rotates_once(problem):
            how += ", which rotate queries and keys as they read them"
        elif problem.encoding.query_key is not None:
            how += ", after queries and keys are transformed"
        return Plan(how, compute, trial=kernels)


def _attend(problem: Problem, form: KernelForm, *, tuned: bool, lse: bool) -> Result:
    """Attention for a problem in the form that the kernels take."""
    if problem.rotation is not None and _rotates_once(problem):
        problem = problem.rotated
    output, row_lse = TRITON.attend(record(problem, form, tuned=tuned))
    return Result(output, add_rows(row_lse, form.lowered) if lse else None)


def _attend_single_query(problem: Problem, *, lse: bool) -> Result:
    """Attention of one query a row: all terms become a bias and a value row a key."""
    (batch, heads), grid, encoding = problem.q.shape[:2], problem.grid, problem.encoding
    q, k = problem.q, problem.k
    if problem.lowered is not None:
        encoding = given_encoding(map_term(Tensor.float, term) for term in problem.lowered)
    elif encoding.score is not None:
        q, k = q.float(), repeat_heads(k, heads).float()
    bias = None
    if encoding.score is not None:
        bias = encoding.score(q, k, grid, scale=problem.scale).squeeze(2).float()  # [b, H, K]
    if not grid.dense:
        hidden = ~grid.visible[:, :, 0]
        blank = torch.zeros_like(hidden, dtype=torch.float32) if bias is None else bias
        bias = blank.masked_fill(hidden, -torch.inf)
    bias = None if bias is None else bias.expand(batch, heads, -1)
    value = None if encoding.value is None else encoding.value.lower(grid)
    result = Result(*TRITON.attend(single_query_record(problem, bias, value)))
    return add_sinks(result, problem.sinks, lse=lse)


def _attend_with_sums(problem: Problem, form: SumsForm, *, tuned: bool, lse: bool) -> Result:
    """Attention for a problem whose score carries sums from key to key."""
    result = Result(*TRITON.attend(sums_record(problem, form, tuned=tuned)))
    return add_sinks(result, problem.sinks, lse=lse)


def _rotates_once(problem: Problem) -> bool:
    """True if queries and keys are rotated before the kernels, whose tiles would rotate them anew.

    The more keys there are, the more tiles, and without wgmma a tile costs more. From there on, by
    the model of ``benchmarks/kernels_static.py``, that takes longer than some passes over memory.
    """
    if is_single_query(problem):
        return False
    device, most = problem.q.device, FUSED_KEYS
    if device.type == "cuda" and torch.cuda.is_available():
        major, _ = torch.cuda.get_device_capability(device)
        most = FUSED_KEYS_BY_CAPABILITY.get(major, most)
    return problem.grid.key.length > most


ENTRY = Triton()
