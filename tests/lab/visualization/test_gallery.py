"""The gallery: who is in it, what is said of them, and what stands on its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posenc.errors import OutputError, UnknownNameError
from posenc.lab.visualization.catalogue import SITES, DocstringSections, group, sheet
from posenc.lab.visualization.formulas import is_formula, mathml, prose
from posenc.lab.visualization.gallery import render_gallery, write_gallery
from posenc.registry import ENCODINGS


@pytest.fixture(scope="module")
def page() -> str:
    return render_gallery(names=["t5", "shaw", "sinusoidal", "nope"])


def test_every_method_is_in_one_group() -> None:
    groups = group(tuple(ENCODINGS))
    assert sorted(name for found in groups.values() for name in found) == list(ENCODINGS)
    assert set(groups) <= set(SITES)
    assert groups[""] == [n for n, entry in ENCODINGS.items() if not entry.claims.sites]


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_docstring_comes_apart(name: str) -> None:
    document = DocstringSections.of(ENCODINGS[name].factory)
    assert document.summary.endswith((".", ":"))
    assert document.example.startswith(">>>")
    assert document.reference
    told = {argument for names, _ in document.arguments for argument in names.split(", ")}
    assert set(ENCODINGS[name].parameters()) == told
    assert any(is_formula(paragraph) or "\n" in paragraph for paragraph in document.body), (
        "the formula is a paragraph of its own"
    )


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_sheet_says_which_backends_serve_it(name: str) -> None:
    told = sheet(name)
    for device, ways in told.backends.items():
        assert ways["inference"][-1] == "reference"
        assert set(ways["training"]) <= set(ways["inference"])
        assert all(told.refusals[device].values())
        assert set(ways["inference"]).isdisjoint(told.refusals[device])
    assert (told.size != "0") == told.entry.claims.trainable


def test_numbers_of_a_sheet() -> None:
    t5 = sheet("t5")
    assert (t5.shared_parameters, t5.parameters) == (32 * 8, 0)
    assert t5.size == "256 for all layers"
    assert t5.traits == ["relative", "1 axis", "trainable"]
    assert "absolute" in sheet("sinusoidal").traits


def test_page_says_what_the_registry_knows(page: str) -> None:
    assert re.findall(r'<article id="(\w+)"', page) == ["sinusoidal", "t5", "shaw", "nope"]
    assert re.findall(r'<section class="group" id="(\w+)"', page) == ["usual", "score", "none"]
    for name in ("sinusoidal", "t5", "shaw", "nope"):
        entry = ENCODINGS[name]
        assert f'href="#{name}"' in page
        assert entry.summary.replace("'", "&#39;") in page
        if entry.citation is not None:
            assert entry.citation.url in page
    assert page.count("<figure") == 4 + 3 + 4 + 2
    assert mathml("s_ij += b[h, bucket(Δ)]") in page


def test_page_needs_nothing_else(page: str) -> None:
    assert not re.findall(r'(?:src|xlink:href)="(?!data:)', page)
    assert re.findall(r"<script(.*?)>", page) == [""]
    assert "@import" not in page
    identifiers = re.findall(r'\bid="([^"]+)"', page)
    assert len(identifiers) == len(set(identifiers))
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(identifiers)
    assert len(page) < 400_000


def test_prose_sets_indices_but_not_names() -> None:
    assert prose("``s_ij`` < 1") == mathml("s_ij") + " &lt; 1"
    assert prose("``head_dim``") == "<code>head_dim</code>"
    assert prose('``kernel="<b>"``') == "<code>kernel=&#34;&lt;b&gt;&#34;</code>"
    expected = "W<sub>K</sub> and θ<sup>y</sup><sub>ht</sub>, (3D)<sup>-1/2</sup> &lt;"
    assert prose("W_K and θ^y_ht, (3D)^-1/2 <") == expected
    assert prose("max_length, RoPE++_EH, p_rope") == "max_length, RoPE++_EH, p_rope"


def test_formulas_are_told_from_names() -> None:
    assert is_formula("``x + P[p]`` is the output.")
    assert not is_formula("``p`` is the position.")
    assert is_formula("Pair t turns by ``p · θ_t``.")
    assert not is_formula("It is all of this at once, and then also ``x + P``.")
    assert not is_formula("Nothing at all.")


def test_writing(tmp_path: Path) -> None:
    drawn: list[str] = []
    write_gallery(tmp_path / "g.html", names=["nope", "nope"], progress=drawn.append)
    assert drawn == ["nope"]
    assert (tmp_path / "g.html").read_text().startswith("<!doctype html>")
    with pytest.raises(UnknownNameError, match="Did you mean 'nope'"):
        render_gallery(names=["nop"])
    with pytest.raises(OutputError):
        write_gallery(tmp_path / "g.html" / "h.html", names=["nope"])
