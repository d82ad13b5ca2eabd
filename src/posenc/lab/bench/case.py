"""Calls of attention that a bench times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc import registration
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.lab.experiments.recipe import Positions, require_axes
from posenc.layout import Layout
from posenc.registry import ENCODINGS, create

FROZEN = "frozen"
"""Suffix after ``@`` of an encoding whose parameters require no gradient."""

SCORES = "scores"
"""Suffix after ``@`` of an encoding without its value part (Shaw's keys alone)."""

OF_EXTENT = ("window", "size")
"""Options of image encodings for the number of cells."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Encoding, sizes and device of a call.

    Args:
        encoding: as read by ``parse_name``: ``t5``, ``t5@frozen``, ``shaw@max_distance=64``,
            ``shaw@scores``.
        length: tokens; encodings of two axes get an image of as many cells.
        causal: with a causal mask.
        batch, heads, head_dim: of q, k and v.
        device, dtype: of tensors and parameters, as named by torch: those of a model cast to it.
    """

    encoding: str
    length: int
    causal: bool = False
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    device: str = "cpu"
    dtype: str = "float32"

    def build(self) -> TimedCall:
        """Tensors and encoding of the case, the same in every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self._build()

    def _build(self) -> TimedCall:
        name, options, suffixes = parse_name(self.encoding)
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
        if SCORES in suffixes:
            encoding = Encoding(query_key=encoding.query_key, score=encoding.score)
        dtype = getattr(torch, self.dtype)
        encoding = encoding.to(self.device, dtype).requires_grad_(FROZEN not in suffixes)
        projections = (nn.Linear(width, width), nn.Linear(width, width))
        for part in encoding.parts():
            part.attach(*(projection.to(self.device, dtype) for projection in projections))
        shape = (self.batch, self.heads, self.length, self.head_dim)
        q, k, v, weight = (self._draw(*shape) for _ in range(4))
        x = self._draw(self.batch, self.length, width)
        for tensor in (q, k, v):
            tensor.requires_grad_()
        return TimedCall(self, q, k, v, x, weight, layout, encoding, projections)

    def _layout(self, name: str) -> Layout:
        if axes_of(name) == 1:
            return Layout.sequence(self.length, device=self.device)
        height = math.isqrt(self.length)
        while self.length % height:
            height -= 1
        return Layout.image(height, self.length // height, device=self.device)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.device, getattr(torch, self.dtype))

    def __str__(self) -> str:
        rows = f"{self.batch} × " if self.batch > 1 else ""
        causal = ", causal" if self.causal else ""
        dtype = "" if self.dtype == "float32" else f", {self.dtype}"
        return f"{self.encoding}, {rows}{self.length} tokens{causal}{dtype}"


@dataclass(frozen=True, eq=False)
class TimedCall:
    """The tensors of a case.

    Args:
        case: the case.
        q, k, v: ``[B, H, L, D]``, requiring gradients.
        x: ``[B, L, C]``, the layer's input, for parts that read the tokens.
        weight: ``[B, H, L, D]``, the gradient of the output.
        layout: of the tokens.
        encoding: requires gradients unless frozen.
        projections: of queries and keys, for parts that share a layer's.
    """

    case: Case
    q: Float[Tensor, "B H L D"]
    k: Float[Tensor, "B H L D"]
    v: Float[Tensor, "B H L D"]
    x: Float[Tensor, "B L C"]
    weight: Float[Tensor, "B H L D"]
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


def parse_name(text: str) -> tuple[str, Mapping[str, Any], frozenset[str]]:
    """The name of an encoding, its options, and which of ``FROZEN`` and ``SCORES`` it has.

    Raises:
        UnknownNameError: for an unknown encoding, option or change.
        ArgumentError: for an encoding without a part in attention, or other positions.
    """
    parsed = registration.parse_name(ENCODINGS, text, words=(FROZEN, SCORES, *get_args(Positions)))
    require_axes(parsed.entries, axes=axes_of(parsed.name))
    suffixes = frozenset(parsed.words)
    if suffixes - {FROZEN, SCORES}:
        raise ArgumentError(
            "encoding",
            expected="no change but options, @frozen and @scores",
            got=repr(text),
            remedy="Positions of other kinds are for posenc compare.",
        )
    for name, entry in parsed.entries.items():
        sites = entry.claims.sites
        if sites and not set(sites) - {"embedding"}:
            raise ArgumentError(
                "encoding",
                expected="one with a part inside attention",
                got=f"{name}, which changes embeddings only",
                remedy="It costs attention nothing; leave it out.",
            )
    return parsed.name, parsed.options, suffixes


def past_only(text: str) -> bool:
    """True if an encoding requires a causal mask.

    Raises: as ``parse_name``.
    """
    return any(ENCODINGS[name].claims.causal_only for name in parse_name(text)[0].split("+"))


def axes_of(name: str) -> int:
    """Axes of positions: 1 for encodings of text, 2 for those of images only."""
    claims_of_parts = [ENCODINGS[part].claims for part in name.split("+") if part in ENCODINGS]
    return 2 if any(not claims.serves(1) and claims.serves(2) for claims in claims_of_parts) else 1
