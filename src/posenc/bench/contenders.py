"""Ways to compute one call of attention: posenc, and alternatives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from posenc.attention import Backend, attend, explain
from posenc.attention.backends.triton import Triton
from posenc.attention.problem.lowering import is_constant_table, lower
from posenc.attention.problem.offsets import bias_of
from posenc.bench.case import Call
from posenc.bench.results import Level
from posenc.encoding import StructuredScore
from posenc.errors import BackendRefusal
from posenc.training.machine import available_memory

PLAIN = "plain SDPA"
"""Name of the reference of calls."""

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


@dataclass(frozen=True, eq=False)
class Prepared:
    """A contender that is ready to run.

    Args:
        run: the forward pass.
        wanted: tensors to compute gradients of.
        weight: gradient of the output.
        served_by: the backend or kernel, if chosen.
        tokens: that ``run`` generates; times are of one.
    """

    run: Callable[[], Tensor]
    wanted: list[Tensor]
    weight: Tensor
    served_by: str = ""
    tokens: int = 1

    def forward(self) -> None:
        """Run without a graph."""
        with torch.no_grad():
            self.run()

    def both(self) -> tuple[Tensor, ...]:
        """Run forward and backward; the gradients of ``wanted``."""
        return torch.autograd.grad(self.run(), self.wanted, self.weight, allow_unused=True)


class Contender(ABC):
    """A way to compute a case.

    Attributes:
        name: in tables.
        level: what it computes.
        foreign: code of another library, which may fail.
    """

    name: str
    level: ClassVar[Level] = "call"
    foreign: ClassVar[bool] = False

    def refusal(self, call: Call) -> str | None:
        """The reason why it cannot compute this, if any."""
        return None

    def forward_only(self, call: Call) -> str | None:
        """The reason why it has no backward pass here, if any."""
        return None

    @abstractmethod
    def prepare(self, call: Call) -> Prepared:
        """Prepare a supported call."""


class Plain(Contender):
    """PyTorch's fused kernel without positions, the reference of all others."""

    name = PLAIN

    def prepare(self, call: Call) -> Prepared:
        def run() -> Tensor:
            return scaled_dot_product_attention(*call.inputs, is_causal=call.case.causal)

        return Prepared(run, list(call.inputs), call.weight)


class Posenc(Contender):
    """``posenc.attend``.

    Args:
        backend: ``"auto"``, or the name of a backend or of one of ``VARIANTS``.
    """

    def __init__(self, *, backend: str = "auto") -> None:
        self.name = "posenc" if backend == "auto" else f"posenc {backend}"
        self._backend = VARIANTS.get(backend, backend)

    def refusal(self, call: Call) -> str | None:
        try:
            self._explain(call)
        except BackendRefusal as error:
            return error.got
        return None

    def _explain(self, call: Call) -> str:
        return explain(*call.inputs, call.grid, call.encoding, backend=self._backend).backend

    def prepare(self, call: Call) -> Prepared:
        def run() -> Tensor:
            return attend(*call.inputs, call.grid, call.encoding, backend=self._backend)

        return Prepared(run, call.wanted, call.weight, self._explain(call))


class Eager(Contender):
    """The definition, with matrices of logits and weights."""

    name = "eager"

    def refusal(self, call: Call) -> str | None:
        return _too_large(self.name, call)

    def prepare(self, call: Call) -> Prepared:
        return Posenc(backend="reference").prepare(call)


class WrittenOut(Contender):
    """PyTorch's fused kernel with the encoding's scores as its mask.

    Scores without a gradient are computed once, outside the timing.
    """

    name = "bias written out"

    def refusal(self, call: Call) -> str | None:
        score = call.encoding.score
        if score is None:
            return "there is no score to write out"
        if score.replaces_product:
            return "its score is no summand"
        if call.encoding.value is not None:
            return "its value part is no bias"
        return _too_large(self.name, call)

    def prepare(self, call: Call) -> Prepared:
        lowered = _lowered(call)
        constant = bool(lowered) and all(is_constant_table(term) for term in lowered or ())
        kept = self._bias(call, call.q, call.k).detach() if constant else None

        def run() -> Tensor:
            q, k, v = call.inputs
            if call.encoding.query_key is not None:
                q, k = call.encoding.query_key(q, k, call.grid)
            mask = self._bias(call, q, k) if kept is None else kept
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale)

        return Prepared(run, call.wanted, call.weight)

    def _bias(self, call: Call, q: Tensor, k: Tensor) -> Tensor:
        score = call.encoding.score
        assert score is not None  # refused otherwise
        grid = call.grid
        bias: Tensor = score(q, k, grid, scale=call.scale).to(q.dtype)
        return bias.masked_fill(~grid.visible, -torch.inf) if grid.causal else bias


class Flex(Contender):
    """FlexAttention with the table as a function of the offset; backward on CUDA only."""

    foreign: ClassVar[bool] = True

    name = "FlexAttention"

    def refusal(self, call: Call) -> str | None:
        if call.grid.shift is None:
            return "written for texts here"
        lowered = _lowered(call)
        if lowered is None or not lowered or call.encoding.query_key is not None:
            return "written for tables of offsets here"
        if bias_of(lowered, call.q, call.grid) is None:
            return "written for tables of offsets here"
        return None

    def forward_only(self, call: Call) -> str | None:
        return None if call.q.device.type == "cuda" else "no backward on the CPU"

    def prepare(self, call: Call) -> Prepared:
        from torch._dynamo import config
        from torch.nn.attention.flex_attention import create_block_mask

        config.recompile_limit = max(config.recompile_limit, KERNELS)
        block_mask = None
        if call.case.causal:
            size = call.case.length
            block_mask = create_block_mask(_causal, None, None, size, size, device=call.q.device)
        compiled = torch.compile(_flex, dynamic=False)

        def run() -> Tensor:
            lowered = _lowered(call)
            assert lowered is not None  # refused otherwise
            bias = bias_of(lowered, call.q, call.grid)
            assert bias is not None  # refused otherwise
            q, k, v = call.inputs
            if self.forward_only(call) is not None:  # it refuses inputs that require a gradient
                q, k, v, bias = (x.detach() for x in (q, k, v, bias))
            output: Tensor = compiled(q, k, v, bias, block_mask, call.scale)
            return output

        return Prepared(run, call.wanted, call.weight)


def _flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, block_mask: Any, scale: float) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    last = q.shape[2] - 1

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[h, j - i + last]

    return flex_attention(q, k, v, score_mod=add, block_mask=block_mask, scale=scale)


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _lowered(call: Call) -> tuple[StructuredScore, ...] | None:
    return lower(call.encoding, call.q, call.k, call.grid, scale=call.scale)


def _too_large(name: str, call: Call) -> str | None:
    """The estimated size, if it exceeds the available memory."""
    case = call.case
    needed = MATRICES[name] * case.heads * case.length**2 * max(4, call.q.element_size())
    available = available_memory(call.q.device)
    if available is None or needed <= SHARE * available:
        return None
    return f"it would take about {needed / 1e9:.0f} GB"
