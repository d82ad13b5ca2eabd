"""Probe of the absolute position that convolutions encode through their padding.

A linear readout predicts the position of each cell from the features of frozen random convolutions,
as Islam et al. 2020 do for VGG and ResNet. On noise inputs, all position comes from the padding.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.stats import ConstantInputWarning, spearmanr
from sklearn.linear_model import Ridge
from torch import Tensor, nn

from posenc.arguments import Count, Width, checked
from posenc.errors import ArgumentError

Padding = Literal["zeros", "circular", "reflect", "none"]

Numbers = NDArray[np.floating]

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
        added = 0 if padding == "none" else kernel // 2
        mode: Literal["zeros", "circular", "reflect"] = "zeros" if padding == "none" else padding
        self.convolutions = nn.ModuleList(
            nn.Conv2d(width if index else channels, width, kernel, padding=added, padding_mode=mode)
            for index in range(layers)
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
        least = 2 * self.margin if self.padding == "none" else self.kernel // 2
        if min(images.shape[2:]) <= least:
            raise ArgumentError(
                "images",
                expected=f"sides of more than {least} cells with padding {self.padding!r}",
                got=list(images.shape[2:]),
                remedy="Use larger images, or fewer layers.",
            )
        for convolution in self.convolutions:
            images = torch.relu(convolution(images))
        return images


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
    maps = position_maps(height, width).flatten(1).double()
    rows = x.movedim(1, -1).flatten(0, 2).cpu().double()
    penalty = ridge * len(rows) * float(rows.var(0, correction=0).mean())
    readout = Ridge(alpha=max(penalty, torch.finfo(torch.float64).tiny))
    readout.fit(rows.numpy(), maps.T.repeat(len(x), 1).numpy())
    cells = held_out.movedim(1, -1).flatten(0, 2).cpu().double()
    # in float32, in which rounding errors do not tell equal cells apart
    read = readout.predict(cells.numpy()).astype(np.float32)
    predictions = read.reshape(len(held_out), -1, len(TARGETS))
    return [
        Recovered(
            target=name,
            spearman=_spearman(predictions[..., index], truth),
            error=float(np.abs(predictions[..., index] - truth).mean()),
        )
        for index, (name, truth) in enumerate(zip(TARGETS, maps.numpy(), strict=True))
    ]


def position_maps(height: int, width: int) -> Float[Tensor, "targets Y X"]:
    """Column, row and a central Gaussian, each from 0 to 1."""
    row = torch.linspace(0, 1, height).unsqueeze(1).expand(height, width)
    column = torch.linspace(0, 1, width).expand(height, width)
    bump = torch.exp(-8 * ((row - 0.5).square() + (column - 0.5).square()))
    low, high = bump.min(), bump.max()
    return torch.stack([column, row, (bump - low) / (high - low)])


def _spearman(predictions: Numbers, truth: Numbers) -> float:
    """Mean rank correlation of images ``[M, cells]`` with a map; 0 where a side is constant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        found = [spearmanr(image, truth).statistic for image in predictions]
    return float(np.nan_to_num(found).mean())
