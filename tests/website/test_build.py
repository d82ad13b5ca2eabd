"""The built site: strict, whole, small, in order, and with an answer to each question."""

from __future__ import annotations

import html
import re
import tomllib
from pathlib import Path

import pytest

from posenc.lab.experiments.tasks import TASKS
from posenc.registry import ENCODINGS
from tests.website.built import Page, pages, site
from tests.website.pages import ROOT

pytestmark = pytest.mark.long
QUESTIONS = tomllib.loads(Path(__file__).with_name("questions.toml").read_text())
LARGEST = 1_000_000
"""Bytes of a page."""
MOST_PROGRAMS, MOST_PICTURES, MOST_BYTES = 12, 100, 40_000_000
"""Examples that run, and pictures that are drawn, while the site is built, and its size: what a
build within five minutes on two cores can bear."""
WIDEST = 92
"""Characters of a line of Python, prompt included, that fit beside both sidebars at 1280 px."""


def test_every_link_and_file_is_there() -> None:
    for name, page in pages().items():
        for address in [*(address for _, address in page.links), *page.loaded]:
            target = page.target(address)
            assert target is None or target.exists(), f"{name}: {address}"
            anchor = address.partition("#")[2]
            if target is not None and target.suffix == ".html" and anchor:
                built = target.relative_to(site()).as_posix()
                known = built not in pages() or anchor in pages()[built].anchors
                assert known, f"{name}: {address}"


def test_nothing_is_loaded_from_a_network() -> None:
    for name, page in pages().items():
        assert not [address for address in page.loaded if re.match("(https?:)?//", address)], name
    for style in (site() / "_static").rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text()), style.name


def test_pages_are_small() -> None:
    sizes = {name: page.path.stat().st_size for name, page in pages().items()}
    assert len(sizes) > 100
    assert not {name: size for name, size in sizes.items() if size > LARGEST}


def test_the_site_stays_quick_to_build() -> None:
    sources = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    drawn = sum(text.count("{picture} ") + text.count(":file: pictures/") for text in sources)
    assert not [text for text in sources if "{code-cell}" in text], "no page runs while it is built"
    assert len(list((ROOT / "docs" / "examples").glob("plot_*.py"))) <= MOST_PROGRAMS
    assert len(ENCODINGS) <= drawn <= MOST_PICTURES
    files = [path for path in site().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


def test_every_task_has_its_page() -> None:
    for name in TASKS:
        command = "make demo" if name == "language" else f"posenc compare --task {name}"
        assert command in pages()[f"results/{name}.html"].text, name


def test_headings_are_in_order_and_pictures_have_words() -> None:
    for name, page in pages().items():
        assert page.headings.count(1) == 1, f"{name}: {page.headings}"
        steps = zip(page.headings, page.headings[1:], strict=False)
        assert all(after <= before + 1 for before, after in steps), f"{name}: {page.headings}"
        assert page.pictures == [], name


def test_every_method_has_its_picture() -> None:
    for name in ENCODINGS:
        page = pages()[f"methods/{name}.html"].path.read_text()
        words = re.findall(f'<div class="picture" role="img" aria-label="{name}: ([^"]+)"', page)
        assert len(words) == 1, name


def test_the_gallery_shows_a_picture_of_every_example() -> None:
    examples = sorted(path.stem for path in (ROOT / "docs" / "examples").glob("plot_*.py"))
    assert len(examples) >= 8
    thumbnails = [Path(address).name for address in pages()["gallery/index.html"].loaded]
    shown = sorted(x for x in thumbnails if x.startswith("sphx"))
    assert shown == [f"sphx_glr_{name}_thumb.png" for name in examples]
    for name in examples:
        text = pages()[f"gallery/{name}.html"].path.read_text()
        assert re.search('<div class="picture" role="img" aria-label="[^"]+">', text), name


def follow(page: Page, words: str) -> Page:
    """The page behind the first link that begins with these words, or else has them."""
    fits = [a for text, a in page.links if text.lower().startswith(words.lower())]
    fits += [a for text, a in page.links if words.lower() in text.lower()]
    targets = [target for address in fits if (target := page.target(address))]
    assert targets, f"no link “{words}” on {page.path.name}"
    return pages()[targets[0].relative_to(site()).as_posix()]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_within_three_clicks(question: str) -> None:
    clicks, answer = QUESTIONS[question]["click"], QUESTIONS[question]["answer"]
    assert len(clicks) <= 3
    page = pages()["index.html"]
    for words in clicks:
        page = follow(page, words)
    assert answer.lower() in page.text.lower(), f"{page.path} does not say “{answer}”"


def test_every_page_is_three_clicks_away() -> None:
    near = {"index.html"}
    for _ in range(3):
        near |= {
            target.relative_to(site()).as_posix()
            for name in near & pages().keys()
            for _, address in pages()[name].links
            if (target := pages()[name].target(address)) and site() in target.parents
        }
    assert sorted(pages().keys() - near) == []


def test_chinese_pages_have_chinese_words_around() -> None:
    english = (
        "previous|next|On this page|Search|Section Navigation|Skip to main content|Light|Start"
    )
    labels = r'(?:title|aria-label|placeholder|alt)="([^"]*)"'
    for name, page in pages().items():
        if name.startswith("zh/"):
            markup = page.path.read_text()
            told = {text for text in re.findall(labels, markup) if re.search("[A-Za-z]{3}", text)}
            assert {text for text in told if not re.search("[\u4e00-\u9fff]", text)} == set(), name
            assert re.findall(rf">\s*({english})\s*<", markup) == [], name
            assert {"跳转至主要内容", "搜索"} <= set(page.text.split()), name
            assert {"上一页", "下一页"} & set(page.text.split()), name
            assert follow(page, "选型") is pages()["zh/choose/index.html"], name
            assert follow(page, "实验结果") is pages()["results/index.html"], name
            assert 'placeholder="搜索文档……"' in markup, name


def test_python_is_as_wide_as_its_column() -> None:
    block = r'<div class="highlight-(?:python|pycon|Python)\b.*?<pre>(.*?)</pre>'
    blocks = 0
    for name, page in pages().items():
        for marked in re.findall(block, page.path.read_text(), re.DOTALL):
            blocks += 1
            lines = html.unescape(re.sub("<[^>]+>", "", marked)).splitlines()
            assert [line for line in lines if len(line) > WIDEST] == [], name
    assert blocks > 300


def test_pairs_and_intervals_stay_on_a_line() -> None:
    pairs, intervals = (
        pages()[f"{name}.html"].path.read_text() for name in ("guides/accelerate", "results/copy")
    )
    assert re.search(r"<td><p>\d\.\d\d\u00a0/\u00a0\d\.\d\d</p></td>", pairs)
    assert re.search(r"<td><p>\d+\.\d% \(\d+\.\d\u00a0to\u00a0\d+\.\d\)</p></td>", intervals)


def test_names_in_tables_end_lines_between_their_words() -> None:
    text = pages()["about/bugs.html"].path.read_text()
    cells = re.findall(r"<td.*?</td>", text, re.DOTALL)
    pieces = [p for cell in cells for p in re.findall(r'<span class="pre">([^<]+)</span>', cell)]
    assert len(pieces) > 500
    assert max(map(len, pieces)) < 30
    assert "attention/</span><wbr>" in text
    assert "<wbr>" not in pages()["about/bugs.html"].text
