"""Probe of the absolute position that convolutions encode through their padding.

A linear readout predicts the position of each cell from the features of frozen random convolutions,
as Islam et al. 2020 do for VGG and ResNet. On noise inputs, all position comes from the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.arguments import Count, Width, checked
from posenc.errors import ArgumentError

Padding = Literal["zeros", "circular", "reflect", "none"]

TARGETS = ("horizontal", "vertical", "gaussian")


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """Accuracy of a position readout on test images.

    Args:
        target: ``"horizontal"`` (the column), ``"vertical"`` (the row) or ``"gaussian"`` (a bump
            in the middle).
        spearman: rank correlation of readout and target, averaged over images.
        error: mean absolute error; targets are from 0 to 1.
    """

    target: str
    spearman: float
    error: float


class ConvFeatures(nn.Module):
    """Convolutions with random weights, ReLU and one kind of padding.

    Args:
        channels: of the image.
        width: features of each layer.
        layers: convolutions.
        kernel: side in cells, odd.
        padding: ``"zeros"``, ``"circular"``, ``"reflect"`` or ``"none"`` (each layer is
            ``kernel - 1`` cells smaller).

    Raises:
        ArgumentError: if a number is out of range.
        UnknownNameError: for another padding.
    """

    @checked
    def __init__(
        self,
        *,
        channels: Width = 3,
        width: Width = 32,
        layers: Count = 5,
        kernel: Count = 3,
        padding: Padding = "zeros",
    ) -> None:
        super().__init__()
        if kernel % 2 == 0:
            raise ArgumentError("kernel", expected="odd", got=kernel, remedy="3 is common.")
        self.kernel, self.padding = kernel, padding
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels if index == 0 else width, width, kernel) for index in range(layers)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights as in He et al. 2015, and small biases."""
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv2d)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            assert convolution.bias is not None
            nn.init.normal_(convolution.bias, std=0.1)

    @property
    def margin(self) -> int:
        """Cells lost at each border without padding."""
        return len(self.convolutions) * (self.kernel // 2)

    def forward(self, images: Float[Tensor, "B P Y X"]) -> Float[Tensor, "B C y x"]:
        """Features of each cell; without padding, of fewer cells.

        Raises:
            ArgumentError: for images too small.
        """
        half = self.kernel // 2
        least = 2 * self.margin if self.padding == "none" else half
        if min(images.shape[2:]) <= least:
            raise ArgumentError(
                "images",
                expected=f"sides of more than {least} cells with padding {self.padding!r}",
                got=list(images.shape[2:]),
                remedy="Use larger images, or fewer layers.",
            )
        x = images
        for convolution in self.convolutions:
            if self.padding == "zeros":
                x = F.pad(x, (half,) * 4)
            elif self.padding != "none":
                x = F.pad(x, (half,) * 4, mode=self.padding)
            x = torch.relu(convolution(x))
        return x


@torch.no_grad()
def probe_positions(
    features: nn.Module,
    train: Float[Tensor, "N P Y X"],
    test: Float[Tensor, "M P Y X"],
    *,
    ridge: float = 1e-3,
    margin: int = 0,
) -> Sequence[Recovered]:
    """Fit a readout of every target map on ``train``, and evaluate it on ``test``.

    The readout is linear in the features of a cell, fitted by ridge regression. Spearman's ρ is the
    paper's metric; 0 means no position information.

    Args:
        features: maps images to features ``[N, C, y, x]``, one per cell of the image.
        train, test: images of one size. Natural images carry position information themselves.
        ridge: penalty, relative to the mean square of the features.
        margin: cells excluded at each border, to compare paddings on the same cells
            (``ConvFeatures.margin``).

    Raises:
        ArgumentError: if no cell is left.
    """
    x, held_out = features(train), features(test)
    if margin:
        x, held_out = (part[..., margin:-margin, margin:-margin] for part in (x, held_out))
    height, width = x.shape[2:]
    if min(height, width) < 2:
        raise ArgumentError(
            "margin",
            expected="less than half of the features' sides",
            got=margin,
            remedy="Use larger images.",
        )
    maps = position_maps(height, width, like=x).flatten(1)
    rows = x.movedim(1, -1).flatten(0, 2).double()
    mean, count = rows.mean(0), len(x)
    centred = rows - mean
    target_mean = maps.double().mean(1)
    targets = (maps.double() - target_mean.unsqueeze(1)).T.repeat(count, 1)
    power = centred.square().mean().clamp(min=torch.finfo(torch.float64).tiny)
    gram = centred.mT @ centred / len(rows)
    gram += ridge * power * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    weights = torch.linalg.solve(gram, centred.mT @ targets / len(rows))
    predictions = (held_out.movedim(1, -1).flatten(1, 2).double() - mean) @ weights + target_mean
    predictions = predictions.mT  # images, targets, cells
    return [
        Recovered(
            target=name,
            spearman=float(spearman(predictions[:, index], maps[index]).mean()),
            error=float((predictions[:, index] - maps[index]).abs().mean()),
        )
        for index, name in enumerate(TARGETS)
    ]


def position_maps(height: int, width: int, *, like: Tensor) -> Float[Tensor, "targets Y X"]:
    """Column, row and a central Gaussian, each from 0 to 1."""
    row = torch.linspace(0, 1, height, device=like.device).unsqueeze(1).expand(height, width)
    column = torch.linspace(0, 1, width, device=like.device).expand(height, width)
    bump = torch.exp(-8 * ((row - 0.5).square() + (column - 0.5).square()))
    low, high = bump.min(), bump.max()
    return torch.stack([column, row, (bump - low) / (high - low)])


def spearman(
    predictions: Float[Tensor, "M cells"], target: Float[Tensor, " cells"]
) -> Float[Tensor, " M"]:
    """Rank correlation, with mean ranks for ties; 0 if a side is constant."""
    ranks = [_ranks(part) for part in (predictions, target.expand_as(predictions))]
    first, second = (part - part.mean(-1, keepdim=True) for part in ranks)
    size = (first.square().sum(-1) * second.square().sum(-1)).sqrt()
    product = (first * second).sum(-1)
    return torch.where(size > 0, product / size.clamp(min=1e-30), 0.0)


def _ranks(x: Float[Tensor, "M cells"]) -> Float[Tensor, "M cells"]:
    x = x.contiguous()
    ordered = x.sort(-1).values
    below, upto = (torch.searchsorted(ordered, x, right=right) for right in (False, True))
    return (below + upto).double() / 2
