"""Custom operators for computations whose loops depend on data.

The number of steps of a trajectory depends on its last position. ``torch.compile`` cannot unroll
that, so inside a graph it is one operator, whose backward reruns the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.runtime import has_values, is_transformed


class PositionFunction(Protocol):
    """A function of positions, weights and settings (as text) to vectors at the positions."""

    def __call__(
        self, positions: Float[Tensor, "b L"], weights: Sequence[Tensor], settings: str
    ) -> Float[Tensor, "b L C"]: ...


def opaque(name: str, compute: PositionFunction) -> PositionFunction:
    """``compute`` as one operator ``posenc::name`` inside compiled graphs, called directly outside.

    ``compute`` returns ``[b, L, C]`` in the positions' dtype; C is the length of ``weights[0]``.
    """

    def forward(positions: Tensor, weights: list[Tensor], settings: str) -> Tensor:
        detached = [weight.detach() for weight in weights]
        return compute(positions.detach(), detached, settings).clone()

    def backward(
        gradient: Tensor, positions: Tensor, weights: list[Tensor], settings: str
    ) -> list[Tensor]:
        # PyTorch excludes autograd inside an operator, whatever the gradient mode.
        key = torch._C.DispatchKey.AutogradFunctionality
        with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():
            inputs = [part.detach().requires_grad_() for part in (positions, *weights)]
            outputs = compute(inputs[0], inputs[1:], settings)
            gradients = torch.autograd.grad(
                outputs, inputs, gradient, allow_unused=True, materialize_grads=True
            )
        return [part.clone() for part in gradients]

    def shape(positions: Tensor, weights: list[Tensor], settings: str) -> Tensor:
        return positions.new_empty(*positions.shape, weights[0].shape[0])

    def shapes(
        gradient: Tensor, positions: Tensor, weights: list[Tensor], settings: str
    ) -> list[Tensor]:
        return [torch.empty_like(part) for part in (positions, *weights)]

    operator = torch.library.custom_op(
        f"posenc::{name}",
        forward,
        mutates_args=(),
        schema="(Tensor positions, Tensor[] weights, str settings) -> Tensor",
    )
    operator.register_fake(shape)
    reverse = torch.library.custom_op(
        f"posenc::{name}_backward",
        backward,
        mutates_args=(),
        schema="(Tensor gradient, Tensor positions, Tensor[] weights, str settings) -> Tensor[]",
    )
    reverse.register_fake(shapes)

    def setup_context(ctx: Any, inputs: tuple[Tensor, list[Tensor], str], output: Tensor) -> None:
        positions, weights, settings = inputs
        ctx.save_for_backward(positions, *weights)
        ctx.settings = settings

    def differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, list[Tensor], None]:
        positions, *weights = ctx.saved_tensors
        first, *rest = reverse(gradient, positions, weights, ctx.settings)
        return first, rest, None

    operator.register_autograd(differentiate, setup_context=setup_context)

    def call(positions: Tensor, weights: Sequence[Tensor], settings: str) -> Tensor:
        if not (has_values(positions) or torch.compiler.is_compiling()) and is_transformed():
            raise ArgumentError(
                "layout",
                expected="the same positions in all rows of torch.func.vmap",
                got="positions of each row",
                remedy="Make the layout outside, of the whole batch, or loop over its rows.",
            )
        if not has_values(positions):
            vectors: Tensor = operator(positions, list(weights), settings)
            return vectors
        return compute(positions, weights, settings)

    return call
