"""The opening of a report: its JSON, its definitions and its colours."""

from __future__ import annotations

from typing import get_args

from posenc.lab.bench.report import WORDS
from posenc.lab.experiments.verdicts import GATES
from posenc.lab.reporting.numbers import sentence
from posenc.lab.reporting.opening import TONES, Opening, Remedy, Verdict, Verdicts, Word, meanings
from posenc.lab.reporting.page import environment, source

USED = {
    *get_args(Word),
    *GATES,
    *WORDS.values(),
    "learned",
    "same",
    "differs",
    "refuses",
    "unknown",
}


def test_words_as_json() -> None:
    rows = (Verdict(name="a", words=("holds", "")), Verdict(name="b", words=("breaks", "unsure")))
    opened = Opening(
        headline="Use a",
        verdicts=Verdicts(title="", columns=("loss", "recall"), rows=rows),
        remedies=(Remedy(text="More:", command="posenc more"),),
    )
    assert opened.to_json() == {
        "headline": "Use a",
        "verdicts": {
            "a": {"loss": "holds", "recall": None},
            "b": {"loss": "breaks", "recall": "unsure"},
        },
        "remedies": [{"text": "More:", "command": "posenc more"}],
    }


def test_words_that_occur_are_defined_once() -> None:
    assert meanings(["b", "", "a", "b"], str.upper) == {"b": "B", "a": "A"}


def test_every_word_has_a_colour() -> None:
    assert set(TONES) == USED
    sheet = source(environment("posenc.lab.reporting"), "style.css")
    for tone in TONES.values():
        assert f".{tone}" in sheet


def test_definitions_are_held_to_the_limits() -> None:
    limits = {"holds": 0.05, "breaks": 0.25, "than": "at 64"}
    assert sentence("means_holds", **limits) == "at most 5% worse than at 64"
    assert sentence("means_degrades", **limits) == "5% to 25% worse than at 64"
    assert sentence("means_breaks", **limits) == "more than 25% worse than at 64"
