"""Swin Transformer with any 2-D encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from posenc.arguments import Count, Length, Probability, Width, check_fields
from posenc.encoding import Encoding
from posenc.encoding.tensors import Features
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.models.checkpoint import SavedModel
from posenc.models.patches import Patches
from posenc.models.sharing import share_encodings
from posenc.models.stack import StackConfig, draw_blocks, embed, make_blocks, make_encodings
from posenc.models.vision import fit_image, mean_of_real
from posenc.models.windows import Windows


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
        draw_blocks(self.blocks)

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


class Swin(SavedModel):
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
        super().__init__()
        self.config = self.require_config(config)
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
        x = embed(self.encoding, self.patch_norm(x), layout, None)
        for index, stage in enumerate(self.stages):
            if index:
                x, extent, cells = self.merging[index - 1](x, extent, cells)
            x = stage(x, extent, cells)
        return self.norm(x), extent, cells
