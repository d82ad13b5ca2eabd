"""Encodings whose trajectories are one operator inside graphs survive ``torch.export``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from posenc import Layout, create
from posenc.encoding import Encoding


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
