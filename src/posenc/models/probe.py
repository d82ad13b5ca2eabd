"""How much absolute position convolutions give away, and through which padding.

A stack of convolutions with random weights is frozen, and a linear readout of its last features at
each cell is asked where the cell is, as Islam et al. ask VGG and ResNet. Inputs look alike
everywhere (noise), so that whatever it finds was put there by the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.errors import ArgumentError, UnknownNameError

__all__ = ["PADDINGS", "ConvFeatures", "Padding", "Recovered", "probe_positions"]

Padding = Literal["zeros", "circular", "reflect", "none"]

PADDINGS: tuple[Padding, ...] = get_args(Padding)

TARGETS = ("horizontal", "vertical", "gaussian")


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """How well a readout finds a map of positions on images it has not seen.

    Args:
        target: ``"horizontal"`` (the column), ``"vertical"`` (the row) or ``"gaussian"`` (a bump
            in the middle).
        spearman: rank correlation of the readout with the map, the mean over images.
        error: mean absolute error; the map goes from 0 to 1.
    """

    target: str
    spearman: float
    error: float


class ConvFeatures(nn.Module):
    """Convolutions with random weights and ReLU, of one padding.

    Args:
        channels: of the image.
        width: features of each layer.
        layers: convolutions.
        kernel: side in cells, odd.
        padding: what stands beyond the border: ``"zeros"``, the other side (``"circular"``), the
            mirror image (``"reflect"``) or nothing (``"none"``: each layer is ``kernel - 1`` cells
            smaller).

    Raises:
        ArgumentError: when a number is out of its domain.
        UnknownNameError: for another padding.
    """

    def __init__(
        self,
        *,
        channels: int = 3,
        width: int = 32,
        layers: int = 5,
        kernel: int = 3,
        padding: Padding = "zeros",
    ) -> None:
        super().__init__()
        if padding not in PADDINGS:
            raise UnknownNameError.of("padding", padding, PADDINGS)
        for name, value in (("channels", channels), ("width", width), ("layers", layers)):
            if value < 1:
                raise ArgumentError(name, expected="1 or more", got=value, remedy="Change it.")
        if kernel < 1 or kernel % 2 == 0:
            raise ArgumentError("kernel", expected="odd", got=kernel, remedy="3 is common.")
        self.kernel, self.padding = kernel, padding
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels if index == 0 else width, width, kernel) for index in range(layers)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights that keep the size of what passes (He et al. 2015), and small biases."""
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv2d)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            assert convolution.bias is not None
            nn.init.normal_(convolution.bias, std=0.1)

    @property
    def margin(self) -> int:
        """Cells that are lost at each border without padding."""
        return len(self.convolutions) * (self.kernel // 2)

    def forward(self, images: Float[Tensor, "B P Y X"]) -> Float[Tensor, "B C y x"]:
        """Features of each cell, fewer cells without padding.

        Raises:
            ArgumentError: on images too small for the padding, or for none.
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
    """Fit a readout of every target map on ``train``, and judge it on ``test``.

    The readout is linear in the features of a cell, by ridge regression: it has no padding of its
    own, and no iterations. Spearman's ρ is that of the paper; a readout that finds nothing has 0.

    Args:
        features: maps images to features ``[N, C, y, x]``, each cell on its own image's grid.
        train, test: images of one size; what looks different in different places (natural images)
            tells where it is by itself.
        ridge: penalty, as a share of the mean square of the features.
        margin: cells at each border that are left out of fit and judgement, so that paddings are
            compared on equal cells (``ConvFeatures.margin`` leaves those that none loses).

    Raises:
        ArgumentError: when no cell is left.
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
    wanted = maps.double().mean(1)
    targets = (maps.double() - wanted.unsqueeze(1)).T.repeat(count, 1)
    power = centred.square().mean().clamp(min=torch.finfo(torch.float64).tiny)
    gram = centred.mT @ centred / len(rows)
    gram += ridge * power * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    weights = torch.linalg.solve(gram, centred.mT @ targets / len(rows))
    answers = (held_out.movedim(1, -1).flatten(1, 2).double() - mean) @ weights + wanted
    answers = answers.mT  # images, targets, cells
    return [
        Recovered(
            target=name,
            spearman=float(spearman(answers[:, index], maps[index]).mean()),
            error=float((answers[:, index] - maps[index]).abs().mean()),
        )
        for index, name in enumerate(TARGETS)
    ]


def position_maps(height: int, width: int, *, like: Tensor) -> Float[Tensor, "targets Y X"]:
    """The column, the row, and a bump in the middle, each from 0 to 1."""
    row = torch.linspace(0, 1, height, device=like.device).unsqueeze(1).expand(height, width)
    column = torch.linspace(0, 1, width, device=like.device).expand(height, width)
    bump = torch.exp(-8 * ((row - 0.5).square() + (column - 0.5).square()))
    low, high = bump.min(), bump.max()
    return torch.stack([column, row, (bump - low) / (high - low)])


def spearman(
    answers: Float[Tensor, "M cells"], target: Float[Tensor, " cells"]
) -> Float[Tensor, " M"]:
    """Correlation of ranks, equal values sharing their mean rank; 0 where nothing varies."""
    ranks = [_ranks(part) for part in (answers, target.expand_as(answers))]
    first, second = (part - part.mean(-1, keepdim=True) for part in ranks)
    size = (first.square().sum(-1) * second.square().sum(-1)).sqrt()
    product = (first * second).sum(-1)
    return torch.where(size > 0, product / size.clamp(min=1e-30), 0.0)


def _ranks(x: Float[Tensor, "M cells"]) -> Float[Tensor, "M cells"]:
    x = x.contiguous()
    ordered = x.sort(-1).values
    below, upto = (torch.searchsorted(ordered, x, right=right) for right in (False, True))
    return (below + upto).double() / 2
