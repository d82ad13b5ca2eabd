"""The encoding, layer and inputs that laws are applied to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.attention import Attention, LayerCache
from posenc.encoding import Encoding
from posenc.encoding.entry import CONTEXT, Claims, Entry
from posenc.layout import Layout

P = ParamSpec("P")

HEADS, KV_HEADS, HEAD_DIM = 6, 3, 8
"""Six heads: not a power of two, and divisible into groups."""

DIM = HEADS * HEAD_DIM
MAX_LENGTH = 160

PARTIAL = {
    "positions": "The range of positions is limited: laws use small ones.",
    "angles": "Angles are inexact at large positions: laws use up to 2^40.",
}
"""Exceptions from parts of laws that a method may claim."""

LENGTH = 13
"""Length of sequences in most laws."""

COLUMNS, ROWS, FRAMES = 5, 4, 3
"""Sides of images, of video frames and of videos, into which texts are folded for several axes."""


class LawBroken(AssertionError):
    """An encoding violates a law."""


def named(check: Callable[P, None]) -> Callable[P, None]:
    """A law whose ``LawBroken`` starts with its name."""

    @functools.wraps(check)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            check(*args, **kwargs)
        except LawBroken as error:
            raise LawBroken(f"{check.__name__}: {error}") from error

    return run


@dataclass(frozen=True)
class Subject:
    """An encoding under test.

    Args:
        name: for messages.
        make: creates an encoding for ``heads=6, head_dim=8, dim=48, max_length=160, causal=True``,
            initialised from torch's global generator.
        claims: of the encoding.
        make_layers: creates the encodings of a number of layers, which may share parameters; by
            default calls ``make`` for each.
    """

    name: str
    make: Callable[[], Encoding]
    claims: Claims
    make_layers: Callable[[int], list[Encoding]] | None = None

    @classmethod
    def of_entry(cls, name: str, entry: Entry, **options: object) -> Subject:
        """The subject of a registry entry and factory options."""
        context = {
            "dim": DIM,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "max_length": MAX_LENGTH,
            "causal": True,
        }
        from_context = {key: context[key] for key in CONTEXT if key in entry.parameters()}
        taken: dict[str, object] = from_context | dict(entry.sample)

        def make_layers(count: int) -> list[Encoding]:
            return entry.layers(count, taken | options)

        return cls(name, lambda: make_layers(1)[0], entry.claims, make_layers)

    def layers(self, count: int) -> list[Encoding]:
        """The encodings of a stack of layers, with the same values in every call."""
        with seeded(7):
            if self.make_layers is None:
                records = [self.make() for _ in range(count)]
            else:
                records = self.make_layers(count)
        for record in dict.fromkeys(records):
            spread(record)
        return records

    def layer(
        self, *, dtype: torch.dtype = torch.float64, window: int | None = None, merged: bool = False
    ) -> Layer:
        """A causal attention layer with this encoding, the same in every call."""
        with seeded(7):
            encoding = self.make()
            spread(encoding)
            return Layer(encoding, window=window, merged=merged).to(dtype).eval()

    @property
    def axes(self) -> int:
        """Number of position axes in laws: the smallest that the encoding supports."""
        return 1 if self.claims.axes is None else min(self.claims.axes)

    def place(self, layout: Layout) -> Layout:
        """A layout of one axis folded to this encoding's axes; see ``fold``."""
        return fold(layout, self.axes)


REGISTERED: dict[str, Callable[[Subject], None]] = {}
"""Laws of the modules imported so far; see ``posenc.testing.laws.LAWS``."""


def law(check: Callable[[Subject], None]) -> Callable[[Subject], None]:
    """Register a law."""
    REGISTERED[check.__name__] = named(check)
    return REGISTERED[check.__name__]


def fold(layout: Layout, axes: int) -> Layout:
    """Positions of a text as positions of an image or video.

    Position p becomes ``(p // 5, p % 5)`` on two axes, ``(p // 20, p // 5 % 4, p % 5)`` on three,
    ``(p // 60, p // 20 % 3, p // 5 % 4, p % 5)`` on four.
    """
    if axes == 1:
        return layout
    last, folded = layout.positions[..., 0], []
    for size in (COLUMNS, ROWS, FRAMES)[: axes - 1]:
        folded.append(last.remainder(size))
        last = last.div(size, rounding_mode="floor")
    return layout.with_positions(torch.stack([last, *folded[::-1]], dim=-1))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the CPU's global generator, and restores its state at the end.

    ``torch.manual_seed`` also seeds other devices' generators, which ``fork_rng`` would have to
    restore, and keeps a formatted stack of each call until a device is used.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def spread(encoding: Encoding) -> None:
    """Perturb parameters, as many methods are the identity at their initial values."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def learned(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that have gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class Layer(nn.Module):
    """Minimal model: embedding part, then causal attention."""

    def __init__(
        self, encoding: Encoding, *, window: int | None = None, merged: bool = False
    ) -> None:
        super().__init__()
        self.attention = Attention(
            dim=DIM,
            heads=HEADS,
            kv_heads=KV_HEADS,
            encoding=encoding,
            causal=True,
            window=window,
            merged=merged,
        )

    @property
    def encoding(self) -> Encoding:
        return self.attention.encoding

    def forward(
        self,
        x: Float[Tensor, "B L C"],
        layout: Layout,
        *,
        tokens: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B L C"]:
        embed = self.encoding.embed if cache is None else partial(cache.embed, self.encoding)
        x = embed(x, layout, tokens=tokens)
        attended: Tensor = self.attention(x, layout, cache=cache)
        return attended


def inputs(rows: int = 2, length: int = LENGTH, *, seed: int = 1) -> Tensor:
    """Token vectors ``[rows, length, 48]``, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, DIM, generator=generator, dtype=torch.float64)


def tokens_of(rows: int = 2, length: int = LENGTH) -> Tensor:
    """Token ids ``[rows, length]``."""
    return torch.arange(rows * length).reshape(rows, length) % 5


def heads_of(count: int, length: int, *, seed: int, rows: int = 2) -> Tensor:
    """Queries, keys or values ``[rows, count, length, 8]``, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, count, length, HEAD_DIM, generator=generator, dtype=torch.float64)


def operands(queries: int, keys: int, *, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of all heads, and keys and values of grouped heads."""
    q = heads_of(HEADS, queries, seed=2, rows=rows)
    k, v = (heads_of(KV_HEADS, keys, seed=seed, rows=rows) for seed in (3, 4))
    return q, k, v


def observed(subject: Subject, encoding: Encoding, layout: Layout, rows: int = 2) -> Layout:
    """The folded layout, with the encoding's signals of some tokens."""
    x = inputs(rows, layout.length, seed=9)
    return encoding.double().observe(x, subject.place(layout))


def agree(label: str, got: Tensor, expected: Tensor, *, tolerance: float = 1e-6) -> None:
    """Require equal tensors within ``tolerance`` · max(1, largest value).

    Raises:
        LawBroken: with the label and the difference.
    """
    if got.shape != expected.shape:
        raise LawBroken(f"{label} has shape {list(got.shape)}, not {list(expected.shape)}")
    got, expected = got.detach().double(), expected.detach().double()
    if not got.numel():
        return
    scale = max(1.0, expected.abs().max().item())
    off = (got - expected).abs().max().item()
    if not off <= tolerance * scale:
        raise LawBroken(f"{label} is off by {off:.3g}, more than {tolerance * scale:.3g}")
