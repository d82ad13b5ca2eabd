"""Rotary positions on any number of axes, as video and image Transformers have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Base, Count, Divisor, EvenWidth, Factor, Interval, Natural
from posenc.encoding import Entry, Pairing
from posenc.encoding.prepared import constant
from posenc.encodings.common.precision import angles_at, geometric_frequencies, wider
from posenc.encodings.common.rotation import Rotary
from posenc.errors import ArgumentError
from posenc.layout import Layout

Coordinate = Annotated[float, Interval(-1e6, 1e6)]
"""A coordinate of an axis."""


class AxialRope(Rotary):
    """Axial RoPE: each axis of a position rotates pairs of its own, at a ladder of frequencies.

    ``angle_at = (o_a + s_a · p_a) · θ_at``, by which pair t of axis a is rotated.

    ``θ_at = b_a^(-t/d_a)``, t = 0 … d_a - 1: RoPE of ``2d_a`` features for each axis. With
    ``band=(f, g)`` θ runs from f to g instead, ``f · (g/f)^(t/(d_a-1))`` or, ``spacing="linear"``,
    ``f + (g - f) · t/(d_a-1)``.

    ``p`` is a position on A axes, any reals (``Layout.cells``, ``Layout.image``, ``Layout.at``);
    ``d_a`` pairs, origin ``o_a`` and step ``s_a`` of axis a; θ in radians per unit of
    ``s_a · p_a``. Axes have their pairs one after the other, the first axis first; pairs beyond
    ``Σ d_a`` and special tokens are not rotated. ``across_heads`` makes one ladder of all heads
    together, in which the axes take turns pair by pair, after the pairs that are not rotated
    (LTX-Video); heads then rotate at different speeds. ``learned`` frequencies are one a head, axis
    and pair, whose angles add over the axes (Mochi); initially θ on each axis's own pairs and 0
    elsewhere.

    ``PRESETS`` in the same file has the options of released models. Differs from their code in
    precision alone: angles are exact here, where LTX-Video's, of up to 16,000 radians in float32,
    are off by up to 0.004. With positions of place and unix seconds in float64 and a step of one
    over the unit of time it is TO-RoPE (Wei et al. 2025), split by dimension; split by head or
    fused early it has ``learned`` frequencies.

    Args:
        head_dim: width D of a head.
        heads: query heads H, for ``across_heads`` and ``learned``.
        pairs: ``[A]``, d; by default as even as can be, the first axis taking what is left over
            (Wan). 1 to 4 axes then, as the layout has.
        base: b, of each axis or of all; sets the slowest frequency.
        band: (f, g), first and last frequency of each axis, in place of ``base``.
        spacing: of the frequencies of ``band``, ``"geometric"`` or ``"linear"``.
        origin: o, of each axis or of all.
        step: s, of each axis or of all.
        pairing: ``"adjacent"`` pairs feature 2t with 2t + 1, ``"half"`` t with t + ``Σ d_a``.
        across_heads: one ladder of all heads.
        learned: frequencies are parameters; needs ``pairs``.
        divisors: ``[Σ d_a]``, divisors of the frequencies, axis after axis; needs ``pairs``.
            Context extension sets them (``posenc.extension``).
        gain: factor of the rotated features of queries and of keys.

    Raises:
        ArgumentError: when options are of different numbers of axes or of more pairs than a head
            has, one that is needed is missing, or one is out of its domain; in ``forward``, for a
            layout of another number of axes.
        UnknownNameError: for another ``pairing`` or ``spacing``.

    Reference: Heo et al. 2024, "Rotary Position Embedding for Vision Transformer",
    https://arxiv.org/abs/2403.13298; on three axes: Wan Team 2025, "Wan: Open and Advanced
    Large-Scale Video Generative Models", https://arxiv.org/abs/2503.20314.

    >>> import posenc, torch
    >>> grid = posenc.Grid.of(posenc.Layout.cells(2, 3, 4))
    >>> q = torch.randn(1, 2, 24, 16)
    >>> posenc.create("axial_rope", head_dim=16).query_key(q, q, grid)[0].shape
    torch.Size([1, 2, 24, 16])
    """

    axes = (1, 2, 3, 4)

    head_dim: EvenWidth
    heads: Count | None = None
    pairs: Sequence[Natural] | None = None
    base: Base | Sequence[Base] = 10000.0
    band: tuple[Factor, Factor] | None = None
    spacing: Literal["geometric", "linear"] = "geometric"
    origin: Coordinate | Sequence[Coordinate] = 0.0
    step: Factor | Sequence[Factor] = 1.0
    pairing: Pairing = "adjacent"
    across_heads: bool = False
    learned: bool = False
    divisors: Sequence[Divisor] | None = None
    gain: Factor = 1.0

    def __post_init__(self) -> None:
        options = {name: getattr(self, name) for name in ("pairs", "base", "origin", "step")}
        counts = {name: len(x) for name, x in options.items() if isinstance(x, tuple)}
        for name, count in counts.items():
            axes = next(iter(counts.values()))
            _require(count == axes, name, f"{axes} values, one an axis", options[name])
            vars(self)["axes"] = (axes,)
        self.places = self.head_dim // 2
        if self.across_heads or self.learned:
            _require(self.heads is not None, "heads", "the query heads of the model", None)
        if self.across_heads:
            _require(not self.learned, "across_heads", "False beside learned", True)
            self.places *= self.heads or 1
        self.frequencies: nn.Parameter | None = None
        if self.pairs is None:
            free = not self.learned and self.divisors is None
            _require(free, "pairs", "those of each axis, beside learned or divisors", None)
            return
        rotated, most = sum(self.pairs), self.places
        _require(1 <= rotated <= most, "pairs", f"1 to {most} pairs in all", self.pairs)
        if self.across_heads:
            alike = len({*self.pairs}) == 1
            _require(alike, "pairs", "as many of each axis, which take turns", self.pairs)
        if self.divisors is not None:
            fits = len(self.divisors) == rotated
            _require(fits, "divisors", f"{rotated} divisors, one a pair", self.divisors)
        if self.learned:
            self.frequencies = nn.Parameter(torch.empty(len(self.pairs), self.heads or 1, rotated))

    def reset_parameters(self) -> None:
        """Set learned frequencies to θ on each axis's own pairs, 0 elsewhere."""
        if self.frequencies is None or self.pairs is None:
            return
        with torch.no_grad():
            self.frequencies.zero_()
            first = 0
            for axis, count in enumerate(self.pairs):
                own = slice(first, first + count)
                self.frequencies[axis, :, own] = self._ladder(axis, count, like=self.frequencies)
                first += count

    def angles(self, layout: Layout) -> Float[Tensor, "b *h L T"]:
        positions, axes = layout.positions, layout.axes
        like = wider(positions)
        if self.frequencies is not None:
            theta = self._divided(self.frequencies.to(like.dtype)).unsqueeze(2)  # [A, H, 1, T]
            by_axis = positions[:, None, :, :, None]
            turns = [self._turned(by_axis[..., a, :], theta[a], [a], axes) for a in range(axes)]
            return sum(turns[1:], turns[0])
        counts, theta = self.counts(axes), self.ladders(axes, like=like)
        if not self.across_heads:
            own = [axis for axis, count in enumerate(counts) for _ in range(count)]
            return self._turned(positions[..., own], theta, own, axes)
        still = self.places - len(theta)
        theta = nn.functional.pad(theta.view(axes, -1).T.flatten(), (still, 0))
        own = [0] * still + list(range(axes)) * counts[0]
        angles = self._turned(positions[..., own], theta, own, axes)
        of_heads: Tensor = angles.reshape(*angles.shape[:2], -1, self.head_dim // 2)
        return of_heads.transpose(1, 2)

    def counts(self, axes: int) -> Sequence[int]:
        """Pairs of each axis of positions on so many.

        Raises:
            ArgumentError: if a head has fewer pairs than there are axes.
        """
        if self.pairs is not None:
            return self.pairs
        each, left = divmod(self.places, axes)
        _require(each > 0, "head_dim", f"a pair of features for each of {axes} axes", self.head_dim)
        return (each + (0 if self.across_heads else left), *[each] * (axes - 1))

    def ladders(self, axes: int, *, like: Tensor) -> Float[Tensor, " T"]:
        """Frequencies of all pairs in radians per ``step``, axis after axis, not learned."""
        counts = enumerate(self.counts(axes))
        return self._divided(torch.cat([self._ladder(axis, n, like=like) for axis, n in counts]))

    def _ladder(self, axis: int, count: int, *, like: Tensor) -> Float[Tensor, " T"]:
        """Frequencies of an axis."""
        if self.band is None:
            base = by_axis(self.base, axis + 1)[axis]
            return geometric_frequencies(count, 2 * count, base, like=like)
        first, last = self.band
        shares = [t / max(1, count - 1) for t in range(count)]
        if self.spacing == "linear":
            return constant([first + (last - first) * share for share in shares], like=like)
        return constant([first * (last / first) ** share for share in shares], like=like)

    def _divided(self, theta: Float[Tensor, "*dims T"]) -> Float[Tensor, "*dims T"]:
        return theta if self.divisors is None else theta / constant(self.divisors, like=theta)

    def _turned(self, positions: Tensor, theta: Tensor, own: Sequence[int], axes: int) -> Tensor:
        """Angles of positions, broadcast with the frequencies, of the last dimension's axes."""
        origin, step = by_axis(self.origin, axes), by_axis(self.step, axes)
        angles = angles_at(positions, theta * constant([step[axis] for axis in own], like=theta))
        if any(origin):
            start = constant([origin[axis] for axis in own], like=theta)
            angles = angles + angles_at(start, theta).to(angles.dtype)
        return angles

    def stretched(
        self, pairs: Sequence[int], divisors: Sequence[float], *, gain: float
    ) -> AxialRope:
        """A copy with these ``pairs``, ``divisors`` and ``gain``.

        Raises:
            ArgumentError: as the constructor.
        """
        changes = {"pairs": pairs, "divisors": divisors, "gain": gain}
        return AxialRope(**{**self.given, **changes})


def by_axis(value: float | Sequence[float], axes: int) -> Sequence[float]:
    """Values of so many axes, from one for all or one each."""
    return value if isinstance(value, Sequence) else (value,) * axes


def _require(holds: bool, argument: str, expected: str, got: object) -> None:
    if not holds:
        remedy = "PRESETS in posenc.encodings.query_key.axial_rope has those of released models."
        raise ArgumentError(argument, expected=expected, got=got, remedy=remedy)


IN_VIDEO: dict[str, Any] = {"pairs": (8, 28, 28)}
"""Pairs of time, height and width in heads of 128."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "wan": {},
    "hunyuan_video": IN_VIDEO | {"base": 256.0},
    "cogvideox": {"pairs": (8, 12, 12)},
    "flux": IN_VIDEO,
    "qwen_image": IN_VIDEO,
    "lumina2": {},
    "ltx_video": {
        "band": (math.pi / 2, 10000 * math.pi / 2),
        "origin": (-1.0, -1.0, -1.0),
        "step": (2 * 8 / 25 / 20, 2 * 32 / 2048, 2 * 32 / 2048),
        "across_heads": True,
    },
    "mochi": {"learned": True, "pairs": (22, 21, 21), "step": (1.0, 96.0, 96.0)},
    "cosmos": {"base": (10000 * 2 ** (44 / 42), 10000.0, 10000.0), "pairing": "half"},
    "timm": {"band": (math.pi, 112 * math.pi)},
    "dinov3": {"base": 100.0, "step": 2 * math.pi, "pairing": "half"},
    "rotary_embedding_torch": {"band": (math.pi, 5 * math.pi), "spacing": "linear"},
}
"""Options of ``axial_rope`` as released models have them, by the model or library.

Positions are indices from 0 in Wan, HunyuanVideo, CogVideoX, Flux, LTX-Video and Cosmos; in Lumina
axis 0 counts words, and all cells of the image have the next number. Others have ``Layout.cells``
with rows and columns ``"centred"`` (Qwen-Image), at ``"midpoints"`` (Mochi, DINOv3) or from end to
end (``"ends"``: timm's ``RotaryEmbeddingCat`` and rotary-embedding-torch's pixel frequencies).
Three are of one case: LTX-Video's step of time is 16 / (20 · frames per second), here at 25;
Mochi's of h rows and w columns are ``96 √(h/w)`` and ``96 √(w/h)``, here of squares, and its
frequencies are a checkpoint's ``pos_frequencies``; Cosmos's bases are of heads of 128 and its step
of time is 24 / frames per second where that is given.
"""


ENTRY = Entry(
    factory=AxialRope,
    summary="Rotates some pairs by each axis of a position, any number of axes.",
    relative=True,
    trainable=False,
    extrapolates="As RoPE on each axis: video past the trained frames repeats; can be extended.",
    cost="(Q + K)·D·H",
    sharing="layers",
)
