"""Recognition of problems with few queries, whose keys are read once (csrc/few_rows.h)."""

from __future__ import annotations

import torch

from posenc.attention.backends.common.fused import FEW_QUERIES
from posenc.attention.problem.problem import Problem
from posenc.encoding import BucketedTerms, StructuredScore

ROWS = 64
"""Largest number of queries in all heads that share keys."""


def are_few_rows(problem: Problem) -> bool:
    """True if the heads that share keys have few queries, and no terms but by offset.

    The backward pass reads keys for each head, as do graphs, which serve any number of queries.
    """
    (_, heads, queries, _), groups = problem.q.shape, problem.k.shape[1]
    if torch.compiler.is_compiling() and queries > 1:
        return False
    if queries > FEW_QUERIES or queries * heads // groups > ROWS or problem.dropout:
        return False
    graded = torch.is_grad_enabled() and problem.q.requires_grad
    return not graded and all(map(_is_by_offset, problem.lowered or ()))


def _is_by_offset(term: StructuredScore) -> bool:
    return isinstance(term, BucketedTerms) and term.right is None and term.column is None
