"""Swin Transformer with any 2-D encoding: images in attention windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.arguments import Count, Length, Probability, Width, check_fields
from posenc.encoding import Encoding
from posenc.encoding.tensors import Features
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.models.checkpoint import SavedModel
from posenc.models.stack import StackConfig, embed, make_blocks, make_encodings, share_encodings
from posenc.models.vision import Patches, fit_image, mean_of_real


@dataclass(frozen=True, kw_only=True)
class SwinConfig:
    """Configuration of a ``Swin``.

    Args:
        size: (height, width) in pixels of training images; other sizes work too.
        patch: side of a patch of the first stage in pixels.
        channels: of the images.
        dim: width of the first stage, doubled in each further stage.
        depths: number of blocks of each stage.
        heads: of each stage.
        window: side of a window in tokens.
        encoding: name in the registry, or several joined by ``+``.
        options: the encoding's options; see ``fit_image`` for those set from ``size`` and
            ``window``.
        dropout: of features and attention weights.
        classes: number of labels; None: no classifier, the model returns token vectors.
    """

    size: tuple[Length, Length] = (224, 224)
    patch: Length = 4
    channels: Width = 3
    dim: Width = 96
    depths: Sequence[Count] = (2, 2, 6, 2)
    heads: Sequence[Count] = (3, 6, 12, 24)
    window: Length = 7
    encoding: str = "swin"
    options: Mapping[str, Any] = field(default_factory=dict)
    dropout: Probability = 0.0
    classes: Count | None

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < len(self.depths) == len(self.heads):
            raise ArgumentError(
                "heads",
                expected=f"{max(1, len(self.depths))}, one per stage as in depths",
                got=self.heads,
                remedy="Give one value per stage for both.",
            )

    def stage(self, index: int) -> StackConfig:
        """Configuration of a stage's blocks."""
        return StackConfig(
            dim=self.dim * 2**index,
            heads=self.heads[index],
            activation="gelu",
            norm="layer",
            bias=True,
            dropout=self.dropout,
            max_length=self.window,
        )


class SwinStage(nn.Module):
    """Blocks over windows of an image; every second block has shifted windows.

    Args:
        config: of the blocks.
        encodings: one per block; embedding parts are ignored.
        window: side of a window in tokens.
    """

    def __init__(self, config: StackConfig, *, encodings: Sequence[Encoding], window: int) -> None:
        super().__init__()
        self.window = window
        self.blocks = make_blocks(config, encodings, causal=False)
        self.blocks.reset_parameters()

    def forward(
        self, x: Features, extent: tuple[int, int], valid: Bool[Tensor, "b h w"] | None = None
    ) -> Features:
        """Token vectors after the last block.

        Args:
            x: ``[B, L, C]``, an image's tokens in raster order.
            extent: (height, width) of the image in tokens.
            valid: ``[B|1, height, width]``, False for padding.
        """
        for index, block in enumerate(self.blocks):
            windows = Windows.swin(extent, self.window, shifted=index % 2 == 1)
            layout = windows.layout(x.shape[0], valid, device=x.device)
            x = windows.join(block(windows.split(x), layout))
        return x


class PatchMerging(nn.Module):
    """Merges four neighbouring tokens into one of twice the width: a norm and a projection.

    Args:
        dim: input width C.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.projection = nn.Linear(4 * dim, 2 * dim, bias=False)
        nn.init.normal_(self.projection.weight, std=(4 * dim) ** -0.5)

    def forward(
        self, x: Features, extent: tuple[int, int], valid: Bool[Tensor, "b h w"] | None = None
    ) -> tuple[Float[Tensor, "B M 2*C"], tuple[int, int], Bool[Tensor, "b hh ww"] | None]:
        """Tokens, extent and mask at half the size, rounded up."""
        height, width = extent
        odd = (0, width % 2, 0, height % 2)
        if valid is not None:
            x = x.masked_fill(~valid.flatten(1).unsqueeze(-1), 0)
            valid = nn.functional.pad(valid, odd)
            valid = valid.view(len(valid), -1, 2, valid.shape[2] // 2, 2).any(4).any(2)
        image = nn.functional.pad(x.reshape(-1, height, width, x.shape[-1]), (0, 0, *odd))
        four = [image[:, row::2, column::2] for column in range(2) for row in range(2)]
        merged: Tensor = self.projection(self.norm(torch.cat(four, dim=-1)))
        return merged.flatten(1, 2), (merged.shape[1], merged.shape[2]), valid


class Swin(SavedModel[SwinConfig]):
    """Swin Transformer: patches, stages of windowed blocks with merging, classifier.

    An encoding's embedding part enters before the first stage; its other parts act inside windows,
    with positions relative to the window.

    Args:
        config: its shape.

    Raises:
        ArgumentError: if the encoding requires a causal mask or dimensions do not fit.

    Differs from the paper: cells that fill up the last windows are masked, and there is no
    stochastic depth.

    Reference: Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted
    Windows".

    >>> import torch
    >>> from posenc.models import Swin, SwinConfig
    >>> model = Swin(SwinConfig(size=(32, 32), patch=2, channels=1, dim=16, depths=(2, 2),
    ...     heads=(2, 4), window=4, classes=10))
    >>> model(torch.randn(1, 1, 32, 48)).shape
    torch.Size([1, 10])
    """

    kind, made_from = "swin", SwinConfig

    def __init__(self, config: SwinConfig) -> None:
        super().__init__(config)
        self.patches = Patches(channels=config.channels, dim=config.dim, patch=config.patch)
        self.patch_norm = nn.LayerNorm(config.dim)
        self.stages, self.merging = nn.ModuleList(), nn.ModuleList()
        options = fit_image(
            config.encoding,
            config.options,
            (-(-config.size[0] // config.patch), -(-config.size[1] // config.patch)),
            special=0,
            window=(config.window, config.window),
        )
        for index, depth in enumerate(config.depths):
            if index:
                self.merging.append(PatchMerging(config.dim * 2 ** (index - 1)))
            shape = config.stage(index)
            encodings = make_encodings(shape, config.encoding, options, layers=depth, causal=False)
            if not index:
                self.encoding = encodings[0]
            self.stages.append(
                SwinStage(
                    shape,
                    encodings=[
                        Encoding(query_key=part.query_key, score=part.score, value=part.value)
                        for part in encodings
                    ],
                    window=config.window,
                )
            )
        self.shared_encodings = share_encodings(self)
        self.norm = nn.LayerNorm(shape.dim)
        self.head = None
        if config.classes is not None:
            self.head = nn.Linear(shape.dim, config.classes)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(
        self, images: Float[Tensor, "B P Y X"], *, valid: Bool[Tensor, "b Y X"] | None = None
    ) -> Float[Tensor, "B N"] | Features:
        """Logits ``[B, classes]``, from the mean of all valid tokens.

        Without a classifier: normalised vectors of the last stage's tokens, ``[B, L, C]``.

        Args:
            images: ``[B, P, Y, X]``, of any size.
            valid: ``[B|1, Y, X]``, False for padding.

        Raises:
            ArgumentError: for images or masks of other shapes.
            LengthError: if the embedding part cannot represent a position.
        """
        x, extent, cells = self.features(images, valid=valid)
        if self.head is None:
            return x
        layout = Layout.image(*extent, valid=cells, device=x.device)
        logits: Tensor = self.head(mean_of_real(x, layout))
        return logits

    def features(
        self, images: Float[Tensor, "B P Y X"], *, valid: Bool[Tensor, "b Y X"] | None = None
    ) -> tuple[Features, tuple[int, int], Bool[Tensor, "b h w"] | None]:
        """Normalised vectors of the last stage, its (height, width), and its mask."""
        x, extent, cells = self.patches(images, valid)
        layout = Layout.image(*extent, valid=cells, device=x.device)
        x = embed(self.encoding, self.patch_norm(x), layout)
        for index, stage in enumerate(self.stages):
            if index:
                x, extent, cells = self.merging[index - 1](x, extent, cells)
            x = stage(x, extent, cells)
        return self.norm(x), extent, cells


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

    Reference: Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted
    Windows".

    >>> from posenc.models.swin import Windows
    >>> Windows(extent=(4, 6), window=(2, 3)).split(torch.zeros(1, 24, 8)).shape
    torch.Size([4, 6, 8])
    """

    extent: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)

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
