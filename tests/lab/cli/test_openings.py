"""Page, terminal and JSON of every program say the same, with the same numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from html import unescape
from pathlib import Path
from typing import NamedTuple

import pytest

from posenc.lab.evaluation.checkpoint import as_llama
from posenc.lab.reporting.opening import LONGEST
from tests.support.commands import run_command
from tests.support.samples import next_token_model, sample

pytest.importorskip("transformers")


class Shown(NamedTuple):
    """What a page shows.

    Attributes:
        headline: of the page.
        verdicts: words by name.
        remedies: texts and commands, in order.
        cells: all texts of tables but those of verdicts.
    """

    headline: str
    verdicts: dict[str, list[str]]
    remedies: list[str]
    cells: list[str]


def texts(html: str, *names: str) -> list[str]:
    """What stands in elements of these names, in order."""
    found = re.findall(rf"<({'|'.join(names)})\b[^>]*>(.*?)</\1>", html, re.DOTALL)
    return [unescape(re.sub("<[^>]*>", "", inner)) for _, inner in found]


def shown(page: Path) -> Shown:
    html = page.read_text().partition("<script>")[0]
    judged = re.compile(r'<tr><th scope="row">.*?data-subject="(.*?)".*?</tr>', re.DOTALL)
    verdicts = {
        unescape(row[1]): [word.strip() for word in texts(row[0], "td")]
        for row in judged.finditer(html)
    }
    settle = html.partition('id="settle"')[2].partition("</section>")[0]
    cells = [text.strip() for text in texts(judged.sub("", html), "td")]
    return Shown(texts(html, "h1")[0], verdicts, texts(settle, "p", "code"), cells)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("openings")
    text = b"the quick brown fox jumps over the lazy dog. " * 400
    as_llama(next_token_model(text, length=16)).save_pretrained(made / "model")
    (made / "text.txt").write_bytes(text)
    return made


PROGRAMS = {
    "compare": "compare",
    "extend": "extend model --method yarn,interpolate --factor 2 --text text.txt",
    "evaluate": "evaluate model --text text.txt --lengths 8,16,32",
    "doctor": "doctor model --seconds 0 --engine all",
    "bench": "bench --quick --encodings t5,cope --lengths 16 --heads 2 --head-dim 8 --threads 1",
}


@pytest.fixture(params=PROGRAMS)
def run(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[str, Shown]]:
    """Runs a program: what it prints, and its page."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("posenc.lab.experiments.compare.compare", lambda *_, **__: sample())

    def call(*options: str) -> tuple[str, Shown]:
        out = tmp_path / "out"
        done = run_command(*PROGRAMS[request.param].split(), *options, "--out", out, columns=200)
        assert done.returncode == 0, done.stderr
        (page,) = out.rglob("index.html")
        return done.stdout, shown(page)

    return call


def flat(remedies: Iterable[Mapping[str, str]]) -> list[str]:
    """Texts and commands, a text without a command ending in a full stop."""
    pairs = ((each["text"], each["command"]) for each in remedies)
    parts = [(text if command else f"{text.rstrip(':.')}.", command) for text, command in pairs]
    return [part for pair in parts for part in pair if part]


def test_json_says_what_the_page_says(run: Callable[..., tuple[str, Shown]]) -> None:
    printed, page = run("--json")
    told = json.loads(printed)
    assert told["headline"] == page.headline
    assert 0 < len(page.headline) <= LONGEST
    assert page.verdicts
    assert page.verdicts == {
        name: [word or "—" for word in words.values()] for name, words in told["verdicts"].items()
    }
    assert page.remedies == flat(told["remedies"])


def test_the_terminal_says_what_the_page_says(run: Callable[..., tuple[str, Shown]]) -> None:
    printed, page = run()
    lines = printed.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("Verdicts "))
    opening = lines[start:]
    assert page.headline in opening
    for name, words in page.verdicts.items():
        assert any(
            line.startswith(name) and line[len(name) :].split() == words for line in opening
        ), name
    told = [part.rstrip(":.") for part in page.remedies]
    assert all(any(part in line for line in opening) for part in told)
    cells = " ".join(page.cells)
    starts = (*(f"{name}  " for name in page.verdicts), "posenc (")
    rows = [line for line in lines[:start] if line.lstrip(" #–0123456789").startswith(starts)]
    numbers = [number for line in rows for number in re.findall(r"\d+\.\d+", line)]
    assert numbers or told[0].startswith("To extend it"), "but for the doctor's"
    assert [number for number in numbers if number not in cells] == []
