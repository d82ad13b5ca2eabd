"""Layouts, grids and encodings in a line of text and in notebooks."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, ScoreTerm

LAYOUTS = {
    "sequence": Layout.sequence(5000, 7),
    "packed": Layout.packed([700, 324]),
    "left padded": Layout.padded([3, 0, 9], side="left"),
    "image": Layout.image(14, 14, prefix=1, valid=torch.ones(2, 14, 14, dtype=torch.bool)),
    "times": Layout.at(torch.tensor([0.5, 2.0, 7.25], requires_grad=True)),
    "three axes": Layout.at(torch.rand(2, 6, 3, generator=torch.Generator().manual_seed(0))),
    "one": Layout.sequence(1),
    "empty": Layout.sequence(4).slice(2, 2),
}


class Balanced(HTMLParser):
    """Counts what is opened and never closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(html: str) -> None:
    """Small, whole, without scripts or addresses, in the colours of the paper it is on."""
    Balanced(html)
    assert len(html) < 60_000
    assert not re.search(r"<script|<style|href=|src=|url\(", html)
    fills = set(re.findall(r'(?:fill|stroke)="([^"]+)"', html))
    assert not fills & {"black", "white", "#000000", "#ffffff"}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_and_grids(layout: Layout) -> None:
    grid = Grid(layout.slice(0, 3), layout, causal=True, window=9)
    assert repr(grid) == f"Grid(query={grid.query}, key={layout}, causal=True, window=9)"
    assert repr(Grid.of(layout)) == f"Grid.of({layout}, causal=False)"
    for shown in (layout, grid, Grid.of(layout)):
        assert len(repr(shown)) < 300
        assert "tensor(" not in repr(shown)
        check(shown._repr_html_())


def test_a_line_says_what_a_layout_has() -> None:
    assert repr(Layout.sequence(5)) == "Layout(length=5, batch=1, axes=1, start=0)"
    assert repr(Layout.padded([2, 3])) == "Layout(length=3, batch=2, axes=1, valid=…)"
    image = Layout.image(2, 3).to("meta")
    assert repr(image) == "Layout(length=6, batch=1, axes=2, extent=(2, 3), device=meta)"


def test_a_map_shows_who_sees_whom() -> None:
    """Rectangles are runs of visible keys: under a causal mask, one as long as the row number."""
    html = Grid.of(Layout.sequence(3), causal=True)._repr_html_()
    widths = [float(w) for w in re.findall(r'<rect x="14.00" y="[\d.]+" width="([\d.]+)"', html)]
    assert widths == [64.0, 128.0, 192.0]
    apart = Grid.of(Layout.packed([2, 1]))._repr_html_()
    assert len(re.findall("<rect x=", apart)) == 1 + 3


def test_more_tokens_than_cells_are_drawn_evenly() -> None:
    html = Layout.packed([700, 324])._repr_html_()
    assert html.count("<circle") == 64
    assert "Shown: 64 of 1,024 tokens." in html
    assert "the first of 3 rows" in Layout.padded([1, 2, 3])._repr_html_()


@pytest.mark.parametrize("name", [*posenc.ENCODINGS, "rope+alibi"])
def test_encodings(name: str) -> None:
    encoding = posenc.create(name, dim=64, heads=4, max_length=16)
    html = encoding._repr_html_()
    check(html)
    for part in encoding.parts():
        assert f'<td style="text-align:left;padding:2px 12px 2px 0">{type(part).__name__}' in html


def test_words_of_others_are_escaped() -> None:
    class Marked(ScoreTerm):
        def extra_repr(self) -> str:
            return "<script>alert(1)</script>"

        def forward(
            self, q: Tensor, k: Tensor, grid: Grid, *, scale: float
        ) -> Tensor:  # pragma: no cover
            raise NotImplementedError

    html = Encoding.of(Marked())._repr_html_()
    check(html)
    assert "&lt;script&gt;" in html
