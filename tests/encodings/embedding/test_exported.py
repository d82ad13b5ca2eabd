"""Encodings whose trajectories are one operator inside graphs, exported and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from posenc import Layout, create
from posenc.encoding import Encoding
from posenc.encodings.embedding.floater import Floater
from posenc.encodings.embedding.recursive import Recursive
from tests.encodings.embedding.test_recursive import KINDS
from tests.encodings.embedding.test_recursive import make as recursive
from tests.encodings.floaters import make as floater
from tests.support.exhaustive import kept_in_suite


class Embedded(nn.Module):
    """The smallest model there is."""

    def __init__(self, encoding: Encoding) -> None:
        super().__init__()
        self.encoding = encoding

    def forward(self, x: Tensor) -> Tensor:
        return self.encoding.embed(x, Layout.sequence(x.shape[1]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("complex_order", {}),
        ("floater", {}),
        ("floater", {"method": "dopri5"}),
        ("recursive", {}),
        ("recursive", {"step": "gru"}),
    ],
)
def test_exports_with_any_length(name: str, options: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = Embedded(create(name, dim=6, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    lengths = torch.export.Dim("lengths", min=2, max=500)
    exported = torch.export.export(
        model, (torch.zeros(2, 9, 6),), dynamic_shapes=({1: lengths},)
    ).module()
    x = torch.randn(2, 33, 6)
    torch.testing.assert_close(exported(x), model(x))


@pytest.mark.parametrize("backend", kept_in_suite(["eager", "aot_eager"], ["aot_eager"]))
@pytest.mark.parametrize(
    "encoding",
    [
        *(floater(**x) for x in ({}, {"method": "dopri5"}, {"gradient": "adjoint"})),
        *(recursive(kind, noise=0.05) for kind in KINDS),
    ],
)
def test_compiled_equals_eager_gradients_too(backend: str, encoding: Floater | Recursive) -> None:
    weights = list(encoding.parameters())

    def run(x: Tensor, positions: Tensor) -> Tensor:
        output: Tensor = encoding(x, Layout.at(positions))
        return output

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=True)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    times = torch.tensor([[0.0, 2.5, 9.0], [1.0, 4.0, 4.75]], dtype=torch.float64)
    times.requires_grad_()
    pairs = []
    for function in (compiled, run):
        output = function(x, times)
        pairs.append((output, *torch.autograd.grad(output.sin().sum(), [times, *weights])))
    for got, want in zip(*pairs, strict=True):
        torch.testing.assert_close(got, want)
