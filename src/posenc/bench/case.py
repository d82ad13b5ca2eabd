"""Cases of a bench: one call of attention each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.experiments.recipe import Recipe, require_encoding
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.registry import ENCODINGS, create

FROZEN = "frozen"
"""Suffix after ``@`` of an encoding whose parameters require no gradient."""

OF_EXTENT = ("window", "size")
"""Options of image encodings for the number of cells."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Encoding, sizes and device of a call.

    Args:
        encoding: as read by ``parse_name``: ``t5``, ``t5@frozen``, ``shaw@max_distance=64``.
        length: tokens; encodings of two axes get an image of as many cells.
        causal: with a causal mask.
        heads, head_dim: of q, k and v.
        device, dtype: of the tensors, as named by torch.
    """

    encoding: str
    length: int
    causal: bool = False
    heads: int = 8
    head_dim: int = 64
    device: str = "cpu"
    dtype: str = "float32"

    def build(self) -> Call:
        """Tensors and encoding of the case, the same in every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self._build()

    def _build(self) -> Call:
        name, options, frozen = parse_name(self.encoding)
        width = self.heads * self.head_dim
        layout = self._layout(name)
        if layout.extent is not None:
            valid = ENCODINGS[name].options() if name in ENCODINGS else {}
            sizes = {option: layout.extent for option in OF_EXTENT if option in valid}
            options = {**sizes, **options}
        encoding = create(
            name,
            dim=width,
            heads=self.heads,
            head_dim=self.head_dim,
            max_length=self.length,
            causal=self.causal,
            **options,
        )
        encoding = encoding.to(self.device).requires_grad_(not frozen)
        projections = (nn.Linear(width, width), nn.Linear(width, width))
        for part in encoding.parts():
            part.attach(*(projection.to(self.device) for projection in projections))
        shape = (1, self.heads, self.length, self.head_dim)
        q, k, v, weight = (self._draw(*shape) for _ in range(4))
        x = self._draw(1, self.length, width)
        for tensor in (q, k, v):
            tensor.requires_grad_()
        return Call(self, q, k, v, x, weight, layout, encoding, projections)

    def _layout(self, name: str) -> Layout:
        if _axes(name) == 1:
            return Layout.sequence(self.length, device=self.device)
        height = math.isqrt(self.length)
        while self.length % height:
            height -= 1
        return Layout.image(height, self.length // height, device=self.device)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.device, getattr(torch, self.dtype))

    def at(self, length: int) -> Case:
        """The same case with another length."""
        return replace(self, length=length)


@dataclass(frozen=True, eq=False)
class Call:
    """The tensors of a case.

    Args:
        case: the case.
        q, k, v: ``[1, H, L, D]``, requiring gradients.
        x: ``[1, L, C]``, the layer's input, for parts that read the tokens.
        weight: ``[1, H, L, D]``, the gradient of the output.
        layout: of the tokens.
        encoding: requires gradients unless frozen.
        projections: of queries and keys, for parts that share a layer's.
    """

    case: Case
    q: Float[Tensor, "1 H L D"]
    k: Float[Tensor, "1 H L D"]
    v: Float[Tensor, "1 H L D"]
    x: Float[Tensor, "1 L C"]
    weight: Float[Tensor, "1 H L D"]
    layout: Layout
    encoding: Encoding
    projections: tuple[nn.Linear, nn.Linear]

    @property
    def grid(self) -> Grid:
        """The grid of all pairs, with the signals of the encoding."""
        return Grid.of(self.encoding.observe(self.x, self.layout), causal=self.case.causal)

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return self.encoding.default_scale(self.case.head_dim)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def wanted(self) -> list[Tensor]:
        """Tensors that require gradients: q, k, v and the encoding's parameters."""
        return [*self.inputs, *(p for p in self.encoding.parameters() if p.requires_grad)]


def parse_name(text: str) -> tuple[str, Mapping[str, Any], bool]:
    """The name of an encoding, its options, and whether it is frozen.

    Raises:
        UnknownNameError: for an unknown encoding, option or change.
        ArgumentError: for an encoding without a part in attention, or other positions.
    """
    encoding, *changes = text.split("@")
    kept = [change for change in changes if change != FROZEN]
    require_encoding(encoding, axes=_axes(encoding))
    recipe = Recipe.parse("@".join([encoding, *kept]), axes=_axes(encoding))
    if recipe.positions != "plain":
        raise ArgumentError(
            "encoding",
            expected="no change but options and @frozen",
            got=repr(text),
            remedy="Positions of other kinds are for posenc compare.",
        )
    for name in encoding.split("+"):
        sites = ENCODINGS[name].claims.sites
        if sites and not set(sites) - {"embedding"}:
            raise ArgumentError(
                "encoding",
                expected="one with a part inside attention",
                got=f"{name}, which changes embeddings only",
                remedy="It costs attention nothing; leave it out.",
            )
    return encoding, recipe.options, len(kept) < len(changes)


def past_only(text: str) -> bool:
    """True if an encoding requires a causal mask.

    Raises: as ``parse_name``.
    """
    return any(ENCODINGS[name].claims.causal_only for name in parse_name(text)[0].split("+"))


def _axes(name: str) -> int:
    """1 for encodings of text, 2 for those of images only."""
    known = [ENCODINGS[part].claims for part in name.split("+") if part in ENCODINGS]
    return 2 if any(not claims.serves(1) and claims.serves(2) for claims in known) else 1
