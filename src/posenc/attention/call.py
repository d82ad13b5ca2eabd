"""The record of one call of ``attend``, and its lowering to a ``Problem``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.problem.lowering import lower, reads_tokens
from posenc.attention.problem.problem import (
    CounterDropout,
    GlobalSoftmax,
    Problem,
    Rotate,
    transformed,
)
from posenc.encoding import Encoding, Rotation, repeat_heads
from posenc.encoding.prepared import reused_of_grid
from posenc.grid import Grid, usable_signals
from posenc.layout.padding import zero_invalid
from posenc.runtime import autocast_dtype


@dataclass(eq=False)
class Call:
    """The arguments of one call of ``attend``; ``problem`` is made once, when first needed.

    Args: as ``attend``; ``global_softmax`` and ``counter_dropout`` as of ``Problem``.
    """

    q: Float[Tensor, "B H Q D"]
    k: Float[Tensor, "B G K D"]
    v: Float[Tensor, "B G K E"]
    grid: Grid
    encoding: Encoding
    dropout: float = 0.0
    scale: float | None = None
    global_softmax: GlobalSoftmax | None = None
    counter_dropout: CounterDropout | None = None
    sinks: Float[Tensor, " H"] | None = None
    softcap: float | None = None
    _problem: Problem | None = field(default=None, init=False, repr=False)

    def autocast(self) -> Call:
        """The call with operands cast by autocast, and with float64 positions for float64 operands.

        Otherwise positions are not cast, nor are biases.
        """
        if self.q.dtype == torch.float64:
            grid = self.grid.in_precision_of(self.q)
            return self if grid is self.grid else replace(self, grid=grid)
        dtype = autocast_dtype(self.q.device)
        if dtype is None:
            return self
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def without_padding(self) -> Call:
        """The call with zeros at invalid tokens, so that no backend reads what they hold."""
        q = zero_invalid(self.q, self.grid.query, dim=2)
        k, v = (zero_invalid(x, self.grid.key, dim=2) for x in (self.k, self.v))
        return replace(self, q=q, k=k, v=v, grid=usable_signals(self.grid))

    def without_hidden(self) -> Call:
        """The call with the keys that a window shows, if few queries see a part of the keys.

        So that decoding reads a slice of a cache. With many queries kernels skip the others.
        """
        grid, (queries, keys) = self.grid, (self.q.shape[2], self.k.shape[2])
        lowest, highest = grid.band
        if torch.compiler.is_compiling() or grid.shift is None or 4 * queries > keys:
            return self
        parts = (self.encoding.query_key, self.encoding.score, self.encoding.value)
        if (
            self.global_softmax
            or self.counter_dropout
            or not all(part is None or part.pairwise for part in parts)
        ):
            return self
        begin = max(0, lowest - grid.shift)
        end = min(keys, max(0, highest - grid.shift + queries))
        if begin >= end or end - begin == keys:
            return self
        k, v, key = self.k[:, :, begin:end], self.v[:, :, begin:end], grid.key.slice(begin, end)
        return replace(self, k=k, v=v, grid=replace(grid, key=key))

    def logit_scale(self) -> float:
        """Factor of the logits: as given, or the encoding's default."""
        if self.scale is not None:
            return self.scale
        return self.encoding.default_scale(self.q.shape[-1])

    def problem(self, rotate: Rotate = Rotation.apply) -> Problem:
        """The problem; q and k stay unrotated if a rotation is all that they still need."""
        if self._problem is None:
            self._problem = self._lower(rotate)
        return self._problem

    def _lower(self, rotate: Rotate) -> Problem:
        rotation = self.rotation()
        if rotation is None:
            q, k = transformed(self.q, self.k, self.encoding, self.grid)
            v = repeat_heads(self.v, k.shape[1])  # keys may have come back with one a query head
            return self._with(q, k, v, rotate)
        problem = replace(self._with(self.q, self.k, self.v, rotate), rotation=rotation)
        if problem.lowered is not None and not any(map(reads_tokens, problem.lowered)):
            return problem
        rotated = problem.rotated
        return replace(self._with(rotated.q, rotated.k, self.v, rotate), source=(self.q, self.k))

    def rotation(self) -> Rotation | None:
        """The query_key part's rotation; None without one, or where its angles have gradients."""
        transform = self.encoding.query_key
        if transform is None:
            return None
        graded = torch.is_grad_enabled()
        if graded and any(parameter.requires_grad for parameter in transform.parameters()):
            return None
        kind = (self.q.dtype, self.q.device, self.q.shape, self.k.shape)
        lower = partial(transform.lower, self.q.detach(), self.k.detach())
        rotation = reused_of_grid(lower, "rotation", *kind, grid=self.grid, layers=(transform,))
        return None if rotation is None or (graded and rotation.has_gradient) else rotation

    def _with(self, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate) -> Problem:
        grid, encoding, scale = self.grid, self.encoding, self.logit_scale()
        lowered = lower(encoding, q, k, grid, scale=scale, value_dim=v.shape[3])
        return Problem(
            *(q, k, v, grid, encoding, scale, self.dropout, lowered),
            global_softmax=self.global_softmax,
            counter_dropout=self.counter_dropout,
            sinks=self.sinks,
            softcap=self.softcap,
            rotate=rotate,
        )
