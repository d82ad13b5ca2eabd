"""Gradients of gradients, where kernels compute the first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from posenc.errors import DerivativeError
from posenc.runtime import is_transformed

Backward = Callable[..., Any]
"""The backward pass of an autograd function, or of an operator."""


Definition = Callable[..., Tensor | tuple[Tensor, ...]]
"""A computation by differentiable operations, of the tensors that it may be differentiated by."""


def records(output: Tensor) -> bool:
    """True if ``with_definition`` has an effect."""
    if torch.compiler.is_compiling() or is_transformed():
        return False
    return output.requires_grad and torch.is_grad_enabled()


def with_definition(
    outputs: tuple[Tensor, ...], definition: Definition, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """``outputs``, whose gradients are the definition's where those are to have gradients.

    The definition is computed in backward passes with ``create_graph=True`` alone.

    Args:
        outputs: of a kernel with first derivatives.
        definition: computes the same from ``tensors``.
        tensors: all that the outputs may have gradients for.
    """
    if not records(outputs[0]):
        return outputs
    count = len(outputs)
    twice: tuple[Tensor, ...] = _Twice.apply(definition, count, *outputs, *tensors)
    return twice


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, definition: Definition, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.definition, ctx.count = definition, count
        ctx.save_for_backward(
            *tensors[count:]
        )  # and nowhere else, so that they are freed after use
        ctx.set_materialize_grads(False)
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        needed = ctx.needs_input_grad[2 + ctx.count :]
        if not torch.is_grad_enabled():
            return None, None, *gradients, *(None for _ in needed)
        # New views, through none of which another one is reached.
        views = [x.view_as(x) for x in ctx.saved_tensors]
        made = ctx.definition(*views)
        made = made if isinstance(made, tuple) else (made,)
        pairs = [(x, dx) for x, dx in zip(made, gradients, strict=True) if dx is not None]
        outputs, of_outputs = zip(*pairs, strict=True)
        wanted = [x for x, need in zip(views, needed, strict=True) if need]
        _require_no_others(outputs, wanted)
        computed = iter(
            torch.autograd.grad(outputs, wanted, of_outputs, create_graph=True, allow_unused=True)
        )
        unwanted = (None for _ in range(2 + ctx.count))
        return *unwanted, *(next(computed) if need else None for need in needed)


def _require_no_others(outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Refuse a definition with gradients by tensors that are not among those given."""
    visited, waiting = {x.grad_fn for x in tensors}, [x.grad_fn for x in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            raise DerivativeError(
                "create_graph",
                expected="parameters of the encoding's parts",
                got=f"another tensor of shape {list(node.variable.shape)} that they read",
                remedy='Use attend(…, backend="reference") for second derivatives.',
            )
        waiting += [into for into, _ in node.next_functions]


def differentiable_once(of: str, remedy: str) -> Callable[[Backward], Backward]:
    """Decorator of a backward pass, the derivatives of whose results raise an error.

    PyTorch's ``once_differentiable`` raises one only where nothing else has derivatives: otherwise
    those of its results are left out in silence. ``ctx.set_materialize_grads(False)`` saves
    the pass where its output has no gradient.

    Args:
        of: of what there are first derivatives only.
        remedy: how to get second ones.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *gradients: Tensor | None, **options: Any) -> Any:
            if all(gradient is None for gradient in gradients):
                return tuple(
                    [None for _ in needed] if isinstance(needed, list) else None
                    for needed in ctx.needs_input_grad
                )
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients, **options)
            saved = _Kept(ctx)
            with torch.no_grad():
                results = backward(saved, *gradients, **options)
            sources = [x for x in (*gradients, *saved.saved_tensors) if x is not None]
            return _mapped(lambda x: _Once.apply(of, remedy, x, *sources), results)

        return run

    return decorate


class _Kept:
    """A context whose tensors are read once: under checkpointing, reading computes them again."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def _mapped(function: Callable[[Tensor], Tensor], gradients: Any) -> Any:
    """Gradients, single or in tuples and lists, with the function applied to each."""
    if isinstance(gradients, tuple | list):
        return type(gradients)(_mapped(function, x) for x in gradients)
    return function(gradients) if isinstance(gradients, Tensor) else gradients


class _Once(torch.autograd.Function):
    """A gradient that depends on its sources, by which it has no derivatives."""

    @staticmethod
    def forward(ctx: Any, of: str, remedy: str, x: Tensor, *sources: Tensor) -> Tensor:
        ctx.words = of, remedy
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        of, remedy = ctx.words
        raise DerivativeError(
            "create_graph", expected=f"first derivatives of {of}", got="second ones", remedy=remedy
        )
