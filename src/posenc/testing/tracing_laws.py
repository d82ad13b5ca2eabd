"""Laws of compilation, export, ONNX, and meta and fake tensors."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

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
    named,
    tokens_of,
)

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


def _arguments(rows: int, length: int) -> tuple[Tensor, Tensor]:
    return inputs(rows, length).float(), tokens_of(rows, length)


@law
def compiles_once(subject: Subject) -> None:
    """``torch.compile(fullgraph=True)`` gives the same, without recompilation for each length."""
    from torch._dynamo.testing import CompileCounter  # seconds to load, and no other law needs it

    model, counter = Model(subject), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for length in (LENGTH, 9, 21):
        arguments = _arguments(2, length)
        agree(f"length {length}", compiled(*arguments), model(*arguments))
    if counter.frame_count != 1:
        raise LawBroken(f"{counter.frame_count} compilations for three lengths")


@law
def exports(subject: Subject) -> None:
    """``torch.export`` with dynamic batch and length gives a program with the same results."""
    model = Model(subject)
    with torch.no_grad():
        program = _export(model).module()
        for rows, length in SIZES:
            arguments = _arguments(rows, length)
            agree(f"a batch of {rows} × {length}", program(*arguments), model(*arguments))


def _export(model: Model) -> torch.export.ExportedProgram:
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=LONGEST)}
    shapes = {"x": sizes, "tokens": sizes}
    return torch.export.export(model, _arguments(*SIZES[0]), dynamic_shapes=shapes)


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


@named
def exports_to_onnx(subject: Subject) -> None:
    """The exported program gives the same in ONNX Runtime, to 1e-4.

    Requires onnx, onnxscript and onnxruntime. Not in ``LAWS``, as it takes seconds.

    Raises:
        torch.onnx.ConversionError: if the program has an operator that ONNX lacks.
    """
    import onnxruntime

    model = Model(subject)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        written = torch.onnx.export(_export(model), dynamo=True, optimize=False, verbose=False)
        if written is None:
            raise LawBroken("no program was written")
        written.save(path)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [argument.name for argument in session.get_inputs()]
        for rows, length in SIZES:
            arguments = _arguments(rows, length)
            arrays = {name: x.numpy() for name, x in zip(names, arguments, strict=False)}
            got = torch.from_numpy(session.run(None, arrays)[0])
            agree(f"{rows} × {length}", got, model(*arguments), tolerance=1e-4)
