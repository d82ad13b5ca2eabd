"""Laws of second derivatives, and of gradients under ``torch.func``."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.errors import ArgumentError, BackendRefusal
from posenc.layout import Layout
from posenc.testing.subject import LawBroken, Subject, agree, inputs, law, learned, tokens_of

ROWS, LENGTH = 2, 6


@law
def second_derivatives_are_right(subject: Subject) -> None:
    """Second derivatives are those of the definition by every backend, which are numerical ones."""
    layer, x = subject.layer(), inputs(1, LENGTH).requires_grad_()
    layout, tokens = subject.place(Layout.sequence(LENGTH)), tokens_of(1, LENGTH)
    inputs_of = [x, *learned(layer)]

    def penalty(backend: str) -> list[Tensor]:
        """Gradients of the squares of gradients."""
        layer.attention.backend = backend
        output: Tensor = layer(x, layout, tokens=tokens)
        first = torch.autograd.grad(output.sin().sum(), inputs_of, create_graph=True)
        squares = sum((gradient.square().sum() for gradient in first), x.new_zeros(()))
        return list(torch.autograd.grad(squares, inputs_of, materialize_grads=True))

    expected = penalty("reference")
    for backend in ("auto", "native", "sdpa", "blockwise"):
        try:
            gradients = penalty(backend)
        except BackendRefusal:
            continue
        for got, exact in zip(gradients, expected, strict=True):
            agree(backend, got, exact, tolerance=1e-11)
    layer.attention.backend = "auto"
    try:
        torch.autograd.gradgradcheck(
            lambda x: layer(x, layout, tokens=tokens), (x,), fast_mode=True, atol=1e-4, rtol=1e-3
        )
    except RuntimeError as error:
        raise LawBroken(f"{error}") from error


@law
def gradients_of_rows_are_separate(subject: Subject) -> None:
    """``vmap(grad)`` gives each batch row's gradients of all parameters, padded rows' too."""
    layer, x, tokens = subject.layer(), inputs(ROWS, LENGTH), tokens_of(ROWS, LENGTH)
    masks = torch.ones(ROWS, LENGTH)
    masks[0, LENGTH - 2 :] = 0
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    sequence = subject.place(Layout.sequence(LENGTH))

    def loss(
        parameters: dict[str, Tensor], x: Tensor, tokens: Tensor, mask: Tensor | None
    ) -> Tensor:
        layout = sequence
        if mask is not None:
            layout = subject.place(Layout.from_attention_mask(mask.unsqueeze(0)))
        options = {"tokens": tokens.unsqueeze(0)}
        output: Tensor = torch.func.functional_call(
            layer, parameters, (x.unsqueeze(0), layout), options
        )
        return output.sin().sum()

    gradient = torch.func.grad(loss)
    for label, valid, axis in (("sequences", None, None), ("padded rows", masks, 0)):
        try:
            batched = torch.func.vmap(gradient, in_dims=(None, 0, 0, axis))(
                parameters, x, tokens, valid
            )
        except ArgumentError:  # positions that depend on the row, where a loop depends on them
            if valid is None:
                raise
            continue
        for row in range(ROWS):
            mask = None if valid is None else valid[row]
            for name, exact in gradient(parameters, x[row], tokens[row], mask).items():
                agree(f"{label}, {name}", batched[name][row], exact, tolerance=1e-5)
