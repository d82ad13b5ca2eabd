"""Kernels of flash-linear-attention (fla) for CUDA devices, where that package is installed.

Its forgetting attention adds ``c_i - c_j`` to the logits, c the running sum of a number a token and
head: any number a key, since one a query changes no weight. Its PaTH attention has the same
products of reflections as ``encoding.BlockTransforms`` with ``reflections``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.base import Backend, Plan, Refusal, Result, refuse_rare
from posenc.attention.backends.common.definition import lse_by_definition
from posenc.attention.backends.common.fused import plainly_causal
from posenc.attention.problem.problem import Problem
from posenc.attention.problem.terms import reads_offsets
from posenc.encoding import BlockTransforms, LowRank, repeat_heads
from posenc.runtime import is_transformed

WIDTHS = (16, 32, 64, 128)

DTYPES = (torch.float16, torch.bfloat16)

DEVICE = "cuda"

Reflections = Callable[[], tuple[Tensor, Tensor]]


class Fla(Backend):
    """Biases by key, or products of reflections, on full causal sequences in 16 bits."""

    name = "fla"

    def unavailable(self, device: torch.device) -> Refusal | None:
        if importlib.util.find_spec("fla") is None:
            return Refusal("flash-linear-attention is not installed")
        return None

    def plan(self, problem: Problem) -> Plan | Refusal:
        refusal = refuse_rare(problem) or _unsupported(problem)
        if refusal is not None:
            return refusal
        if problem.lowered is not None:
            column = _column(problem)
            if column is None:
                return Refusal("the score part is no number a key")
            return Plan("fla's forgetting attention", partial(_forget, problem, column), trial="")
        reflections = _reflections(problem)
        if reflections is None:
            return Refusal("the score part is no product of reflections")
        return Plan("fla's PaTH attention", partial(_reflect, problem, reflections), trial="")


def _unsupported(problem: Problem) -> Refusal | None:
    q, grid = problem.q, problem.grid
    if q.device.type != DEVICE:
        return Refusal(f"its kernels run on CUDA devices, not on {q.device.type}")
    if q.dtype not in DTYPES:
        return Refusal(f"its kernels are for 16 bits, not for {q.dtype}")
    if is_transformed() or torch.compiler.is_compiling():
        return Refusal("its kernels are unknown to torch.func and torch.compile")
    if problem.dropout:
        return Refusal("it has no dropout")
    if problem.encoding.value is not None:
        return Refusal("it has no place for a value part")
    if not plainly_causal(grid) or grid.query.length != grid.key.length:
        return Refusal("it is for whole causal sequences without padding")
    widths = {q.shape[-1], problem.v.shape[-1]}
    if not widths <= set(WIDTHS):
        return Refusal(f"it takes heads of width {WIDTHS}, not {sorted(widths)}")
    return None


def _column(problem: Problem) -> Float[Tensor, "b H K"] | None:
    """The sum of the terms, if each is a bias by key; biases by query change no output."""
    column: Tensor | None = None
    for term in problem.lowered or ():
        if isinstance(term, LowRank) or term.column is None or reads_offsets(term):
            return None
        column = term.column if column is None else column + term.column
    return column


def _reflections(problem: Problem) -> Reflections | None:
    """The function of directions and strengths; None unless the score multiplies reflections."""
    form = problem.fused()
    return form.reflections if isinstance(form, BlockTransforms) else None


def decays(column: Float[Tensor, "b H K"]) -> Float[Tensor, "b K H"]:
    """Addends of the running sum c whose negative is the column, up to a constant."""
    steps = column[..., :-1] - column[..., 1:]
    return torch.nn.functional.pad(steps, (1, 0)).mT.float()


def _forget(problem: Problem, column: Float[Tensor, "b H K"], *, lse: bool) -> Result:
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    problem = problem.rotated
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    steps = decays(column).expand(*q.shape[:3])
    output: Tensor = parallel_forgetting_attn(q, k, v, steps, scale=problem.scale)
    return _result(output, problem, lse=lse)


def _reflect(problem: Problem, reflections: Reflections, *, lse: bool) -> Result:
    from fla.ops.path_attn.parallel import parallel_path_attn

    problem = problem.rotated
    k, v = (repeat_heads(x, problem.heads) for x in (problem.k, problem.v))
    q, k, v = (x.transpose(1, 2) for x in (problem.q, k, v))
    directions, strengths = reflections()
    w = directions.transpose(1, 2).float().expand(k.shape)
    beta = strengths.mT.float().expand(k.shape[:3])
    output, _ = parallel_path_attn(q, k, v, w, beta, scale=problem.scale)
    return _result(output, problem, lse=lse)


def _result(output: Tensor, problem: Problem, *, lse: bool) -> Result:
    return Result(output.transpose(1, 2), lse_by_definition(problem) if lse else None)


ENTRY = Fla()
