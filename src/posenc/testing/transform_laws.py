"""Laws of second derivatives, ``torch.func``, compilation, export, meta and fake tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from posenc.errors import ArgumentError, BackendRefusal
from posenc.layout import Layout
from posenc.testing.subject import (
    DIM,
    LENGTH,
    LawBroken,
    Layer,
    Subject,
    agree,
    fold,
    inputs,
    law,
    learned,
    tokens_of,
)

ROWS, SHORT = 2, 6


@law
def second_derivatives_are_right(subject: Subject) -> None:
    """Second derivatives are those of the definition by every backend, which are numerical ones."""
    layer, x = subject.layer(), inputs(1, SHORT).requires_grad_()
    layout, tokens = subject.place(Layout.sequence(SHORT)), tokens_of(1, SHORT)
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
    layer, x, tokens = subject.layer(), inputs(ROWS, SHORT), tokens_of(ROWS, SHORT)
    masks = torch.ones(ROWS, SHORT)
    masks[0, SHORT - 2 :] = 0
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    sequence = subject.place(Layout.sequence(SHORT))

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


SIZES = ((2, LENGTH), (3, 21), (1, 2))
"""Batch sizes and lengths of comparisons; programs are traced with the first."""

LONGEST = 150
"""Maximum length of exported programs, which has more logits than the definition is chosen for."""


class Model(nn.Module):
    """A subject's layer with positions from 0."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.layer: Layer = subject.layer(dtype=torch.float32)
        self.axes = subject.axes

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        layout = fold(Layout.sequence(x.shape[1], device=x.device), self.axes)
        output: Tensor = self.layer(x, layout, tokens=tokens)
        return output


def model_inputs(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs of a ``Model``."""
    return inputs(rows, length).float(), tokens_of(rows, length)


@law
def compiles_once(subject: Subject) -> None:
    """``torch.compile(fullgraph=True)`` gives the same, without recompilation for each length."""
    from torch._dynamo.testing import CompileCounter  # seconds to load, and no other law needs it

    model, counter = Model(subject), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for length in (LENGTH, 9, 21):
        arguments = model_inputs(2, length)
        agree(f"length {length}", compiled(*arguments), model(*arguments))
    if counter.frame_count != 1:
        raise LawBroken(f"{counter.frame_count} compilations for three lengths")


@law
def exports(subject: Subject) -> None:
    """``torch.export`` with dynamic batch and length gives a program with the same results."""
    model = Model(subject)
    with torch.no_grad():
        program = exported(model).module()
        for rows, length in SIZES:
            arguments = model_inputs(rows, length)
            agree(f"a batch of {rows} × {length}", program(*arguments), model(*arguments))


def exported(model: Model) -> torch.export.ExportedProgram:
    """The program of a model for batches and lengths of any size, up to ``LONGEST``."""
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=LONGEST)}
    shapes = {"x": sizes, "tokens": sizes}
    return torch.export.export(model, model_inputs(*SIZES[0]), dynamic_shapes=shapes)


@law
def runs_without_values(subject: Subject) -> None:
    """Meta and fake tensors give the right shapes, without reading values."""

    def check(kind: str, device: str, model: Model) -> None:
        for layout in (
            Layout.sequence(LENGTH, device=device),
            Layout.packed([8, LENGTH - 8], device=device),
            Layout.packed([8, LONGEST - 8], device=device),
            Layout.padded([LENGTH, 8], device=device),
        ):
            x = torch.zeros(2, layout.length, DIM, device=device)
            tokens = torch.zeros(2, layout.length, dtype=torch.int64, device=device)
            output = model.layer(x, subject.place(layout), tokens=tokens)
            if output.shape != x.shape:
                raise LawBroken(f"{kind} tensors give {list(output.shape)}")

    try:
        model = Model(subject)
        with FakeTensorMode(allow_non_fake_inputs=True):
            check("fake", "cpu", model)
        check("meta", "meta", model.to("meta"))
    except (RuntimeError, NotImplementedError) as error:
        raise LawBroken(f"{error}") from error
