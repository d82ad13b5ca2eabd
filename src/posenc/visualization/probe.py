"""One encoding among tokens, looked at from its parts."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.encoding import BucketedTerms, Encoding, StructuredScore
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.visualization.panels import Curves, Heat, Panel, Trail

__all__ = ["EncodingProbe"]

SHOWN_HEADS = 2
"""Heads whose view of an image is shown."""

SHOWN_FEATURES = 4
"""Features of an image's vectors that are shown as maps."""

DRAWS, IMAGE_DRAWS = 16, 8
"""Number of random contents that are averaged over."""

OWN_SHARE = 0.1
"""Share of a token's content (its variance) that it does not have in common with the others."""

SUM = b"48213+70954=119167; "
"""Text read by methods that see no position in a text of one word."""

ROUNDING = 1e-5
"""Smaller shares of the largest logit are rounding errors of a difference."""

BAND = (0.1, 0.9)

FARTHEST = 1.25
"""Buckets are shown up to so many times the distance beyond which there is but one."""


class EncodingProbe:
    """An encoding among random tokens that never change.

    Args:
        encoding: what is looked at.
        layout: where the tokens are: a sequence, or the cells of a square image in raster order.
        heads, head_dim: shape of the attention it is put in.
        causal: whether queries see the past only.
    """

    def __init__(
        self, encoding: Encoding, layout: Layout, heads: int, head_dim: int, *, causal: bool = False
    ) -> None:
        self.encoding, self.heads, self.head_dim = encoding, heads, head_dim
        self.causal, self.layout = causal, layout
        self.flat = layout.axes == 1
        self.side = math.isqrt(layout.length)
        generator = torch.Generator().manual_seed(0)
        draws = DRAWS if self.flat else IMAGE_DRAWS
        common = torch.randn(draws, 1, 1, head_dim, generator=generator)
        own = torch.randn(draws, self.layout.length, 1, head_dim, generator=generator)
        content = (1 - OWN_SHARE) ** 0.5 * common + OWN_SHARE**0.5 * own
        # Heads get the same content, so that they differ by what the encoding does alone.
        self.x = content.expand(-1, -1, heads, -1).flatten(2)
        self.grid = Grid.of(encoding.observe(self.x, self.layout), causal=self.causal)

    def panels(self) -> Iterable[Panel]:
        """Everything that the parts have to show, the embedding part first."""
        if self.encoding.embedding is not None:
            yield from self._embedding()
        others = (self.encoding.query_key, self.encoding.score, self.encoding.value)
        if self.encoding.query_key or self.encoding.score or not self.encoding.parts():
            yield from self._logits()
        if any(part is not None for part in others):
            yield from self._buckets()
        if self.encoding.value is not None:
            yield self._values()

    def _embedding(self) -> Iterable[Panel]:
        vectors, what, text = self._vectors()
        yield from self._features(vectors, what, f"each row is that of one position{text}")
        units = nn.functional.normalize(vectors, dim=-1)
        alike = _real(units @ units.mH).unsqueeze(0)
        yield self._map(
            alike,
            ("",),
            title="How alike two positions are",
            note="dot product of their vectors, scaled to length 1",
            rows="position",
            columns="other position",
        )
        yield _by_distance(
            alike.unsqueeze(0),
            self._distances().abs(),
            ("",),
            title="… by distance",
            x_label="tokens apart" if self.flat else "cells apart",
            y_label="dot product",
        )
        if self.flat:
            yield _trail(vectors)

    def _features(self, vectors: Tensor, what: str, note: str) -> Iterable[Panel]:
        """The vectors themselves."""
        if not self.flat:
            last = vectors.shape[-1] - 1
            chosen = [last * n // (SHOWN_FEATURES - 1) for n in range(SHOWN_FEATURES)]
            yield Heat(
                title=f"Features of the {what}",
                note="each map is one feature over the image",
                maps=_real(vectors)[:, chosen].T.reshape(-1, self.side, self.side),
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
                names=("",),
                rows="position",
                columns="feature",
                values="angles",
            )
        yield Heat(
            title="Real parts of the vectors" if vectors.is_complex() else f"The {what}",
            note=note,
            maps=_real(vectors).unsqueeze(0),
            names=("",),
            rows="position",
            columns="feature",
        )

    def _vectors(self) -> tuple[Tensor, str, str]:
        """Vectors added by the embedding part at each position, ``[L, C]``, real or complex.

        Also what that is, and in what text if that matters.

        Its gains, if it adds nothing to zero. All words are the same, unless that leaves nothing
        to see: some methods read the text, and are given sums of numbers.
        """
        zeros = torch.zeros_like(self.x[:1])
        word = torch.zeros(1, self.layout.length, dtype=torch.long)
        vectors = self.encoding.embed(zeros, self.layout, tokens=word)[0]
        what = "vectors it adds"
        if not bool(vectors.any()):
            vectors, what = self._gains(zeros, word), "gains it multiplies by"
        told = ""
        if bool((vectors == vectors[:1]).all()):
            told = f" of the text “{SUM.decode().strip()}”, repeated"
            text = torch.tensor([list(SUM)]).repeat(1, -(-self.layout.length // len(SUM)))
            text = text[:, : self.layout.length]
            vectors = self.encoding.embed(zeros, self.layout, tokens=text)[0]
        return vectors if vectors.is_complex() else vectors.float(), what, told

    def _gains(self, zeros: Tensor, word: Tensor) -> Tensor:
        """Factors of a part that multiplies: its output for ones.

        If it turns pairs of real and imaginary halves, of complex ones, as complex numbers.
        """
        units = zeros.clone()
        units[..., : units.shape[-1] // 2] = 1
        turned = self.encoding.embed(units, self.layout, tokens=word)[0].float()
        turns = torch.complex(*turned.chunk(2, dim=-1))
        if turns.imag.abs().max() > 1e-3 and (turns.abs() - 1).abs().max() < 1e-4:
            return turns
        return self.encoding.embed(torch.ones_like(zeros), self.layout, tokens=word)[0]

    def _logits(self) -> Iterable[Panel]:
        added = self._added()
        content = bool((added.std(0) > 1e-4 * added.abs().max()).any())
        added, names = _distinct_heads(added)
        hidden = ~self.grid.visible[0, 0]
        about = "between random tokens, 90 % alike" if content else "whatever the tokens are"
        if content and not self.flat:
            about = f"mean over random contents ({about.removeprefix('between ')})"
        yield self._map(
            (added[0] if self.flat else added.mean(0)).masked_fill(hidden, math.nan),
            names,
            title="Added to the logits",
            note=about,
            rows="query",
            columns="key",
        )
        distances = self._distances()
        yield _by_distance(
            added,
            distances.masked_fill(hidden, torch.iinfo(torch.long).max),
            names,
            title="… by distance",
            x_label=self._distance_label(),
            y_label="added to the logit",
        )

    def _added(self) -> Float[Tensor, "B H L L"]:
        """Logits with the encoding less those without."""
        encoding, grid = self.encoding, self.grid
        scale = encoding.default_scale(self.head_dim)
        q = self.x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        k, plain = q, scale * q @ q.mT
        if encoding.query_key is not None:
            q, k = encoding.query_key(q, k, grid)
        logits = scale * _real(q @ k.mH)
        if encoding.score is not None:
            term: Tensor = encoding.score(q, k, grid, scale=scale)
            logits = term if encoding.score.replaces_product else logits + term
        added: Tensor = (logits - plain).float()
        return added.masked_fill(added.abs() < ROUNDING * plain.abs().max(), 0.0)

    def _values(self) -> Panel:
        assert self.encoding.value is not None  # callers have looked
        length = self.layout.length
        one_key = torch.eye(length).reshape(length, 1, 1, length)
        weights = one_key.expand(-1, self.heads, length, -1)
        vectors: Tensor = self.encoding.value(weights, self.grid)
        added, names = _distinct_heads(vectors.norm(dim=-1).movedim(0, -1).unsqueeze(0))
        return self._map(
            added[0].masked_fill(~self.grid.visible[0, 0], math.nan),
            names,
            title="Length of the vector it adds to a value",
            note="",
            rows="query",
            columns="key",
        )

    def _buckets(self) -> Iterable[Panel]:
        q = self.x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        scale = self.encoding.default_scale(self.head_dim)
        lowered: list[StructuredScore | None] = []
        if self.encoding.score is not None:
            lowered += self.encoding.score.lower(q, q, self.grid, scale=scale) or ()
        elif self.encoding.value is not None:
            lowered += [self.encoding.value.lower(self.grid)]
        for group in lowered:
            if isinstance(group, BucketedTerms) and group.max_distance is not None and self.flat:
                far = math.ceil(FARTHEST * group.max_distance)
                distance = torch.arange(0 if self.causal else -far, far + 1)
                offset = -distance if self.causal else distance
                bucket = group.bucket(offset.to(torch.float32).unsqueeze(-1))
                if bool((bucket == bucket[0]).all()):
                    continue
                yield Curves(
                    title="Buckets",
                    note="all distances on a step share what is learned",
                    x=distance.to(torch.float32),
                    x_label=self._distance_label(),
                    values=bucket.to(torch.float32).unsqueeze(0),
                    y_label="bucket",
                    names=("",),
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
        """The matrix itself, or on two axes what chosen queries see in the image."""
        if self.flat:
            return Heat(
                title=title, note=note, maps=matrix, names=names, rows=rows, columns=columns
            )
        middle, corner = self.side // 2, self.side // 7
        cells = {
            "middle": middle * self.side + middle,
            "corner": corner * self.side + corner,
        }
        shown = list(zip(matrix, names, strict=True))[:SHOWN_HEADS]
        maps = torch.stack([one[cell] for one, _ in shown for cell in cells.values()])
        labels = tuple(f"{name} {rows}: {cell}".strip() for _, name in shown for cell in cells)
        return Heat(
            title=title,
            note=note,
            maps=maps.reshape(len(maps), self.side, self.side),
            names=labels,
            rows="row",
            columns="column",
        )


def _real(x: Tensor) -> Tensor:
    return x.real if x.is_complex() else x


def _trail(vectors: Tensor) -> Trail:
    """The vectors along the two directions in which they differ most."""
    flat = torch.view_as_real(vectors).flatten(1) if vectors.is_complex() else vectors
    centred = (flat - flat.mean(0)).double()
    _, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
    energy = sizes.square()
    shares = energy / energy.sum().clamp(min=1e-12)
    labels = [
        f"{nth} direction ({share:.0%})"
        for nth, share in zip(("1st", "2nd"), shares[:2].tolist(), strict=True)
    ]
    return Trail(
        title="Trail of the vector",
        note="along the two directions in which vectors differ most (share of their variance)",
        points=(centred @ directions[:2].T).float(),
        x_label=labels[0],
        y_label=labels[1],
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
    title: str,
    x_label: str,
    y_label: str,
) -> Curves:
    """Means over pairs and contents, with a band if they are not all alike."""
    steps: Tensor = torch.unique(distances)
    steps = steps[steps < torch.iinfo(torch.long).max]
    share = torch.tensor(BAND)
    means, bands = [], []
    for step in steps:
        found = values[:, :, distances == step].movedim(1, 0).flatten(1)
        means.append(found.mean(-1))
        bands.append(found.quantile(share, dim=-1))
    mean, band = torch.stack(means, -1), torch.stack(bands, -1)
    spread = bool((band[1] - band[0] > 1e-3 * values.abs().max()).any())
    return Curves(
        title=title,
        note="mean; shaded: 80 % of pairs" if spread else "",
        x=steps.to(torch.float32),
        x_label=x_label,
        values=mean,
        y_label=y_label,
        names=names,
        low=band[0] if spread else None,
        high=band[1] if spread else None,
    )
