"""One call of ``attend``, in the form that each backend takes."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.attention.backends.common.base import Backend, Problem
from posenc.attention.lowering import lower, reads_tokens, repeat_heads
from posenc.encoding import Encoding, Rotation
from posenc.grid import Grid

__all__ = ["AttentionCall"]


class AttentionCall:
    """A validated call of ``attend``, and the problem that it is to each backend.

    Queries and keys come transformed; a backend that fuses gets them as they are, with the
    rotation, where that is all there is to do. Either form is made when a backend first asks.

    Args: as ``attend``; scale: None for the encoding's own.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Grid,
        encoding: Encoding,
        dropout: float,
        scale: float | None,
    ) -> None:
        self.q, self.k, self.v, self.grid, self.encoding = q, k, v, grid, encoding
        self.dropout = dropout
        self.scale = encoding.default_scale(q.shape[-1]) if scale is None else scale
        self._transformed: Problem | None = None
        self._fused: tuple[Problem | None] | None = None

    def problem(self, backend: Backend) -> Problem:
        """The problem as this backend takes it."""
        if backend.fuse_rotations:
            if self._fused is None:
                self._fused = (self._fused_problem(),)
            if self._fused[0] is not None:
                return self._fused[0]
        return self.transformed()

    def transformed(self) -> Problem:
        """The problem with queries and keys transformed."""
        if self._transformed is None:
            q, k, v = self.q, self.k, self.v
            if self.encoding.query_key is not None:
                q, k = self.encoding.query_key(q, k, self.grid)
                v = repeat_heads(v, k.shape[1])  # keys may have come back with one a query head
            self._transformed = self._problem(q, k, v, None)
        return self._transformed

    def _fused_problem(self) -> Problem | None:
        """The problem with the rotation yet to be done; None where it has to come first.

        That is so where its angles are learned, for kernels give no gradients of them, and where
        score parts read the queries or keys as it leaves them.
        """
        transform = self.encoding.query_key
        if transform is None:
            return None
        graded = torch.is_grad_enabled()
        if graded and any(parameter.requires_grad for parameter in transform.parameters()):
            return None
        rotation = transform.lower(self.q, self.k, self.grid)
        if rotation is None or (graded and rotation.has_gradient):
            return None
        problem = self._problem(self.q, self.k, self.v, rotation)
        if problem.lowered is None or any(reads_tokens(term) for term in problem.lowered):
            return None
        return problem

    def _problem(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Problem:
        grid, encoding, scale = self.grid, self.encoding, self.scale
        lowered = lower(encoding, q, k, grid, scale=scale)
        return Problem(q, k, v, grid, encoding, scale, self.dropout, lowered, rotation)
