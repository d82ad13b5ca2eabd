"""Terms of pairs outside the structured form, as the kernels take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posenc.attention.backends.native.library import CProblem
from posenc.encoding import (
    BlockTransforms,
    DistanceFunction,
    GateCounts,
    HeadMixing,
    LogGateSums,
    StickWeights,
)

DESCRIPTIONS: dict[type, str] = {
    DistanceFunction: "a piecewise-linear function of the distance",
    HeadMixing: "a network of the logits of all heads, which go together",
    BlockTransforms: "queries that blocks of keys transform",
    GateCounts: "counts by gates, carried from the last key to the first",
    LogGateSums: "sums of gates' logarithms, carried from the last key to the first",
    StickWeights: "stick breaking, carried from the last key to the first",
}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PairKind:
    """A kind of term in the kernels.

    Args:
        number: in csrc/problem.h.
        sizes: numbers that the kernel reads, from the tensors.
        gradients: shapes of the gradients that it writes or adds to, from the tensors, the
            problem and the number of parts; None for none. Their first dimensions are summed.
    """

    number: int
    sizes: Callable[[Sequence[Tensor]], Sequence[int]] = lambda _: ()
    gradients: Callable[[Sequence[Tensor], CProblem, int], Sequence[Shape | None]] = lambda *_: ()


def _distance_sizes(tensors: Sequence[Tensor]) -> Sequence[int]:
    x, _, slope, _, factor = tensors
    return len(x), slope.shape[1], 0 if len(factor) == 1 else factor.shape[1]


def _distance_gradients(
    tensors: Sequence[Tensor], problem: CProblem, parts: int
) -> Sequence[Shape | None]:
    x, _, slope, *_ = tensors
    pieces = (parts, *slope.shape)
    rows = (problem.heads, problem.batch, problem.queries)
    return (parts, problem.heads, len(x)), None, pieces, pieces, rows


def _mixing_gradients(
    tensors: Sequence[Tensor], problem: CProblem, parts: int
) -> Sequence[Shape | None]:
    return [(parts, *x.shape) for x in tensors]


def _block_gradients(
    tensors: Sequence[Tensor], problem: CProblem, parts: int
) -> Sequence[Shape | None]:
    matrices, diagonal = tensors
    return (problem.splits, *matrices.shape), diagonal.shape


def _log_gate_gradients(
    tensors: Sequence[Tensor], problem: CProblem, parts: int
) -> Sequence[Shape | None]:
    query, key, _ = tensors
    return query.shape, (problem.splits, *key.shape), None


KINDS = {
    "distance": PairKind(1, _distance_sizes, _distance_gradients),
    "counts": PairKind(2),
    "blocks": PairKind(6, lambda tensors: (tensors[0].shape[2],), _block_gradients),
    "log_gates": PairKind(4, lambda tensors: tensors[0].shape[3:], _log_gate_gradients),
    "mixing": PairKind(5, lambda tensors: tensors[1].shape, _mixing_gradients),
    "sticks": PairKind(3, lambda _: (0,)),
    "sticks_self": PairKind(3, lambda _: (1,)),
}
"""Kinds of pair terms by name; csrc/problem.h says which header describes each."""


def pair_gradients(
    kind: str, problem: CProblem, tensors: Sequence[Tensor], parts: int
) -> list[Tensor | None]:
    """Allocate zeros for the gradients of the tensors, and put their addresses into ``problem``."""
    if not kind:
        return []
    buffers: list[Tensor | None] = []
    for at, shape in enumerate(KINDS[kind].gradients(tensors, problem, parts)):
        buffer = None if shape is None else torch.zeros(shape, dtype=tensors[at].dtype)
        buffers.append(buffer)
        if buffer is not None:
            problem.pairs.gradient[at] = buffer.data_ptr()
    return buffers


def sum_to_tensors(buffers: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the tensors: the parts that the kernel wrote, summed to their shapes."""
    return [
        torch.zeros_like(like) if part is None else part.sum_to_size(like.shape).to(like.dtype)
        for part, like in zip(buffers, tensors, strict=True)
    ]
