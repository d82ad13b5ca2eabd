"""Position interpolation, and tables resampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.encoding import EmbeddingEncoding, Encoding, Part
from posenc.encodings.embedding.learned import Learned
from posenc.encodings.embedding.learned2d import Learned2d
from posenc.encodings.embedding.radix import Radix
from posenc.encodings.embedding.sinusoidal import Sinusoidal
from posenc.encodings.query_key.rope import Rope
from posenc.encodings.score.swin import Swin
from posenc.entry import Citation
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension, ExtensionClaims
from posenc.extension.fitting import Misfit, replaced, require_factor
from posenc.extension.resampling import (
    Align,
    Mode,
    longer_count,
    resampled_grid,
    resampled_rows,
    with_rows,
)
from posenc.layout import Layout

__all__ = ["Squeezed", "interpolate"]


def interpolate(
    encoding: Encoding,
    *,
    factor: float | None = None,
    size: Sequence[int] | None = None,
    prefix: int = 0,
    align: Align | None = None,
    antialias: bool = False,
    mode: Mode = "bicubic",
) -> Encoding:
    """Position interpolation: positions are divided by ``factor``, tables resampled.

    - rope: each pair turns ``factor`` times slower.
    - sinusoidal, radix: read at ``p / factor``.
    - learned: a table of ``factor`` times the rows, by linear interpolation; ``prefix`` rows stay.
    - learned2d, swin: a table for images (windows) of ``size``, by bicubic interpolation (a = -¾,
      torch's) or bilinear; special tokens' rows stay.

    Each part that can be interpolated is; all others stay. Cost: none. Differs from the papers in
    nothing; ViT, Swin and DeiT resample as here with the default options, timm with
    ``antialias=True``.

    Args:
        encoding: with at least one of these.
        factor: 1 or more; how many times the trained length. For images, of each side, to the
            nearest cell.
        size: (height, width) in cells, for images and windows instead of ``factor``; exact, where
            a factor would have to be rounded.
        prefix: first rows of a learned table that are no positions and stay.
        align: ``"corners"``: first and last rows stay first and last; ``"centers"``: cells keep
            their share of the whole (torch's ``align_corners=False``). By default corners for
            texts and Swin's offsets, centers for images.
        antialias: smooth before making an image smaller; bicubic, a is -½ then.
        mode: ``"bicubic"`` or ``"bilinear"``, for images and windows.

    Raises:
        ArgumentError: when no part can be interpolated, ``factor`` is below 1, or what an encoding
            needs of ``factor`` and ``size`` is missing.

    Reference: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    Interpolation"; Dosovitskiy et al. 2021, section 3.2; Liu et al. 2021, section 4.1.

    >>> import posenc
    >>> from posenc.extension import interpolate
    >>> interpolate(posenc.create("learned", dim=4, max_length=8), factor=4).embedding
    Learned(max_length=32, dim=4, add)
    """
    if factor is not None:
        factor = require_factor(factor)
    stretched = encoding
    for part in encoding.parts():
        changed = _interpolated(part, factor, size, prefix, align, (antialias, mode))
        if changed is not None:
            stretched = replaced(stretched, part, changed)
    if stretched is encoding:
        raise Misfit.of("interpolate", "rope, sinusoidal, radix or a table", encoding)
    return stretched


def _interpolated(
    part: Part,
    factor: float | None,
    size: Sequence[int] | None,
    prefix: int,
    align: Align | None,
    kernel: tuple[bool, Mode],
) -> Part | None:
    if isinstance(part, Learned2d):
        sides = _size(part.table.shape[:2], factor, size)
        return _resized(part, sides, align or "centers", kernel)
    if isinstance(part, Swin):
        sides = _size(part.window.sides, factor, size)
        return _rewindowed(part, sides, align or "centers", kernel)
    if isinstance(part, Rope):
        by = _factor(factor)
        before = part.divisors or (1.0,) * (part.rotated // 2)
        return part.stretched([by * each for each in before], gain=part.gain)
    if isinstance(part, Sinusoidal | Radix):
        return Squeezed(part, factor=_factor(factor))
    if isinstance(part, Squeezed):
        return Squeezed(part.inner, factor=part.factor * _factor(factor))
    if isinstance(part, Learned):
        count = longer_count(part, _factor(factor), prefix)
        rows = resampled_rows(part.table[prefix:], count - prefix, align=align or "corners")
        return with_rows(part, torch.cat([part.table.detach()[:prefix], rows]))
    return None


def _factor(factor: float | None) -> float:
    if factor is None:
        raise ArgumentError(
            "factor",
            expected="how many times the trained length to reach",
            got="none",
            remedy="size=(height, width) is for images.",
        )
    return factor


def _size(
    sides: Sequence[int], factor: float | None, size: Sequence[int] | None
) -> tuple[int, int]:
    if size is None:
        height, width = (round(_factor(factor) * side) for side in sides)
        return height, width
    if len(size) != 2 or min(size) < 1:
        raise ArgumentError(
            "size", expected="(height, width) in cells, from 1", got=size, remedy="Count them."
        )
    return int(size[0]), int(size[1])


def _resized(
    part: Learned2d, size: tuple[int, int], align: Align, kernel: tuple[bool, Mode]
) -> Learned2d:
    with torch.device("meta"):
        resized = Learned2d(
            dim=part.table.shape[-1], size=size, special=len(part.special), std=part.std
        )
    antialias, mode = kernel
    table = resampled_grid(part.table, size, align=align, antialias=antialias, mode=mode)
    resized.table = nn.Parameter(table, requires_grad=part.table.requires_grad)
    resized.special = nn.Parameter(
        part.special.detach().clone(), requires_grad=part.special.requires_grad
    )
    return resized.train(part.training)


def _rewindowed(
    part: Swin, window: tuple[int, int], align: Align, kernel: tuple[bool, Mode]
) -> Swin:
    heads = part.table.shape[0]
    with torch.device("meta"):
        rewindowed = Swin(heads=heads, window=window)
    planes = part.table.T.reshape(*part.window.spans, heads)
    antialias, mode = kernel
    resampled = resampled_grid(
        planes, rewindowed.window.spans, align=align, antialias=antialias, mode=mode
    )
    rewindowed.table = nn.Parameter(
        resampled.flatten(0, 1).T.contiguous(), requires_grad=part.table.requires_grad
    )
    return rewindowed.train(part.training)


class Squeezed(EmbeddingEncoding):
    """An embedding part that is read at positions divided by ``factor``."""

    def __init__(self, inner: Sinusoidal | Radix, *, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor
        self.dim = inner.dim

    def extra_repr(self) -> str:
        return f"factor={self.factor:g}"

    def forward(
        self,
        x: Float[Tensor, "B L C"],
        layout: Layout,
        *,
        tokens: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L C"]:
        squeezed = layout.with_positions(layout.positions / self.factor)
        embedded: Tensor = self.inner(x, squeezed, tokens=tokens)
        return embedded


ENTRY = Extension(
    function=interpolate,
    summary="Divides positions by the factor, and resamples tables.",
    on=("learned", "learned2d", "radix", "rope", "sinusoidal", "swin"),
    claims=ExtensionClaims(
        training="needed",
        expect="RoPE: usable without training to about twice the length, near tokens blur; images "
        "and tables for them: good at once.",
        transformers="linear",
    ),
    citation=Citation(
        authors="Chen et al.",
        title="Extending Context Window of Large Language Models via Positional Interpolation",
        year=2023,
        url="https://arxiv.org/abs/2306.15595",
    ),
)
