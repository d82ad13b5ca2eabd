"""Profiles: numbers that a picture is drawn from, for every method and for toy ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posenc.encoding import BucketedTerms, EmbeddingEncoding, Encoding, ScoreTerm, StructuredScore
from posenc.errors import ArgumentError, LengthError
from posenc.grid import Grid
from posenc.lab.visualization import profile as module
from posenc.lab.visualization.panels import Curves, Heat, Panel, Trail
from posenc.lab.visualization.profile import make_profile
from posenc.layout import Layout
from posenc.registry import ENCODINGS


def values(panel: Panel) -> Tensor:
    if isinstance(panel, Trail):
        return panel.points
    return panel.maps if isinstance(panel, Heat) else panel.values


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_method_has_one(name: str) -> None:
    profile = make_profile(name, length=24)
    assert any(isinstance(panel, Heat) for panel in profile.panels)
    for panel in profile.panels:
        shown = values(panel)
        assert shown.isfinite().any()
        assert not shown.isinf().any()
        if isinstance(panel, Heat | Curves):
            assert len(panel.names) == len(shown)
    assert (profile.parameters == "none") == (not ENCODINGS[name].claims.trainable)
    if ENCODINGS[name].claims.sites:
        assert any(values(p).nan_to_num(0.0).std() > 1e-6 for p in profile.panels)


def test_what_alibi_adds() -> None:
    heat, curves = make_profile("alibi", length=6, heads=4).panels
    assert heat.maps[1, 5, 2].item() == pytest.approx(-3 / 16, abs=1e-5)
    assert heat.maps[:, 2, 5].isnan().all()
    assert curves.x.tolist() == [0, 1, 2, 3, 4, 5]
    assert curves.values[0].tolist() == pytest.approx([-d / 4 for d in range(6)], abs=1e-5)
    assert curves.low is None


def test_nope_adds_nothing() -> None:
    for panel in make_profile("nope", length=8).panels:
        assert values(panel).nan_to_num(0.0).abs().max() == 0


@pytest.mark.parametrize(
    ("name", "title", "parameters"),
    [
        ("multiplicative", "The gains it multiplies by", "random"),
        ("learned", "The vectors it adds", "initial"),
        ("sinusoidal", "The vectors it adds", "none"),
    ],
)
def test_embeddings_are_named_by_what_they_do(name: str, title: str, parameters: str) -> None:
    """Gains are no additions; an identity is drawn with random values."""
    profile = make_profile(name, length=6)
    assert (profile.panels[0].title, profile.parameters) == (title, parameters)


def test_heads_that_are_the_same_are_drawn_once() -> None:
    """RoPE++ has two kinds of heads."""
    for panel in make_profile("rope_pp", length=6).panels:
        assert panel.names == ("heads 1, 3", "heads 2, 4")


def test_the_same_call_gives_the_same_profile() -> None:
    for one, two in zip(make_profile("shaw").panels, make_profile("shaw").panels, strict=True):
        assert values(one).nan_to_num(7.0).equal(values(two).nan_to_num(7.0))


def test_buckets_of_t5_are_those_of_the_paper() -> None:
    panels = {panel.title: panel for panel in make_profile("t5").panels}
    buckets = panels["Buckets"]
    assert buckets.steps
    assert buckets.values[0, :16].tolist() == list(range(16))
    assert buckets.values[0, 16:20].tolist() == [16, 16, 16, 17]
    assert buckets.values[0, -1] == 31


def test_embeddings_have_a_trail_and_dot_products() -> None:
    panels = {panel.title: panel for panel in make_profile("sinusoidal", length=16).panels}
    trail = panels["Trail of the vector"]
    assert trail.points.shape == (16, 2)
    vectors = values(panels["The vectors it adds"])[0]
    centred = vectors - vectors.mean(0)
    assert trail.points.var(0).sum() <= centred.var(0).sum() + 1e-4
    alike = values(panels["How alike two positions are"])[0]
    assert alike.diagonal() == pytest.approx(torch.ones(16))
    assert alike.equal(alike.T) or alike == pytest.approx(alike.T, abs=1e-6)


def toy(monkeypatch: pytest.MonkeyPatch, encoding: Encoding) -> tuple[Panel, ...]:
    monkeypatch.setattr(module, "create", lambda name, **options: encoding)
    return make_profile("toy", length=12, heads=2, head_dim=4).panels


class Turning(EmbeddingEncoding):
    """Complex vectors whose every feature turns by π/6 a token."""

    def forward(self, x: Tensor, layout: Layout, *, tokens: Tensor | None = None) -> Tensor:
        angle = math.pi / 6 * layout.positions
        return x + torch.polar(torch.ones_like(angle), angle)


def test_complex_vectors_show_their_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    panels = toy(monkeypatch, Encoding(embedding=Turning()))
    phases = panels[0]
    assert phases.values == "angles"
    assert phases.maps[0, 3, 0].item() == pytest.approx(math.pi / 2)
    trail = panels[-1]
    radii = trail.points.norm(dim=-1)
    assert radii == pytest.approx(radii[:1].expand(12), rel=1e-4)


class TurningHalves(EmbeddingEncoding):
    """Turns features by π/6 a token, real parts in the first half, imaginary in the second."""

    def forward(self, x: Tensor, layout: Layout, *, tokens: Tensor | None = None) -> Tensor:
        angle = math.pi / 6 * layout.positions
        turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1)


def test_halves_that_turn_are_complex_too(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = toy(monkeypatch, Encoding(embedding=TurningHalves()))[0]
    assert phases.values == "angles"
    assert phases.maps.shape == (1, 12, 4)
    assert phases.maps[0, 2].tolist() == pytest.approx([math.pi / 3] * 4, abs=1e-5)


class Near(ScoreTerm):
    """Minus the number of rows between two cells, for images of at most 8 rows."""

    axes = (2,)

    def forward(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
        if grid.query.length > 64:
            raise LengthError("image", expected="8×8", got="more", remedy="Shrink it.")
        return -grid.offset[..., 0].abs().unsqueeze(1)


def test_on_two_axes_there_are_maps_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    heat = toy(monkeypatch, Encoding(score=Near()))[0]
    assert heat.names == ("query: middle", "query: corner")
    assert heat.maps.shape == (2, 8, 8)
    assert heat.maps[0, :, 3].tolist() == pytest.approx([-4, -3, -2, -1, 0, -1, -2, -3], abs=1e-4)


class Cube(Near):
    axes = (3,)


class Both(Near):
    axes = (1, 2)


def test_three_axes_show_one_frame_and_both_kinds_a_map_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heat = toy(monkeypatch, Encoding(score=Cube()))[0]
    assert heat.maps.abs().max() == 0
    both = toy(monkeypatch, Encoding(score=Both()))
    assert [values(panel).shape[-1] for panel in both] == [12, 12, 8]


def test_refusals() -> None:
    for wrong, message in (({"length": 1}, "2 or more"), ({"options": {"base": 0.5}}, "base")):
        with pytest.raises(ArgumentError, match=message):
            make_profile("rope", **wrong)


class Digits(EmbeddingEncoding):
    """One where a token is a digit."""

    def forward(self, x: Tensor, layout: Layout, *, tokens: Tensor | None = None) -> Tensor:
        return x + ((tokens >= 48) & (tokens <= 57)).unsqueeze(-1).to(x)


def test_what_reads_the_text_is_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = toy(monkeypatch, Encoding(embedding=Digits()))[0]
    assert "48213+70954" in panel.note
    assert panel.maps[0, :, 0].tolist() == [1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]


class Single(Near):
    """All offsets in one bucket."""

    axes = (1,)

    def lower(self, *args: object, scale: float) -> tuple[StructuredScore, ...]:
        def bucket(offset: Tensor) -> Tensor:
            return torch.zeros_like(offset[..., 0]).long()

        return (BucketedTerms(bucket, max_distance=4),)


def test_one_bucket_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    titles = [panel.title for panel in toy(monkeypatch, Encoding(score=Single()))]
    assert "Buckets" not in titles
