"""Profile of an encoding: the panels of its picture.

They follow from the encoding's parts alone:

- an embedding part: its vectors (phases if complex), their similarity by pair and by distance, and
  their trail in a plane;
- attention parts: terms added to the logits, by pair and by distance;
- a part with fewer buckets than distances: its buckets;
- a value part: the length of the vectors added to values;
- on several axes, maps over the cells of an image for chosen queries instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.encoding import BucketedTerms, Encoding, StructuredScore, ValueTransform
from posenc.errors import ArgumentError, LengthError
from posenc.grid import Grid
from posenc.lab.visualization.panels import Curves, Heat, Panel, Profile, Trail
from posenc.layout import Layout
from posenc.registry import ENCODINGS, create

SIDES = (15, 8, 7, 4)
"""Cells a side of the image for methods on several axes: the first that they serve."""

SPREAD = 0.3
"""Standard deviation of the values given to parameters that all start as the identity."""


@torch.no_grad()
def make_profile(
    name: str,
    *,
    length: int = 48,
    heads: int = 4,
    head_dim: int = 32,
    causal: bool = True,
    options: Mapping[str, object] | None = None,
) -> Profile:
    """The profile of an encoding of the registry; deterministic.

    Args:
        name: one name, or several joined by ``+``.
        length: tokens.
        heads, head_dim: shape of the attention it is put in.
        causal: whether queries see the past only; images are always seen whole.
        options: the method's own.

    Raises:
        UnknownNameError, ArgumentError: as ``posenc.create``; also ArgumentError for a length
            below 2, or a method that is made for causal attention and is not to be in it.
    """
    if length < 2:
        raise ArgumentError("length", expected="2 or more", got=length, remedy="48 is usual.")
    shape = {"dim": heads * head_dim, "heads": heads, "head_dim": head_dim, "max_length": length}
    chosen: dict[str, Any] = dict(options or {})

    def make(axes: int) -> Encoding:
        sided = causal and axes == 1
        extra: dict[str, Any] = {"axes": axes} if _has_axes(name) and "axes" not in chosen else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            encoding = create(name, causal=sided, **shape, **chosen, **extra)
        _attach(encoding, heads * head_dim)
        return encoding

    made = [(axes, make(axes)) for axes in _axes(name, chosen, make)]
    if not causal and any(encoding.causal_only for _, encoding in made):
        raise ArgumentError(
            "causal",
            expected=f"causal attention, the only kind that {name} is made for",
            got="attention to both sides",
            remedy="Leave out --bidirectional.",
        )

    def look() -> tuple[Panel, ...]:
        panels: list[Panel] = []
        for axes, encoding in made:
            if axes == 1:
                layout = Layout.sequence(length)
                panels += EncodingProbe(encoding, layout, heads, head_dim, causal=causal).panels()
            else:
                images = _image_panels(encoding, axes, heads, head_dim)
                panels += [panel for panel in images if not panels or isinstance(panel, Heat)]
        return tuple(panels)

    parameters = [p for _, encoding in made for p in encoding.parameters()]
    panels = look()
    if not parameters:
        return Profile(name=name, panels=panels, parameters="none")
    if not all(_blank(panel) for panel in panels):
        return Profile(name=name, panels=panels, parameters="initial")
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter.add_(SPREAD * torch.randn(parameter.shape, generator=generator))
    return Profile(name=name, panels=look(), parameters="random")


def _has_axes(name: str) -> bool:
    """True if the number of axes is an option of the method."""
    return name in ENCODINGS and "axes" in ENCODINGS[name].options()


def _axes(
    name: str, options: Mapping[str, object], make: Callable[[int], Encoding]
) -> tuple[int, ...]:
    """Numbers of position axes to plot: 1 for a sequence, 2 for an image where it serves both."""
    if _has_axes(name):
        axes = options.get("axes")
        served = [n for n in (1, 2) if ENCODINGS[name].claims.serves(n)]
        return (axes,) if isinstance(axes, int) else tuple(served)
    parts = make(1).parts()
    served = [n for n in (1, 2, 3) if all(part.axes is None or n in part.axes for part in parts)]
    if any(part.axes is not None for part in parts) and served[:2] == [1, 2]:
        return (1, 2)
    return tuple(served[:1])


def _attach(encoding: Encoding, dim: int) -> None:
    """Attach identity projections to the parts."""
    projection = nn.Linear(dim, dim, bias=False)
    nn.init.eye_(projection.weight)
    for part in encoding.parts():
        part.attach(projection, projection)


def _image_panels(encoding: Encoding, axes: int, heads: int, head_dim: int) -> list[Panel]:
    """Panels on the largest image that the encoding serves."""
    for side in SIDES:
        try:
            return list(EncodingProbe(encoding, _image(side, axes), heads, head_dim).panels())
        except LengthError:
            if side == SIDES[-1]:
                raise
    return []


def _image(side: int, axes: int) -> Layout:
    """The cells of an image; with more axes than two, of the first of many."""
    cells = Layout.image(side, side)
    if axes == cells.axes:
        return cells
    return Layout.at(nn.functional.pad(cells.positions, (axes - cells.axes, 0)))


def _blank(panel: Panel) -> bool:
    """True if a panel has one value everywhere."""
    if isinstance(panel, Trail):
        values = panel.points - panel.points[:1]
    else:
        values = panel.maps if isinstance(panel, Heat) else panel.values
    numbers = values[~values.isnan()]
    return bool((numbers.amax() - numbers.amin()) < 1e-6)


SHOWN_HEADS = 2
"""Heads whose view of an image is shown."""

SHOWN_FEATURES = 4
"""Features of an image's vectors that are shown as maps."""

DRAWS, IMAGE_DRAWS = 16, 8
"""Numbers of random contents that are averaged over."""

INDIVIDUAL_SHARE = 0.1
"""Share of the variance of a token's content that it does not share with the others."""

SUM = b"48213+70954=119167; "
"""Text for methods that see no position in a text of one word."""

ROUNDING = 1e-5
"""Smaller shares of the largest logit are rounding errors of a difference."""

BAND = (0.1, 0.9)

FARTHEST = 1.25
"""Buckets are shown up to this multiple of the distance beyond which there is only one."""

HIDDEN = torch.iinfo(torch.long).max
"""Distance of pairs that are not visible."""


class EncodingProbe:
    """An encoding among fixed random tokens.

    Args:
        encoding: the encoding.
        layout: positions of the tokens: a sequence, or the cells of a square image in raster order.
        heads, head_dim: shape of the attention.
        causal: use a causal mask.
    """

    def __init__(
        self, encoding: Encoding, layout: Layout, heads: int, head_dim: int, *, causal: bool = False
    ) -> None:
        self.encoding, self.layout, self.causal = encoding, layout, causal
        self.heads = heads
        self.flat = layout.axes == 1
        self.side = math.isqrt(layout.length)
        generator = torch.Generator().manual_seed(0)
        draws = DRAWS if self.flat else IMAGE_DRAWS
        common = torch.randn(draws, 1, 1, head_dim, generator=generator)
        individual = torch.randn(draws, layout.length, 1, head_dim, generator=generator)
        content = (1 - INDIVIDUAL_SHARE) ** 0.5 * common + INDIVIDUAL_SHARE**0.5 * individual
        # All heads get the same content, so that only the encoding tells them apart.
        self.x = content.expand(-1, -1, heads, -1).flatten(2)  # [draws, L, C]
        self.q = self.x.unflatten(-1, (heads, head_dim)).transpose(1, 2)  # [draws, H, L, D]
        self.scale = encoding.default_scale(head_dim)
        self.grid = Grid.of(encoding.observe(self.x, layout), causal=causal)
        self.hidden = ~self.grid.visible[0, 0]

    def panels(self) -> Iterable[Panel]:
        """All panels of the parts, those of the embedding part first."""
        encoding = self.encoding
        if encoding.embedding is not None:
            yield from self._embedding()
        if encoding.query_key or encoding.score or not encoding.parts():
            yield from self._logits()
        yield from self._buckets()
        if encoding.value is not None:
            yield self._values()

    def _embedding(self) -> Iterable[Panel]:
        vectors, name, text = self._vectors()
        yield from self._features(vectors, name, f"each row is that of one position{text}")
        units = nn.functional.normalize(vectors, dim=-1)
        alike = (units @ units.mH).real.unsqueeze(0)
        yield self._map(
            alike,
            ("",),
            title="How alike two positions are",
            note="dot product of their vectors, scaled to length 1",
            rows="position",
            columns="other position",
        )
        yield _by_distance(
            alike.unsqueeze(0),
            self._distances().abs(),
            ("",),
            x_label="tokens apart" if self.flat else "cells apart",
            y_label="dot product",
        )
        if self.flat:
            yield _trail(vectors)

    def _features(self, vectors: Tensor, name: str, note: str) -> Iterable[Panel]:
        """The vectors themselves."""
        if not self.flat:
            last = vectors.shape[-1] - 1
            chosen = [last * n // (SHOWN_FEATURES - 1) for n in range(SHOWN_FEATURES)]
            yield Heat(
                title=f"Features of the {name}",
                note="each map is one feature over the image",
                maps=vectors.real[:, chosen].T.reshape(-1, self.side, self.side),
                names=tuple(f"feature {n}" for n in chosen),
                rows="row",
                columns="column",
            )
            return
        if vectors.is_complex():
            yield Heat(
                title="Phases of the vectors",
                note=f"{note}, in radians",
                maps=vectors.angle().unsqueeze(0),
                rows="position",
                columns="feature",
                values="angles",
            )
        yield Heat(
            title="Real parts of the vectors" if vectors.is_complex() else f"The {name}",
            note=note,
            maps=vectors.real.unsqueeze(0),
            rows="position",
            columns="feature",
        )

    def _vectors(self) -> tuple[Tensor, str, str]:
        """Vectors of the embedding part ``[L, C]``, real or complex, their name, and their text.

        They are its gains if it adds nothing to zero. All words are the same, unless the vectors
        would be equal too: some methods read the text, and are given sums of numbers.
        """
        length = self.layout.length
        zeros = torch.zeros_like(self.x[:1])
        word = torch.zeros(1, length, dtype=torch.long)
        vectors, name, note = self._embed(zeros, word), "vectors it adds", ""
        if not bool(vectors.any()):
            vectors, name = self._gains(zeros, word), "gains it multiplies by"
        if bool((vectors == vectors[:1]).all()):
            note = f" of the text “{SUM.decode().strip()}”, repeated"
            text = torch.tensor([list(SUM)]).repeat(1, -(-length // len(SUM)))[:, :length]
            vectors = self._embed(zeros, text)
        return vectors if vectors.is_complex() else vectors.float(), name, note

    def _embed(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.encoding.embed(x, self.layout, tokens=tokens)[0]

    def _gains(self, zeros: Tensor, word: Tensor) -> Tensor:
        """Factors of a part that multiplies: complex ones if it rotates, else its output for ones.

        Rotated pairs are real and imaginary halves.
        """
        units = zeros.clone()
        units[..., : units.shape[-1] // 2] = 1
        rotations = torch.complex(*self._embed(units, word).float().chunk(2, dim=-1))
        if rotations.imag.abs().max() > 1e-3 and (rotations.abs() - 1).abs().max() < 1e-4:
            return rotations
        return self._embed(torch.ones_like(zeros), word)

    def _logits(self) -> Iterable[Panel]:
        added = self._added()
        content = bool((added.std(0) > 1e-4 * added.abs().max()).any())
        added, names = _distinct_heads(added)
        note = "between random tokens, 90 % alike" if content else "whatever the tokens are"
        if content and not self.flat:
            note = "mean over random contents (random tokens, 90 % alike)"
        yield self._map(
            (added[0] if self.flat else added.mean(0)).masked_fill(self.hidden, math.nan),
            names,
            title="Added to the logits",
            note=note,
            rows="query",
            columns="key",
        )
        yield _by_distance(
            added,
            self._distances().masked_fill(self.hidden, HIDDEN),
            names,
            x_label=self._distance_label(),
            y_label="added to the logit",
        )

    def _added(self) -> Float[Tensor, "B H L L"]:
        """Logits with the encoding minus those without."""
        encoding, grid, scale = self.encoding, self.grid, self.scale
        q, k, plain = self.q, self.q, scale * self.q @ self.q.mT
        if encoding.query_key is not None:
            q, k = encoding.query_key(q, k, grid)
        logits = scale * (q @ k.mH).real
        if encoding.score is not None:
            term: Tensor = encoding.score(q, k, grid, scale=scale)
            logits = term if encoding.score.replaces_product else logits + term
        added: Tensor = (logits - plain).float()
        return added.masked_fill(added.abs() < ROUNDING * plain.abs().max(), 0.0)

    def _values(self) -> Panel:
        assert self.encoding.value is not None  # callers have looked
        if isinstance(self.encoding.value, ValueTransform):
            return self._turned_values(self.encoding.value)
        length = self.layout.length
        one_key = torch.eye(length).reshape(length, 1, 1, length)
        weights = one_key.expand(-1, self.heads, length, -1)
        vectors: Tensor = self.encoding.value(weights, self.grid)
        added, names = _distinct_heads(vectors.norm(dim=-1).movedim(0, -1).unsqueeze(0))
        return self._map(
            added[0].masked_fill(self.hidden, math.nan),
            names,
            title="Length of the vector it adds to a value",
            note="",
            rows="query",
            columns="key",
        )

    def _turned_values(self, transform: ValueTransform) -> Panel:
        """The direction in which values arrive at queries."""
        length = self.layout.length
        ones = torch.ones(1, 1, length, transform.head_dim or self.q.shape[-1])
        of_keys = transform(ones, self.layout).movedim(2, 0).expand(-1, -1, length, -1)
        cosines = transform.undo(of_keys, self.layout).mean(dim=-1)  # [K, 1, Q]
        return self._map(
            cosines.movedim(0, -1).masked_fill(self.hidden, math.nan),
            ("",),
            title="Direction in which a value arrives",
            note="cosine of its angle to the value, of a value of ones",
            rows="query",
            columns="key",
        )

    def _buckets(self) -> Iterable[Panel]:
        """Bucket by distance of the first term with fewer buckets than distances."""
        terms: list[StructuredScore | None] = []
        if self.encoding.score is not None:
            terms += self.encoding.score.lower(self.q, self.q, self.grid, scale=self.scale) or ()
        elif self.encoding.value is not None:
            terms.append(self.encoding.value.lower(self.grid))
        for term in terms:
            if not (isinstance(term, BucketedTerms) and term.max_distance and self.flat):
                continue
            far = math.ceil(FARTHEST * term.max_distance)
            distance = torch.arange(0 if self.causal else -far, far + 1).float()
            bucket = term.bucket((-distance if self.causal else distance).unsqueeze(-1))
            if bool((bucket == bucket[0]).all()):
                continue
            yield Curves(
                title="Buckets",
                note="all distances on a step share what is learned",
                x=distance,
                x_label=self._distance_label(),
                values=bucket.float().unsqueeze(0),
                y_label="bucket",
                steps=True,
            )
            return

    def _distances(self) -> Int[Tensor, "L L"]:
        """Tokens back (causal), Δ, or cells apart, of every pair."""
        offset = self.grid.offset[0]
        if not self.flat:
            far: Tensor = offset.norm(dim=-1)
            return far.round().long()
        return (-offset if self.causal else offset)[..., 0].long()

    def _distance_label(self) -> str:
        if not self.flat:
            return "cells apart"
        return "tokens back" if self.causal else "position of the key less that of the query"

    def _map(
        self,
        matrix: Float[Tensor, "N L L"],
        names: tuple[str, ...],
        *,
        title: str,
        note: str,
        rows: str,
        columns: str,
    ) -> Heat:
        """The matrix itself, or for images the rows of two chosen queries as maps."""
        if not self.flat:
            side = self.side
            cells = {"middle": side // 2 * (side + 1), "corner": side // 7 * (side + 1)}
            names, matrix = names[:SHOWN_HEADS], matrix[:SHOWN_HEADS, list(cells.values())]
            names = tuple(f"{name} {rows}: {cell}".strip() for name in names for cell in cells)
            matrix, rows, columns = matrix.reshape(-1, side, side), "row", "column"
        return Heat(title=title, note=note, maps=matrix, names=names, rows=rows, columns=columns)


def _trail(vectors: Tensor) -> Trail:
    """The vectors along the two directions in which they differ most."""
    flat = torch.view_as_real(vectors).flatten(1) if vectors.is_complex() else vectors
    centred = (flat - flat.mean(0)).double()
    _, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
    energy = sizes.square()
    first, second = (energy / energy.sum().clamp(min=1e-12))[:2].tolist()
    return Trail(
        title="Trail of the vector",
        note="along the two directions in which vectors differ most (share of their variance)",
        points=(centred @ directions[:2].T).float(),
        x_label=f"1st direction ({first:.0%})",
        y_label=f"2nd direction ({second:.0%})",
    )


def _distinct_heads(
    added: Float[Tensor, "B H L L"],
) -> tuple[Float[Tensor, "B H L L"], tuple[str, ...]]:
    """The heads that differ, each named with those that are the same."""
    alike: dict[int, list[int]] = {}
    for head in range(added.shape[1]):
        same = (of for of in alike if torch.allclose(added[:, of], added[:, head], atol=1e-6))
        alike.setdefault(next(same, head), []).append(head + 1)
    if len(alike) == 1:
        return added[:, :1], ("",)
    names = (f"head{'s' * (len(n) > 1)} {', '.join(map(str, n))}" for n in alike.values())
    return added[:, list(alike)], tuple(names)


def _by_distance(
    values: Float[Tensor, "B N L L"],
    distances: Int[Tensor, "L L"],
    names: tuple[str, ...],
    *,
    x_label: str,
    y_label: str,
) -> Curves:
    """Means over pairs and contents, with a band if they are not all alike."""
    steps: Tensor = torch.unique(distances)
    steps = steps[steps < HIDDEN]
    groups = [values[:, :, distances == step].movedim(1, 0).flatten(1) for step in steps]
    mean = torch.stack([group.mean(-1) for group in groups], -1)
    low, high = torch.stack([group.quantile(torch.tensor(BAND), dim=-1) for group in groups], -1)
    spread = bool((high - low > 1e-3 * values.abs().max()).any())
    return Curves(
        title="… by distance",
        note="mean, and 80 % of pairs shaded" if spread else "",
        x=steps.float(),
        x_label=x_label,
        values=mean,
        y_label=y_label,
        names=names,
        low=low if spread else None,
        high=high if spread else None,
    )
