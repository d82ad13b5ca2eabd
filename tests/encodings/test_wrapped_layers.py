"""Encodings compute with whatever module is put in the place of a linear layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from posenc import Encoding, Layout
from posenc.registry import ENCODINGS
from posenc.testing import Subject
from posenc.testing.subject import Layer, inputs, tokens_of


class Adapted(nn.Module):
    """A linear layer and a product of two matrices beside it; has no attributes of the layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        (rows, columns), like = base.weight.shape, base.weight.detach()
        generator = torch.Generator().manual_seed(5)
        self.base = base
        self.down = nn.Parameter(torch.randn(2, columns, generator=generator).to(like))
        self.up = nn.Parameter(0.3 * torch.randn(rows, 2, generator=generator).to(like))

    def forward(self, x: Tensor) -> Tensor:
        more: Tensor = x @ self.down.to(x).mT @ self.up.to(x).mT
        return more + self.base(x)


def merged(base: nn.Linear) -> nn.Linear:
    adapted, layer = Adapted(base), copy.deepcopy(base)
    with torch.no_grad():
        layer.weight += adapted.up @ adapted.down
    return layer


def layers_of(encoding: Encoding) -> list[str]:
    return [name for name, module in encoding.named_modules() if isinstance(module, nn.Linear)]


def layer_with(subject: Subject, name: str, wrap: Callable[[nn.Linear], nn.Module]) -> Layer:
    """Attention with one of the encoding's linear layers wrapped."""
    layer = subject.layer()
    outer, _, last = name.rpartition(".")
    module = layer.encoding.get_submodule(outer)
    setattr(module, last, wrap(layer.encoding.get_submodule(name)))  # type: ignore[arg-type]
    return layer


def output_of(subject: Subject, layer: Layer) -> Tensor:
    x = inputs(length=12)
    layout = subject.place(Layout.sequence(12))
    result: Tensor = layer(x, layout, tokens=tokens_of(length=12))
    return result


def agree(output: Tensor, expected: Tensor) -> None:
    """But for rounding of networks that compute in float32."""
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


def linear_layers() -> Iterator[tuple[str, str]]:
    for name, entry in ENCODINGS.items():
        for layer in layers_of(Subject.of_entry(name, entry).make()):
            yield name, layer


CASES = list(linear_layers())


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_a_wrapped_layer_computes_as_itself(name: str, layer: str) -> None:
    subject = Subject.of_entry(name, ENCODINGS[name])
    pairs = (nn.Sequential, lambda base: base), (Adapted, merged)
    for wrap, same in pairs:
        wrapped, other = (layer_with(subject, layer, change) for change in (wrap, same))
        expected = output_of(subject, other)
        with torch.no_grad():
            for backend in ("auto", "auto", "auto", "reference"):
                wrapped.attention.backend = backend
                agree(output_of(subject, wrapped), expected)
        wrapped.attention.backend = "auto"
        changed = output_of(subject, wrapped)
        agree(changed, expected)
        changed.sin().sum().backward()  # type: ignore[no-untyped-call]
        assert all(x.grad is not None for x in wrapped.encoding.parameters())


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_hooks_of_all_modules_see_each_call_of_a_layer(name: str) -> None:
    """Also where results of layers are kept, or layers are read by kernels."""
    subject = Subject.of_entry(name, ENCODINGS[name])
    layer = subject.layer()
    own = {layer.encoding.get_submodule(x) for x in layers_of(layer.encoding)}

    def double(module: nn.Module, given: object, result: Tensor) -> Tensor | None:
        return 2 * result if module in own else None

    with torch.no_grad():
        plain = [output_of(subject, layer) for _ in range(3)]
        handle = nn.modules.module.register_module_forward_hook(double)
        try:
            doubled = [output_of(subject, layer) for _ in range(3)]
            layer.attention.backend = "reference"
            expected = output_of(subject, layer)
        finally:
            handle.remove()
        layer.attention.backend = "auto"
        plain.append(output_of(subject, layer))
    for output in plain:
        torch.testing.assert_close(output, plain[0])
    for output in doubled:
        torch.testing.assert_close(output, expected)
    assert not torch.allclose(expected, plain[0])
