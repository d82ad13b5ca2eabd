"""Position from a convolution over neighbouring tokens."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from posenc.arguments import Count, Interval, Width, checked
from posenc.encoding import EmbeddingEncoding, Entry
from posenc.encoding.tensors import Features, TokenIds
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.layout.padding import hidden_tokens

Activation = Literal["none", "gelu"]
Padding = Literal["zeros", "circular"]


class Conv(EmbeddingEncoding):
    """Conditional positions: a depthwise convolution over neighbouring tokens, with a residual.

    ``x_i + a(b + Σ_δ w_δ ⊙ x_{i+δ})``, δ in ``-⌊k/2⌋ … ⌈k/2⌉ - 1`` on each axis, or in
    ``-(k-1) … 0`` if causal; padding and tokens of other documents count as 0; a is the
    ``activation``.

    Neighbours are δ tokens away by order, not position, in the same document. On two axes they are
    cells of a whole image (``Layout.image``); special tokens pass unchanged. ``w`` ``[C, 1, k]`` or
    ``[C, 1, k, k]`` and ``b`` ``[C]`` have the layout of torch's convolutions; with ``groups`` G,
    ``w`` ``[C, C/G, k]`` mixes the channels of a group. Position information comes from zero
    padding at the border only; with ``padding="circular"`` (a ring per row, document or image) the
    output is shift-equivariant and carries none. Differs from the paper in being applied before the
    first block rather than after it. wav2vec 2.0, HuBERT and WavLM have ``kernel=128``,
    ``groups=16`` and ``activation="gelu"``, with w from a weight norm.

    Args:
        dim: width C.
        kernel: k, cells along each axis.
        groups: G, of channels; C of one channel each by default.
        activation: of what is added, ``"gelu"`` or ``"none"``.
        axes: 1 for sequences, 2 for images.
        causal: read earlier tokens only; one axis. The cache keeps ``kernel - 1`` tokens.
        padding: ``"zeros"`` or ``"circular"``, see above; the latter cannot be causal.

    Raises:
        ArgumentError: when an option is out of its domain or ``groups`` does not divide ``dim``; in
            ``forward``, for a layout with another number of axes or that is not a whole image where
            one is needed.
        UnknownNameError: for another ``padding`` or ``activation``.

    Reference: Chu et al. 2021, "Conditional Positional Encodings for Vision Transformers",
    https://arxiv.org/abs/2102.10882; in groups: Baevski et al. 2020, "wav2vec 2.0: A Framework for
    Self-Supervised Learning of Speech Representations", https://arxiv.org/abs/2006.11477.

    >>> import posenc, torch
    >>> encoding = posenc.create("conv", dim=1, causal=False)
    >>> with torch.no_grad():
    ...     _ = encoding.embedding.weight.fill_(1.0)
    >>> encoding.embed(torch.ones(1, 4, 1), posenc.Layout.sequence(4)).flatten().tolist()
    [3.0, 4.0, 4.0, 3.0]
    """

    axes = (1, 2)

    pairwise = False

    @checked
    def __init__(
        self,
        *,
        dim: Width,
        kernel: Count = 3,
        groups: Count | None = None,
        activation: Activation = "none",
        axes: Annotated[int, Interval(1, 2)] = 1,
        causal: bool = False,
        padding: Padding = "zeros",
    ) -> None:
        super().__init__()
        self.groups = dim if groups is None else groups
        if dim % self.groups:
            raise ArgumentError(
                "groups",
                expected=f"a divisor of dim {dim}",
                got=groups,
                remedy="None is depthwise; wav2vec 2.0 has 16.",
            )
        if causal and axes == 2:
            raise ArgumentError(
                "causal",
                expected="False on two axes",
                got=causal,
                remedy="Use axes=1 for a decoder over the cells in raster order.",
            )
        if causal and padding == "circular":
            raise ArgumentError(
                "padding",
                expected="'zeros' where causal",
                got=padding,
                remedy="Circular padding reads later tokens; use zeros.",
            )
        self.dim, self.kernel, self.causal, self.padding = dim, kernel, causal, padding
        self.activation = activation
        self.lookback = kernel - 1 if causal else 0
        self.weight = nn.Parameter(torch.empty(dim, dim // self.groups, *[kernel] * axes))
        self.bias = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values: normal of variance 2 / inputs of a channel, zero bias."""
        nn.init.normal_(self.weight, std=math.sqrt(2 / self.weight[0].numel()))
        nn.init.zeros_(self.bias)

    def forward(self, x: Features, layout: Layout, *, tokens: TokenIds | None = None) -> Features:
        axes = self.weight.dim() - 2
        extent = layout.extent
        if layout.axes != axes or (axes == 2 and extent is None):
            raise ArgumentError(
                "layout",
                expected="a sequence" if axes == 1 else "a whole image (Layout.image)",
                got=f"{layout.axes} axes, extent {extent}",
                remedy=f"Create the encoding with axes={layout.axes}, or pass whole images.",
            )
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        # Padding may contain NaN, so it is replaced rather than multiplied by 0.
        hidden = hidden_tokens(layout)
        real = x.to(wide) if hidden is None else x.to(wide).masked_fill(hidden.unsqueeze(-1), 0)
        if extent is not None:
            mixed = self._convolved(real, extent)
        elif layout.start is not None and hidden is None and layout.document is None:
            mixed = self._convolved(real, (x.shape[1],))
        else:
            mixed = self.shifted(real, layout)
        if self.activation == "gelu":
            mixed = nn.functional.gelu(mixed)
        if layout.special is not None:
            mixed = mixed.masked_fill(layout.special.unsqueeze(-1), 0)
        return (x + mixed).to(x.dtype)

    def shifted(self, x: Features, layout: Layout) -> Features:
        """The convolution alone, ``b + Σ_δ w_δ ⊙ x_{i+δ}``, over a sequence of any layout.

        ``x`` is zero at padding and at special tokens.
        """
        weight = self.weight.to(x.dtype)
        mixed = self.bias.to(x.dtype).expand_as(x)
        for cell, step in enumerate(self._steps()):
            index, inside = _neighbours(layout, step, ring=self.padding == "circular")
            index = index.expand(x.shape[0], -1).unsqueeze(-1).expand_as(x)
            neighbour = x.gather(1, index).masked_fill(~inside.unsqueeze(-1), 0)
            of_cell = weight[..., cell : cell + 1]
            mixed = mixed + nn.functional.conv1d(neighbour.mT, of_cell, groups=self.groups).mT
        return mixed

    def _steps(self) -> range:
        first = 1 - self.kernel if self.causal else -(self.kernel // 2)
        return range(first, first + self.kernel)

    def _convolved(self, x: Features, extent: tuple[int, ...]) -> Features:
        """The convolution over a single unpadded document or over an image, by PyTorch."""
        prefix = x.shape[1] - math.prod(extent)
        cells = x[:, prefix:].mT.reshape(x.shape[0], x.shape[2], *extent)
        before = -self._steps()[0]
        after = self.kernel - 1 - before
        if self.padding == "circular":
            for dim, side in enumerate(extent, 2):
                index = torch.arange(-before, side + after, device=x.device) % side
                cells = cells.index_select(dim, index)
        else:
            cells = nn.functional.pad(cells, (before, after) * len(extent))
        convolve = nn.functional.conv1d if len(extent) == 1 else nn.functional.conv2d
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        mixed = convolve(cells, weight, bias, groups=self.groups).flatten(2).mT
        return mixed if prefix == 0 else nn.functional.pad(mixed, (0, 0, prefix, 0))


def _neighbours(
    layout: Layout, step: int, *, ring: bool
) -> tuple[Int[Tensor, "b L"], Bool[Tensor, "b L"]]:
    """Index of each token's neighbour ``step`` tokens away, and True where it exists."""
    column = torch.arange(layout.length, device=layout.device).unsqueeze(0)
    if ring:
        first, count = _runs(layout, column)
        index = first + (column - first + step) % count
        return index, torch.ones_like(index, dtype=torch.bool)
    index = (column + step).clamp(0, layout.length - 1)
    inside = (index - column == step) & (_at(layout.order, index) - layout.order == step)
    if layout.document is not None:
        inside = inside & (_at(layout.document, index) == layout.document)
    return index, inside


def _at(marks: Int[Tensor, "b L"], index: Int[Tensor, "1 L"]) -> Int[Tensor, "b L"]:
    return marks.gather(1, index.expand(marks.shape[0], -1))


def _runs(
    layout: Layout, column: Int[Tensor, "1 L"]
) -> tuple[Int[Tensor, "b L"], Int[Tensor, "b L"]]:
    """First index and length of the run of one document, or of padding, around each token."""
    begins = column == 0
    for mark in (layout.document, hidden_tokens(layout)):
        if mark is not None:
            changes = nn.functional.pad(mark[:, 1:] != mark[:, :-1], (1, 0), value=True)
            begins = begins | changes
    ends = nn.functional.pad(begins[:, 1:], (0, 1), value=True)
    first = torch.where(begins, column, 0).cummax(1).values
    last = torch.where(ends, column, layout.length).flip(1).cummin(1).values.flip(1)
    return first, last - first + 1


ENTRY = Entry(
    factory=Conv,
    summary="Convolves each token with its neighbours; zero padding at the border marks position.",
    relative=True,
    trainable=True,
    extrapolates="Holds: it reads neighbours only; no position information far from a border.",
    cost="L·C·kernel once (kernel² on two axes), times channels of a group",
    exceptions={"windows_are_windows": "the convolution reads kernel - 1 tokens before the window"},
    sharing="layers",
)
