"""The theory: every picture is drawn and told in words, and both languages say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
THEORY, CHINESE = DOCS / "theory", DOCS / "zh" / "theory"
PAGES = sorted(path.stem for path in THEORY.glob("*.md") if path.stem != "index")
PICTURE = re.compile(r"^:::\{picture\} (\S+)\n:alt: (.+)\n((?:.+\n)+):::$", re.MULTILINE)


@pytest.mark.parametrize("folder", [THEORY, CHINESE])
@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_a_picture_in_words(folder: Path, page: str) -> None:
    text = (folder / f"{page}.md").read_text()
    pictures = PICTURE.findall(text)
    assert len(pictures) == text.count("{picture}") >= 1
    for _, alt, caption in pictures:
        assert len(alt) > (30 if folder is CHINESE else 80)
        assert alt != caption.strip()


@pytest.mark.long
def test_pictures_are_drawn_in_both_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    import pictures
    from theory_panels import CHINESE as WORDS
    from theory_panels import PICTURES

    used = {name for page in PAGES for name, *_ in PICTURE.findall(_read(page))}
    assert used == {*PICTURES, "places"}
    for name in used:
        english, chinese = (pictures.rendered(name, "<a>", chinese=zh) for zh in (False, True))
        assert english.startswith('<div class="picture" role="img" aria-label="&lt;a&gt;">')
        assert english.count("<svg") == chinese.count("<svg") >= 1
        assert "NaN" not in english
        assert english != chinese
        shown = re.findall(r"<(?:text|p)[^>]*>([^<]*[a-z]{3}[^<]*)</", chinese)
        names = {"query_key", "embedding", "score", "value", "interpolate", "ntk", "ntk_by_parts"}
        names |= {"yarn", "rerope", "leaky_rerope", "self_extend", "logit"}
        assert {word for word in shown if word not in names} <= set(WORDS.values()), name


def _read(page: str) -> str:
    return (THEORY / f"{page}.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_chinese_pages_have_the_same_formulas_and_sources(page: str) -> None:
    """Displayed formulas, without their words, and addresses."""

    def marks(folder: Path) -> tuple[list[str], list[str]]:
        text = (folder / f"{page}.md").read_text()
        formulas = re.findall(r"^\$\$(.*?)\$\$", text, re.DOTALL | re.MULTILINE)
        bare = [re.sub(r"\\text\{[^}]*\}|\s", "", formula) for formula in formulas]
        return bare, re.findall(r"https?://[^\s>]+", text)

    assert marks(THEORY) == marks(CHINESE)


def test_functions_and_bars_of_formulas_have_their_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    from mathml import THIN, mathml

    assert THIN in mathml(r"\arg q")
    assert THIN not in mathml(r"\ln(2)")
    bars = re.findall(r"<mo ([^>]*)>[|‖]</mo>", mathml(r"\lvert q \rvert\,\lVert k \rVert"))
    assert [re.findall('form="([a-z]+)"', bar) for bar in bars] == [["prefix"], ["postfix"]] * 2
    assert all('rspace="0"' in bar for bar in bars)
