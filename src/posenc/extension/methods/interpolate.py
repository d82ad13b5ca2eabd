"""Position interpolation, and resampling of tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Count
from posenc.encoding import EmbeddingEncoding, Encoding, Part
from posenc.encoding.tensors import Features, TokenIds
from posenc.encodings.common.buckets import OffsetBias
from posenc.encodings.common.window import Window
from posenc.encodings.embedding.learned import Learned
from posenc.encodings.embedding.learned2d import Learned2d
from posenc.encodings.embedding.radix import Radix
from posenc.encodings.embedding.sinusoidal import Sinusoidal
from posenc.encodings.query_key.rope import Rope
from posenc.encodings.score.alibi import Alibi
from posenc.encodings.score.swin import Swin
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension
from posenc.extension.fitting import NotApplicable, Stretch, remade, replaced
from posenc.extension.resampling import Align, Mode, longer_count, resampled_grid, resampled_rows
from posenc.layout import Layout

Resample = Callable[[Tensor, Sequence[int]], Tensor]


def interpolate(
    encoding: Encoding,
    *,
    factor: Stretch | None = None,
    size: tuple[Count, Count] | None = None,
    prefix: int = 0,
    align: Align | None = None,
    antialias: bool = False,
    mode: Mode = "bicubic",
) -> Encoding:
    """Position interpolation: positions are divided by ``factor``, tables resampled.

    - rope: each pair rotates ``factor`` times slower.
    - sinusoidal, radix: evaluated at ``p / factor``; alibi at ``Δ / factor``, which divides its
      slopes (Al-Khateeb et al. 2023).
    - learned: linear interpolation to ``factor`` times the rows after ``prefix``.
    - learned2d, swin: bicubic (a = -¾) or bilinear interpolation to the ``size`` of images or
      windows; rows of special tokens are kept.

    All such parts are interpolated, others kept. Cost: none. Differs from the papers in nothing;
    the defaults are those of ViT, Swin and DeiT, timm has ``antialias=True``.

    Args:
        encoding: with at least one such part.
        factor: extension of the trained length, 1 or more; of images, of each side, to the nearest
            cell.
        size: (height, width) in cells of images and windows, instead of ``factor``.
        prefix: number of first rows of a learned table that are no positions.
        align: ``"corners"``: first and last rows are kept; ``"centers"``: cells keep their share of
            the whole (torch's ``align_corners=False``). By default corners for learned tables,
            centers for learned2d and swin.
        antialias: smooth when making an image smaller; bicubic then has a = -½.
        mode: ``"bicubic"`` or ``"bilinear"``, for images and windows.

    Raises:
        ArgumentError: if no part can be interpolated, ``factor`` is below 1, or ``factor`` and
            ``size`` are both missing.

    Reference: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    Interpolation", https://arxiv.org/abs/2306.15595; Dosovitskiy et al. 2020, section 3.2; Liu et
    al. 2021, section 4.1; Al-Khateeb et al. 2023, https://arxiv.org/abs/2310.13017.

    >>> import posenc
    >>> from posenc.extension import interpolate
    >>> learned = posenc.create("learned", dim=4, max_length=8)
    >>> interpolate(learned, factor=4).embedding.max_length
    32
    """
    resample = partial(resampled_grid, align=align or "centers", antialias=antialias, mode=mode)
    extended = encoding
    for part in encoding.parts():
        changed = _interpolated(part, factor, size, prefix, align, resample)
        if changed is not None:
            extended = replaced(extended, part, changed)
    if extended is encoding:
        raise NotApplicable.of("interpolate", "rope, alibi, sinusoidal, radix or a table", encoding)
    return extended


def _interpolated(
    part: Part,
    factor: float | None,
    size: tuple[int, int] | None,
    prefix: int,
    align: Align | None,
    resample: Resample,
) -> Part | None:
    if isinstance(part, Learned2d):
        return _resized(part, _size(part.table.shape[:2], factor, size), resample)
    if isinstance(part, Swin):
        return _rewindowed(part, _size(part.window, factor, size), resample)
    if isinstance(part, Rope):
        by = _factor(factor)
        before = part.divisors or (1.0,) * (part.rotated // 2)
        return part.stretched([by * divisor for divisor in before], gain=part.gain)
    if isinstance(part, Alibi):
        return SqueezedAlibi(inner=part, factor=_factor(factor))
    if isinstance(part, SqueezedAlibi):
        return SqueezedAlibi(inner=part.inner, factor=part.factor * _factor(factor))
    if isinstance(part, Sinusoidal | Radix):
        return Squeezed(inner=part, factor=_factor(factor))
    if isinstance(part, Squeezed):
        return Squeezed(inner=part.inner, factor=part.factor * _factor(factor))
    if isinstance(part, Learned):
        count = longer_count(part, _factor(factor), prefix)
        rows = resampled_rows(part.table[prefix:], count - prefix, align=align or "corners")
        table = torch.cat([part.table.detach()[:prefix], rows])
        return remade(part, tables={"table": table}, max_length=count)
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
    sides: Sequence[int], factor: float | None, size: tuple[int, int] | None
) -> tuple[int, int]:
    height, width = sides
    return size or (round(_factor(factor) * height), round(_factor(factor) * width))


def _resized(part: Learned2d, size: tuple[int, int], resample: Resample) -> Learned2d:
    tables = {"table": resample(part.table, size), "special": part.special.detach().clone()}
    return remade(part, tables=tables, size=size)


def _rewindowed(part: Swin, window: tuple[int, int], resample: Resample) -> Swin:
    planes = part.table.T.reshape(*part.offsets.spans, -1)
    table = resample(planes, Window(*window).spans).flatten(0, 1).T.contiguous()
    return remade(part, tables={"table": table}, window=window)


class Squeezed(EmbeddingEncoding):
    """An embedding part evaluated at positions divided by ``factor``."""

    inner: EmbeddingEncoding
    factor: float

    def __post_init__(self) -> None:
        self.dim = self.inner.dim

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        squeezed = layout.with_positions(layout.positions / self.factor)
        embedded: Tensor = self.inner(x, squeezed, tokens=tokens)
        return embedded


class SqueezedAlibi(OffsetBias):
    """ALiBi evaluated at offsets divided by ``factor``."""

    inner: Alibi
    factor: float

    def __post_init__(self) -> None:
        self.heads = self.inner.heads

    def bias(self, offset: Float[Tensor, "*dims"]) -> Float[Tensor, H * dims]:
        return self.inner.bias(offset / self.factor)


ENTRY = Extension(
    function=interpolate,
    summary="Divides positions by the factor, and resamples tables.",
    on=("alibi", "learned", "learned2d", "radix", "rope", "sinusoidal", "swin"),
    training="needed",
    expect="RoPE: usable without training to about twice the length, near tokens blur; images "
    "and tables for them: good at once.",
    transformers="linear",
    trials={
        "text_table": ("@prefix=1",),
        "image_table": ("", "@antialias=True", "@mode=bilinear", "@align=corners"),
    },
)
