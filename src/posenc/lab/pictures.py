"""Pictures of what an encoding does: to the logits, with distance, and to the token vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import Encoding
from posenc.layout import Grid, Layout
from posenc.registry import create

__all__ = ["Portrait", "draw", "portray"]


@dataclass(frozen=True, eq=False)
class Portrait:
    """What a picture of an encoding is drawn from.

    Args:
        name: of the encoding.
        title: what ``matrix`` is.
        matrix: ``[H, L, L]``, query by key. For attention parts, what the encoding adds to the
            logits between tokens that are all alike (all features 1); for embeddings, the cosine
            between the vectors of two positions.
        decay: ``[H, L]``, mean of the matrix by distance back, 0 … L-1.
        vectors: ``[L, C]``, what an embedding adds at each position; None for others.
        learned: whether what is drawn are initial values that training changes.
    """

    name: str
    title: str
    matrix: Float[Tensor, "H L L"]
    decay: Float[Tensor, "H L"]
    vectors: Float[Tensor, "L C"] | None
    learned: bool


@torch.no_grad()
def portray(
    name: str,
    *,
    length: int = 48,
    heads: int = 4,
    head_dim: int = 32,
    causal: bool = False,
    **options: object,
) -> Portrait:
    """Look at an encoding of the registry.

    Args:
        name: one name, or several joined by ``+``.
        length: tokens.
        heads, head_dim: shape of the attention it is put in.
        causal: whether queries see the past only.
        **options: the method's own.

    Raises:
        UnknownNameError, ArgumentError: as ``posenc.create``.
    """
    dim = heads * head_dim
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoding = create(
            name,
            dim=dim,
            heads=heads,
            head_dim=head_dim,
            max_length=length,
            causal=causal,
            **options,
        )
    layout = Layout.sequence(length)
    learned = any(True for _ in encoding.parameters())
    if encoding.embedding is not None:
        vectors = encoding.embed(torch.zeros(1, length, dim), layout)[0]
        if not vectors.any():
            vectors = encoding.embed(torch.ones(1, length, dim), layout)[0]
        unit = torch.nn.functional.normalize(vectors, dim=-1)
        matrix = (unit @ unit.T).unsqueeze(0)
        title = "cosine between the vectors of two positions"
        return Portrait(name, title, matrix, _decay(matrix), vectors, learned)
    matrix = _logits(encoding, layout, heads, head_dim)
    title = "added to the logit between tokens that are all alike"
    return Portrait(name, title, matrix, _decay(matrix), None, learned)


def _logits(
    encoding: Encoding, layout: Layout, heads: int, head_dim: int
) -> Float[Tensor, "H L L"]:
    """Logits with the encoding less those without."""
    grid, scale = Grid.of(layout, causal=True), encoding.default_scale(head_dim)
    q = torch.ones(1, heads, layout.length, head_dim)
    k = torch.ones_like(q)
    plain = scale * q @ k.mT
    if encoding.query_key is not None:
        q, k = encoding.query_key(q, k, grid)
    logits = scale * q @ k.mT
    if encoding.score is not None:
        term = encoding.score(q, k, grid, scale=scale)
        logits = term if encoding.score.replaces_product else logits + term
    return (logits - plain).expand(1, heads, -1, -1)[0]


def _decay(matrix: Float[Tensor, "H L L"]) -> Float[Tensor, "H L"]:
    back = [
        matrix.diagonal(-distance, dim1=1, dim2=2).mean(-1) for distance in range(matrix.shape[-1])
    ]
    return torch.stack(back, dim=-1)


def draw(portrait: Portrait) -> dict[str, Any]:
    """The portrait as a Vega-Lite specification: a heat map, the decay, and the vectors if any."""
    import altair as alt
    import pandas as pd

    heads, length, _ = portrait.matrix.shape
    cells = pd.DataFrame(
        {
            "head": h + 1,
            "query": i,
            "key": j,
            "value": portrait.matrix[h, i, j].item(),
        }
        for h in range(heads)
        for i in range(length)
        for j in range(i + 1 if portrait.vectors is None else length)
    )
    most = max(portrait.matrix.abs().max().item(), 1e-9)
    signed = alt.Scale(scheme="redblue", domain=[-most, most])
    side = 300 if heads == 1 else 170
    heat = (
        alt.Chart(cells)
        .mark_rect()
        .encode(
            x=alt.X("key:O", axis=alt.Axis(values=list(range(0, length, 8)), labelAngle=0)),
            y=alt.Y("query:O", axis=alt.Axis(values=list(range(0, length, 8)))),
            color=alt.Color("value:Q", scale=signed, legend=alt.Legend(title=None)),
            tooltip=["head", "query", "key", alt.Tooltip("value", format=".3f")],
        )
        .properties(width=side, height=side)
    )
    if heads > 1:
        heat = heat.facet(alt.Facet("head:N", title="head"), columns=2)
    lines = pd.DataFrame(
        {"head": h + 1, "distance": d, "value": portrait.decay[h, d].item()}
        for h in range(heads)
        for d in range(length)
    )
    decay = (
        alt.Chart(lines)
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("distance:Q", title="tokens back"),
            y=alt.Y("value:Q", title="mean"),
            color=alt.Color("head:N", legend=None if heads == 1 else alt.Legend()),
            tooltip=["head", "distance", alt.Tooltip("value", format=".3f")],
        )
        .properties(width=340, height=300 if heads == 1 else 380, title="by distance")
    )
    panels = [heat.properties(title=portrait.title), decay]
    if portrait.vectors is not None:
        panels.append(_draw_vectors(portrait.vectors))
    note = "initial values, which training changes" if portrait.learned else ""
    title = alt.TitleParams(portrait.name, subtitle=note, fontSize=18, anchor="start")
    chart = alt.hconcat(*panels, title=title).resolve_scale(color="independent")
    spec: dict[str, Any] = chart.configure_view(stroke=None).to_dict()
    return spec


def _draw_vectors(vectors: Float[Tensor, "L C"]) -> Any:
    import altair as alt
    import pandas as pd

    length, width = vectors.shape
    step = max(1, width // 64)
    cells = pd.DataFrame(
        {"position": p, "feature": c, "value": vectors[p, c].item()}
        for p in range(length)
        for c in range(0, width, step)
    )
    most = max(vectors.abs().max().item(), 1e-9)
    features = list(range(0, width, 16 * step))
    return (
        alt.Chart(cells)
        .mark_rect()
        .encode(
            x=alt.X("feature:O", axis=alt.Axis(values=features, labelAngle=0)),
            y=alt.Y("position:O", axis=alt.Axis(values=list(range(0, length, 8)))),
            color=alt.Color(
                "value:Q",
                scale=alt.Scale(scheme="purpleorange", domain=[-most, most]),
                legend=alt.Legend(title=None),
            ),
            tooltip=["position", "feature", alt.Tooltip("value", format=".3f")],
        )
        .properties(width=300, height=300, title="the vectors themselves")
    )
