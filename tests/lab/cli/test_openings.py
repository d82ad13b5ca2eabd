"""Page, terminal and JSON of every program say the same, with the same numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path

import pytest

from posenc.lab.evaluation.checkpoint import as_llama
from posenc.lab.reporting.opening import LONGEST
from tests.support.commands import run_command
from tests.support.samples import next_token_model, sample

pytest.importorskip("transformers")


class Shown(HTMLParser):
    """The opening of a page, and the rows of its tables.

    Attributes:
        headline: of the page.
        verdicts: words by name.
        remedies: texts and commands, in order.
        cells: all texts of tables.
        open: attributes of the elements around.
    """

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.headline, self.remedies, self.cells = "", list[str](), list[str]()
        self.verdicts: dict[str, list[str]] = {}
        self.open: list[tuple[str, dict[str, str | None]]] = []
        html = page.read_text()
        self.feed(html[: html.index("<script>")])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.open.append((tag, given))
        if tag == "button" and given.get("class") == "pick":
            self.verdicts[str(given["data-subject"])] = []
        if tag in ("p", "code") and self.inside("id", "settle"):
            self.remedies.append("")
        if tag in ("meta", "img"):
            self.open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing is in such an element."""

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass

    def inside(self, name: str, value: str) -> bool:
        return any(given.get(name) == value for _, given in self.open)

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.open]
        if tags[-1:] == ["h1"]:
            self.headline += data
        if "td" in tags:
            if self.inside("class", "verdicts") or self.inside("class", "verdicts dense"):
                list(self.verdicts.values())[-1].append(data.strip())
            else:
                self.cells.append(data.strip())
        if self.inside("id", "settle") and ("p" in tags or "code" in tags):
            self.remedies[-1] += data


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
        return done.stdout, Shown(page)

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
