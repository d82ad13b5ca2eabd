"""Parameters as they are after training, where they all begin at one number."""

from __future__ import annotations

import torch
from torch import nn


def draw_biases(model: nn.Module) -> None:
    """Biases begin at zero, with which what is hidden stays at zero by itself."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
