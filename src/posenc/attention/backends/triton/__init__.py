"""Triton kernels for CUDA devices, forward and backward, for all structured terms."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from posenc.attention.backends.common.base import Backend, Plan, Refusal, Result, refuse_rare
from posenc.attention.backends.triton.form import (
    KernelForm,
    SumsForm,
    is_single_query,
    kernel_form,
    refuse_device,
    refuse_machine,
    refuse_single_query,
    single_query_record,
)
from posenc.attention.backends.triton.op import TRITON
from posenc.attention.problem.lowering import add_rows
from posenc.attention.problem.problem import Problem
from posenc.attention.softmax import add_sinks
from posenc.encoding import DistanceFunction, GateCounts, StickWeights

__all__ = ["Triton"]


FUSED_KEYS, FUSED_KEYS_BY_CAPABILITY = 1024, {9: 8192, 10: 8192}
"""Keys up to which kernels rotate queries and keys as they read them, by major capability."""


SUMS = "kernels that carry sums from key to key"

NOT_SINGLE = Refusal("there are many queries, gradients or dropout")

DESCRIPTIONS: dict[type, tuple[str, str]] = {
    type(None): ("kernels with the terms of every offset", ""),
    DistanceFunction: ("kernels with a function of the distance", "distance"),
    GateCounts: (SUMS, "counts"),
    StickWeights: (SUMS, "sticks"),
}
"""How the kernels compute each kind of ``KernelForm.pairs``, and the name of their trial."""


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
        single = refuse_single_query(problem) if is_single_query(problem) else NOT_SINGLE
        if single is None:
            how = "a kernel for one query, the keys split"
            return Plan(_with_rotation(how, problem), partial(_attend_single_query, problem), "")
        fused = None if problem.lowered is not None else problem.fused()
        if single is not NOT_SINGLE and not isinstance(fused, SumsForm):
            return single
        form = kernel_form(problem, fused)
        if isinstance(form, Refusal):
            return form
        how, trial = DESCRIPTIONS[type(form.pairs)]
        how += " (memory linear in the length)"
        attend = partial(_attend, form, tuned=self.tuned)
        return Plan(_with_rotation(how, problem), attend, trial)


def _with_rotation(how: str, problem: Problem) -> str:
    """The description of a plan, with what becomes of queries and keys before their product."""
    if problem.rotation is not None and not _rotates_once(problem):
        return f"{how}, which rotate queries and keys as they read them"
    if problem.encoding.query_key is not None:
        return f"{how}, after queries and keys are transformed"
    return how


def _attend(form: KernelForm, *, tuned: bool, lse: bool) -> Result:
    """Attention for a problem in the form that the kernels take."""
    problem = form.problem
    if problem.rotation is not None and _rotates_once(problem):
        form = replace(form, problem=problem.rotated)
    output, row_lse = TRITON.attend(form.record(tuned=tuned))
    if form.carries_sums:
        return add_sinks(Result(output, row_lse), problem.sinks, lse=lse)
    return Result(output, add_rows(row_lse, form.lowered) if lse else None)


def _attend_single_query(problem: Problem, *, lse: bool) -> Result:
    """Attention of one query a row."""
    result = Result(*TRITON.attend(single_query_record(problem)))
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
