"""Ways to compute one call of attention: posenc, and alternatives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from posenc.attention import Backend
from posenc.attention.backends.triton import Triton
from posenc.attention.problem.lowering import is_constant_table, lower
from posenc.attention.problem.offsets import Offsets
from posenc.attention.problem.terms import read_terms
from posenc.encoding import StructuredScore
from posenc.errors import BackendRefusal
from posenc.grid import Grid
from posenc.lab.bench.passes import Pass, TimedCall, attending, plain
from posenc.lab.bench.run import PLAIN, contender_name
from posenc.lab.training.machine import available_memory

VARIANTS: dict[str, Backend] = {
    backend.name: backend for backend in (Triton(fuse_rotations=False),)
}
"""Backends with options, by the names under which they are measured."""

MATRICES = {"eager": 8, "bias written out": 6}
"""Approximate number of Q×K matrices in memory during a backward pass."""

KERNELS = 256
"""Kernels that FlexAttention may compile before it falls back to running uncompiled."""

SHARE = 0.6
"""Share of the available memory that a contender may need."""


def bias_of(
    lowered: Sequence[StructuredScore], q: Float[Tensor, "B H Q D"], grid: Grid
) -> Float[Tensor, "H W"] | None:
    """The bias at all Q + K - 1 offsets of a regular grid; None with other terms, or none."""
    terms = read_terms(lowered, q, Offsets.regular(grid).reach, bucketed=False)
    return terms.bias_by_offset if terms.bias_only else None


class Contender(ABC):
    """A way to compute a case.

    Attributes:
        name: in tables.
        level: ``"call"`` of attention, ``"layer"`` with projections, or ``"token"`` of a model.
        foreign: code of another library, which may fail.
    """

    name: str
    level: ClassVar[str] = "call"
    foreign: ClassVar[bool] = False

    def refusal(self, call: TimedCall) -> str | None:
        """The reason why it cannot compute this, if any."""
        return None

    @abstractmethod
    def prepare(self, call: TimedCall) -> Pass:
        """Prepare a supported call."""


class Plain(Contender):
    """PyTorch's fused kernel without positions, the reference of all others."""

    name = PLAIN

    def prepare(self, call: TimedCall) -> Pass:
        return plain(call)


class Posenc(Contender):
    """``posenc.attend``.

    Args:
        backend: ``"auto"``, or the name of a backend or of one of ``VARIANTS``.
    """

    def __init__(self, *, backend: str = "auto") -> None:
        self.name = contender_name(backend)
        self._backend = VARIANTS.get(backend, backend)

    def refusal(self, call: TimedCall) -> str | None:
        try:
            self.prepare(call)
        except BackendRefusal as error:
            return error.got
        return None

    def prepare(self, call: TimedCall) -> Pass:
        return attending(call, self._backend)


class Eager(Contender):
    """The definition, with matrices of logits and weights."""

    name = "eager"

    def refusal(self, call: TimedCall) -> str | None:
        return _too_large(self.name, call)

    def prepare(self, call: TimedCall) -> Pass:
        return Posenc(backend="reference").prepare(call)


class WrittenOut(Contender):
    """PyTorch's fused kernel with the encoding's scores as its mask.

    Scores without a gradient are computed once, outside the timing.
    """

    name = "bias written out"

    def refusal(self, call: TimedCall) -> str | None:
        score = call.encoding.score
        if score is None:
            return "there is no score to write out"
        if score.replaces_product:
            return "its score is no summand"
        if call.encoding.value is not None:
            return "its value part is no bias"
        return _too_large(self.name, call)

    def prepare(self, call: TimedCall) -> Pass:
        lowered = _lowered(call)
        constant = bool(lowered) and all(is_constant_table(term) for term in lowered or ())
        kept = self._bias(call, call.q, call.k).detach() if constant else None

        def run() -> Tensor:
            q, k, v = call.inputs
            if call.encoding.query_key is not None:
                q, k = call.encoding.query_key(q, k, call.grid)
            mask = self._bias(call, q, k) if kept is None else kept
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale)

        return Pass(run, call.wanted, call.weight)

    def _bias(self, call: TimedCall, q: Tensor, k: Tensor) -> Tensor:
        score = call.encoding.score
        assert score is not None  # refused otherwise
        grid = call.grid
        bias: Tensor = score(q, k, grid, scale=call.scale).to(q.dtype)
        return bias.masked_fill(~grid.visible, -torch.inf) if grid.causal else bias


class Flex(Contender):
    """FlexAttention with the table as a function of the offset; backward on CUDA only."""

    foreign: ClassVar[bool] = True

    name = "FlexAttention"

    def refusal(self, call: TimedCall) -> str | None:
        if call.grid.shift is None:
            return "written for texts here"
        lowered = _lowered(call)
        if lowered is None or not lowered or call.encoding.query_key is not None:
            return "written for tables of offsets here"
        if bias_of(lowered, call.q, call.grid) is None:
            return "written for tables of offsets here"
        return None

    def prepare(self, call: TimedCall) -> Pass:
        from torch._dynamo import config
        from torch.nn.attention.flex_attention import create_block_mask

        config.recompile_limit = max(config.recompile_limit, KERNELS)
        block_mask = None
        if call.case.causal:
            size = call.case.length
            block_mask = create_block_mask(_causal, None, None, size, size, device=call.q.device)
        compiled = torch.compile(_flex, dynamic=False)
        backward = call.q.device.type == "cuda"

        def run() -> Tensor:
            lowered = _lowered(call)
            assert lowered is not None  # refused otherwise
            bias = bias_of(lowered, call.q, call.grid)
            assert bias is not None  # refused otherwise
            q, k, v = call.inputs
            if not backward:  # it refuses inputs that require a gradient
                q, k, v, bias = (x.detach() for x in (q, k, v, bias))
            output: Tensor = compiled(q, k, v, bias, block_mask, call.scale)
            return output

        return Pass(run, call.wanted if backward else [], call.weight)


def _flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, block_mask: Any, scale: float) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    last = q.shape[2] - 1

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[h, j - i + last]

    return flex_attention(q, k, v, score_mod=add, block_mask=block_mask, scale=scale)


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _lowered(call: TimedCall) -> tuple[StructuredScore, ...] | None:
    return lower(call.encoding, call.q, call.k, call.grid, scale=call.scale)


def _too_large(name: str, call: TimedCall) -> str | None:
    """The estimated size, if it exceeds the available memory."""
    case = call.case
    needed = MATRICES[name] * case.heads * case.length**2 * max(4, call.q.element_size())
    available = available_memory(call.q.device)
    if available is None or needed <= SHARE * available:
        return None
    return f"it would take about {needed / 1e9:.0f} GB"
