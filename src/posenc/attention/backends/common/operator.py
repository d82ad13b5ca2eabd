"""Kernels as ``torch.library`` operators for autograd, ``torch.compile`` and checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from posenc.attention.backends.common.base import kernel_gradients
from posenc.attention.problem.record import Flat, KernelProblem, flatten, paths_of, restore
from posenc.runtime import needs_dispatch

Gradients = dict[str, Tensor]
"""Gradients by the path of their tensor in the record."""


@dataclass(frozen=True)
class Operator:
    """An engine's kernels as ``torch.ops.posenc.NAME`` and ``NAME_backward``, on flat records.

    Args:
        name: of the engine.
        output: output ``[B, H, Q, E]`` and LSE ``[B, H, Q]`` of a record.
        gradients: from a record, results (gradient of the output, output, LSE, and the LSE's
            gradient if it has one), the paths whose gradients are wanted, and True if output and
            LSE are over more keys than the record's. Other gradients may come too.
        empty_output: tensors of the shapes, strides and dtypes of ``output``.
        empty_gradient: likewise of the gradient of a tensor at a path, wanted or not; None for
            none.
    """

    name: str
    output: Callable[[KernelProblem], tuple[Tensor, Tensor]]
    gradients: Callable[[KernelProblem, Sequence[Tensor], Container[str], bool], Gradients]
    empty_output: Callable[[KernelProblem], tuple[Tensor, Tensor]]
    empty_gradient: Callable[[str, Tensor, bool], Tensor | None]
    _forward: Callable[..., Any] = field(init=False, repr=False)
    _backward: Callable[..., Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        forward, backward = _forward(self), _backward(self)

        def differentiate(
            ctx: Any, gradient: Tensor | None, of_lse: Tensor | None
        ) -> tuple[Any, ...]:
            wanted = ctx.needs_input_grad[0]
            return _differentiated(ctx, backward, (gradient, of_lse), wanted), None, None, None

        forward.register_autograd(kernel_gradients(differentiate), setup_context=_keep)
        object.__setattr__(self, "_forward", forward)
        object.__setattr__(self, "_backward", backward)

    def attend(self, record: KernelProblem) -> tuple[Tensor, Tensor]:
        """Output and LSE."""
        tensors, *rest = flatten(record)
        if needs_dispatch(*tensors):
            results: tuple[Tensor, Tensor] = self._forward(tensors, *rest)
        elif torch.is_grad_enabled():
            results = _Direct.apply(self, record, None, *rest, *tensors)
        else:
            results = self.output(record)
        return results

    def zeros(self, record: KernelProblem, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Zeros with the gradients of output and LSE over more keys than the record's."""
        tensors, *rest = flatten(record)
        results: tuple[Tensor, Tensor] = _Direct.apply(self, record, (output, lse), *rest, *tensors)
        return results


def _restored(
    tensors: Sequence[Tensor], numbers: Sequence[int], reals: Sequence[float], words: str
) -> KernelProblem:
    return restore(Flat(list(tensors), list(numbers), list(reals), words))


def _forward(operator: Operator) -> CustomOpDef:
    @torch.library.custom_op(f"posenc::{operator.name}", mutates_args=())
    def forward(
        tensors: Sequence[Tensor], numbers: Sequence[int], reals: Sequence[float], words: str
    ) -> tuple[Tensor, Tensor]:
        return operator.output(_restored(tensors, numbers, reals, words))

    @forward.register_fake
    def _(
        tensors: Sequence[Tensor], numbers: Sequence[int], reals: Sequence[float], words: str
    ) -> tuple[Tensor, Tensor]:
        return operator.empty_output(_restored(tensors, numbers, reals, words))

    return forward


def _backward(operator: Operator) -> CustomOpDef:
    """Gradients, one a tensor; empty for those without."""

    @torch.library.custom_op(f"posenc::{operator.name}_backward", mutates_args=())
    def backward(
        results: Sequence[Tensor],
        tensors: Sequence[Tensor],
        numbers: Sequence[int],
        reals: Sequence[float],
        words: str,
        wanted: Sequence[bool],
    ) -> list[Tensor]:
        record, paths = _restored(tensors, numbers, reals, words), paths_of(words)
        needed = {path for path, want in zip(paths, wanted, strict=True) if want}
        gradients = operator.gradients(record, results, needed, False)
        return [gradients[path] if path in gradients else record.q.new_empty(0) for path in paths]

    @backward.register_fake
    def _(results: Sequence[Tensor], tensors: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        *_, words, wanted = rest
        empties = []
        for path, x, want in zip(paths_of(words), tensors, wanted, strict=True):
            empty = operator.empty_gradient(path, x, want)
            empties.append(x.new_empty(0, dtype=tensors[0].dtype) if empty is None else empty)
        return empties

    return backward


def _keep(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    tensors, *ctx.rest = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiated(
    ctx: Any,
    backward: Callable[..., list[Tensor]],
    gradients: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients, one a tensor; None where none is wanted."""
    output, lse, *tensors = ctx.saved_tensors  # read once: checkpointing computes them again
    computed = backward(_results(gradients, output, lse), tensors, *ctx.rest, list(wanted))
    return [x if want else None for x, want in zip(computed, wanted, strict=True)]


def _results(gradients: Sequence[Tensor | None], output: Tensor, lse: Tensor) -> list[Tensor]:
    """The results that ``Operator.gradients`` takes, from the gradients of output and LSE."""
    gradient, of_lse = gradients
    gradient = torch.zeros_like(output) if gradient is None else gradient
    return [gradient, output, lse] if of_lse is None else [gradient, output, lse, of_lse]


class _Direct(torch.autograd.Function):
    """An operator called without PyTorch's dispatcher, as an autograd function."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        record: KernelProblem,
        given: tuple[Tensor, Tensor] | None,
        numbers: list[int],
        reals: list[float],
        words: str,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE of ``record``; zeros where they are given, over more keys than its own.

        The last arguments are its flat form.
        """
        output = operator.output(record) if given is None else given
        _keep(ctx, (tensors, numbers, reals, words), output)
        ctx.operator, ctx.global_lse = operator, given is not None
        if given is None:
            return output
        out, lse = output
        return out.new_zeros(()).expand(out.shape), lse.new_zeros(()).expand(lse.shape)

    @staticmethod
    @kernel_gradients
    def backward(ctx: Any, gradient: Tensor | None, of_lse: Tensor | None) -> Any:
        output, lse, *tensors = ctx.saved_tensors
        operator, words = ctx.operator, ctx.rest[2]
        needed = list(zip(paths_of(words), ctx.needs_input_grad[6:], strict=True))
        wanted = {path for path, want in needed if want}
        results = [x.resolve_neg() for x in _results((gradient, of_lse), output, lse)]
        record = _restored(tensors, *ctx.rest)
        gradients = operator.gradients(record, results, wanted, ctx.global_lse)
        unwanted = (None for _ in range(6))
        return *unwanted, *(gradients[path] if want else None for path, want in needed)
