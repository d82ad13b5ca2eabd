"""Patch embedding of images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from posenc.arguments import Length, check
from posenc.encoding.tensors import Features
from posenc.errors import ArgumentError
from posenc.layout.checks import FLOATING, require_tensor


class Patches(nn.Module):
    """Patch embedding: a strided convolution.

    Args:
        channels: of the image.
        dim: width C of a token.
        patch: side of a patch in pixels.
        overlap: pixels by which the kernel extends beyond the patch on each side (PVT v2), with
            zero padding at the border of the image.
    """

    def __init__(self, *, channels: int, dim: int, patch: int, overlap: int = 0) -> None:
        super().__init__()
        self.patch = patch
        self.projection = nn.Conv2d(
            channels, dim, patch + 2 * overlap, stride=patch, padding=overlap
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights, normal with standard deviation fan_in^-1/2."""
        nn.init.normal_(self.projection.weight, std=self.projection.weight[0].numel() ** -0.5)
        if self.projection.bias is not None:
            nn.init.zeros_(self.projection.bias)

    def forward(
        self, images: Float[Tensor, "B P Y X"], valid: Bool[Tensor, "b Y X"] | None = None
    ) -> tuple[Features, tuple[int, int], Bool[Tensor, "b h w"] | None]:
        """Tokens of the patches in raster order, (rows, columns), and the patches' mask.

        Args:
            images: ``[B, P, Y, X]``, P channels.
            valid: ``[B|1, Y, X]``, False for padding, which is set to 0. A patch is
                valid if one of its pixels is.

        Raises:
            ArgumentError: for images of another rank or number of channels, sides that are not
                multiples of ``patch``, or a mask of another shape.
        """
        self._check(images)
        if valid is None:
            cells = None
        else:
            shape, remedy = (
                ("B|1", *images.shape[2:]),
                "Give one entry per pixel, as pad_images returns.",
            )
            require_tensor("valid", valid, shape, (torch.bool,), remedy=remedy)
            images = images.masked_fill(~valid.unsqueeze(1), 0)
            sides = [side // self.patch for side in valid.shape[1:]]
            cells = valid.reshape(-1, sides[0], self.patch, sides[1], self.patch).any(4).any(2)
        projected: Tensor = self.projection(images)
        return projected.flatten(2).mT, (projected.shape[2], projected.shape[3]), cells

    def _check(self, images: Tensor) -> None:
        shape = ("B", self.projection.in_channels, "height", "width")
        remedy = "Use torch.stack for images of one size, pad_images for several."
        require_tensor("images", images, shape, FLOATING, remedy=remedy)
        if any(side < 1 or side % self.patch for side in images.shape[2:]):
            raise ArgumentError(
                "images",
                expected=f"sides that are multiples of the patch ({self.patch})",
                got=f"{images.shape[2]} by {images.shape[3]} pixels",
                remedy="Use pad_images(images, multiple=patch), or crop them.",
            )


def pad_images(
    images: Sequence[Float[Tensor, "P y x"]], *, multiple: int = 1
) -> tuple[Float[Tensor, "B P Y X"], Bool[Tensor, "B Y X"]]:
    """Images of different sizes as one batch, padded by zeros below and on the right.

    Args:
        images: each ``[P, y, x]``.
        multiple: the sides of the batch are multiples of this.

    Returns:
        ``[B, P, Y, X]``, and ``[B, Y, X]``, False for padding.

    Raises:
        ArgumentError: for no images, or images of different ranks, channels or dtypes.
    """
    kinds = {(image.dim(), image.shape[0], image.dtype, image.device) for image in images}
    if len(kinds) != 1 or images[0].dim() != 3:
        raise ArgumentError(
            "images",
            expected="one or more [channels, height, width] with the same channels and dtype",
            got=", ".join(f"{image.dtype} {list(image.shape)}" for image in images) or "none",
            remedy="Convert them to the same number of channels and dtype.",
        )
    check("multiple", Length, multiple)
    sides = [
        -(-max(image.shape[axis] for image in images) // multiple) * multiple for axis in (1, 2)
    ]
    batch = images[0].new_zeros(len(images), images[0].shape[0], *sides)
    valid = torch.zeros(len(images), *sides, dtype=torch.bool, device=batch.device)
    for row, image in enumerate(images):
        batch[row, :, : image.shape[1], : image.shape[2]] = image
        valid[row, : image.shape[1], : image.shape[2]] = True
    return batch, valid
