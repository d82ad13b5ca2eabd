"""Partition of an image into attention windows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from posenc.encoding.tensors import Features
from posenc.errors import ArgumentError
from posenc.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Windows:
    """A partition of an image into windows, each a row of a batch.

    Shifted windows begin ``shift`` cells from the edge. As in Swin, windows cut off at opposite
    edges share a row, with different ``Layout.document``. The last windows are filled up with
    padding. Positions are relative to the window.

    Args:
        extent: (height, width) of the image in cells.
        window: (height, width) of a window in cells.
        shift: rows and columns by which windows are shifted, less than a window.

    Raises:
        ArgumentError: for sides below 1, or a shift out of range.

    Reference: Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted
    Windows".

    >>> from posenc.models.windows import Windows
    >>> Windows(extent=(4, 6), window=(2, 3)).split(torch.zeros(1, 24, 8)).shape
    torch.Size([4, 6, 8])
    """

    extent: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for name in ("extent", "window"):
            if min(getattr(self, name)) < 1:
                raise ArgumentError(
                    name,
                    expected="(height, width) from 1",
                    got=getattr(self, name),
                    remedy="Give sizes in cells.",
                )
        if any(not 0 <= by < side for by, side in zip(self.shift, self.window, strict=True)):
            raise ArgumentError(
                "shift",
                expected=f"0 to less than the window's {self.window}",
                got=self.shift,
                remedy="Use half a window, as in Swin.",
            )

    @classmethod
    def swin(cls, extent: tuple[int, int], window: int, *, shifted: bool) -> Windows:
        """Swin's windows, shifted by half a window along sides longer than a window.

        So does the released code of Swin v2; that of v1 shifts along neither side where one window
        spans one of them.
        """
        sides = (min(window, extent[0]), min(window, extent[1]))
        by = [window // 2 if shifted and side > window else 0 for side in extent]
        return cls(extent=extent, window=sides, shift=(by[0], by[1]))

    @property
    def counts(self) -> tuple[int, int]:
        """Windows along each axis."""
        height, width = (-(-e // w) for e, w in zip(self.extent, self.window, strict=True))
        return height, width

    def split(self, x: Features) -> Float[Tensor, "rows cells C"]:
        """The image's tokens, in raster order, as ``[B · windows, cells of a window, C]``."""
        return self._split(x.unflatten(1, self.extent)).flatten(0, 1)  # type: ignore[no-untyped-call]

    def join(self, rows: Float[Tensor, "rows cells C"]) -> Features:
        """The reverse of ``split``."""
        (down, across), (height, width) = self.counts, self.window
        image = rows.view(-1, down, across, height, width, rows.shape[-1]).transpose(2, 3)
        image = image.reshape(-1, down * height, across * width, rows.shape[-1])
        image = image.roll(self.shift, dims=(1, 2))
        return image[:, : self.extent[0], : self.extent[1]].flatten(1, 2)

    def layout(
        self,
        batch: int,
        valid: Bool[Tensor, "b h w"] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Layout:
        """The layout of the tokens of ``split``.

        Args:
            batch: number of images.
            valid: ``[B|1, height, width]``, False for padding.
            device: of the layout.
        """
        layout = Layout.image(*self.window, device=device)
        count = self.counts[0] * self.counts[1]
        if any(self.shift):
            document = self._split(self._documents(device).view(1, *self.extent, 1))
            layout = replace(layout, document=_repeated(document, batch))
        if valid is None and self.extent == tuple(
            n * side for n, side in zip(self.counts, self.window, strict=True)
        ):
            return layout
        if valid is None:
            valid = torch.ones(1, *self.extent, dtype=torch.bool, device=device)
        cells = self._split(valid.unsqueeze(-1)).view(-1, count, layout.length, 1)
        return replace(layout, valid=_repeated(cells, batch))

    def _documents(self, device: torch.device | str | None) -> Int[Tensor, "h w"]:
        """Document number of each cell: one per window, including those cut off at an edge."""
        along = [
            (torch.arange(side, device=device) + window - by) // window
            for side, window, by in zip(self.extent, self.window, self.shift, strict=True)
        ]
        return along[0].unsqueeze(1) * (self.counts[1] + 1) + along[1]

    def _split(self, image: Tensor) -> Tensor:
        """``[B, height, width, C]`` as ``[B, windows, cells, C]``, padded with zeros."""
        (down, across), (height, width) = self.counts, self.window
        fill = (0, 0, 0, across * width - self.extent[1], 0, down * height - self.extent[0])
        image = F.pad(image, fill).roll([-by for by in self.shift], dims=(1, 2))
        image = image.reshape(-1, down, height, across, width, image.shape[-1]).transpose(2, 3)
        return image.reshape(image.shape[0], down * across, height * width, -1)


def _repeated(values: Tensor, batch: int) -> Tensor:
    return values.squeeze(-1).expand(batch, -1, -1).flatten(0, 1)
