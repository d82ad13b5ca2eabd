"""Second derivatives of attention by kernels, computed through the definition."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from posenc.attention.backends.common.base import Result
from posenc.attention.backends.common.definition import attend_by_definition
from posenc.attention.problem.lowering import given_encoding, map_term
from posenc.attention.problem.problem import Problem
from posenc.encoding import Encoding
from posenc.encoding.derivatives import Definition, records, with_definition

EMPTY = torch.empty(0)
"""Placeholder for a tensor that is stored elsewhere."""

NOTHING = Encoding()


def differentiable_twice(result: Result, problem: Problem) -> Result:
    """Results of a kernel; gradients of their gradients are computed through the definition.

    With dropout they are the kernel's, as the definition does not know its mask.
    """
    if problem.dropout or not records(result.output):
        return result
    dtype = None if result.lse is None else result.lse.dtype
    definition, tensors = _definition(problem, dtype)
    outputs = (result.output,) if result.lse is None else (result.output, result.lse)
    output, *lse = with_definition(outputs, definition, tensors)
    return Result(output, lse[0] if lse else None)


def _definition(problem: Problem, lse: torch.dtype | None) -> tuple[Definition, list[Tensor]]:
    """The definition, and the tensors that it may be differentiated by.

    Args:
        lse: its dtype; None: without it.
    """
    tensors = [problem.q, problem.k, problem.v]

    def take(x: Tensor) -> Tensor:
        # Layouts made in inference mode may be used outside; autograd saves no tensors of that.
        tensors.append(x.clone() if x.is_inference() else x)
        return EMPTY

    grid, sides = problem.grid, (problem.grid.query, problem.grid.key)
    by_tokens = any(x.signal is not None or x.positions.requires_grad for x in sides)
    if by_tokens:
        grid = pytree.tree_map_only(Tensor, take, grid)
    sinks = None if problem.sinks is None else take(problem.sinks)
    terms = problem.lowered
    names: list[str] = []
    if terms is not None:
        terms = tuple(map_term(take, term) for term in terms)
    else:
        parameters = dict(_Parts(problem.encoding).named_parameters())
        names = list(parameters)
        tensors += parameters.values()
    encoding = problem.encoding if terms is None else NOTHING
    without_tensors = replace(
        problem,
        q=EMPTY,
        k=EMPTY,
        v=EMPTY,
        grid=grid,
        encoding=encoding,
        lowered=terms,
        sinks=sinks,
        source=None,
    )

    def definition(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        rest = iter(others)

        def put(_: Tensor) -> Tensor:
            return next(rest)

        filled = replace(without_tensors, q=q, k=k, v=v)
        if by_tokens:
            filled = replace(filled, grid=pytree.tree_map_only(Tensor, put, grid))
        if sinks is not None:
            filled = replace(filled, sinks=next(rest))
        if filled.rotation is not None:
            q, k = filled.rotation.apply(q, k)
            filled = replace(filled, q=q, k=k, rotation=None)
        if terms is not None:
            filled = replace(
                filled, encoding=given_encoding([map_term(put, term) for term in terms])
            )
        parts, parameters = _Parts(filled.encoding), dict(zip(names, rest, strict=True))
        result: Result = functional_call(parts, parameters, (filled, lse is not None))
        return (result.output,) if result.lse is None else (result.output, result.lse.to(lse))

    return definition, tensors


class _Parts(nn.Module):
    """The parts that the definition reads, as a module whose parameters can be given."""

    def __init__(self, encoding: Encoding) -> None:
        super().__init__()
        self.score, self.value = encoding.score, encoding.value

    def forward(self, problem: Problem, lse: bool) -> Result:
        return attend_by_definition(problem, lse=lse)
