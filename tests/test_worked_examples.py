"""The worked examples come out as the page says, number by number."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parent.parent / "docs" / "theory" / "worked-examples.md"


def sections() -> dict[str, str]:
    """The examples under each heading, the preparations before the first."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    titles = ["preparations", *parts[1::2]]
    return {
        title: "\n".join(re.findall(r"```pycon\n(.*?)```", text, re.DOTALL))
        for title, text in zip(titles, parts[0::2], strict=True)
    }


SECTIONS = sections()


def run(title: str, names: dict[str, object]) -> str:
    """The differences between a section and the page, or nothing."""
    examples = doctest.DocTestParser().get_doctest(SECTIONS[title], names, title, str(PAGE), 0)
    assert examples.examples
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(examples, out=told.append, clear_globs=False)
    names.update(examples.globs)
    return "".join(told)


@pytest.mark.parametrize("title", [title for title in SECTIONS if title != "preparations"])
def test_every_number_of_the_page(title: str) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    assert run("preparations", names) == ""
    assert run(title, names) == ""


def test_the_page_has_the_five() -> None:
    assert len(SECTIONS) == 6


def test_a_wrong_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, object] = {}
    run("preparations", names)
    title = "Attention does not know order by itself"
    monkeypatch.setitem(SECTIONS, title, SECTIONS[title].replace("0.80", "0.81"))
    assert "0.81" in run(title, names)
