"""The headline of a study is true, short, and held to its verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from posenc.lab.evaluation.choosing import missing_gain, verdicts
from posenc.lab.evaluation.report import study_page
from posenc.lab.evaluation.results import Effective, Study
from posenc.lab.evaluation.summary import headline, opening
from posenc.lab.reporting.opening import LONGEST, Remedy
from tests.lab.evaluation.studies import BASE, blind, reading, study

NOT_FINDING = blind(BASE | {"yarn": reading(2.05)}, last=0.9)
"""The original finds nothing at the trained length."""


def remedies(found: Study) -> tuple[Remedy, ...]:
    return opening(found).remedies


def words(found: Study) -> dict[str, tuple[str, ...]]:
    return {method.key: each for method, each in verdicts(found)}


def test_the_best_method_is_named_with_its_verdict_and_loss() -> None:
    found = study(**BASE, yarn=reading(2.05), rerope=reading(2.6, 0.2))
    expected = "Use yarn: it holds at 2 × the trained length (loss 2.050, not stretched 4.000)"
    assert headline(found) == expected
    worse = study(**BASE, yarn=reading(2.3), rerope=reading(2.6, 0.2))
    assert headline(worse).startswith("Use yarn: it degrades at 2 ×")


def test_nothing_is_advised_that_gains_nothing() -> None:
    alone = study(**BASE, yarn=reading(4.2, 0.1))
    assert missing_gain(alone, "yarn", tuned=False)
    expected = "Do not stretch by yarn: it shows no sure gain at 2 × the trained length"
    assert headline(alone) == expected
    two = study(**BASE, yarn=reading(4.2, 0.1), ntk=reading(4.3, 0.1))
    assert headline(two).startswith("Do not stretch: even yarn, the best, shows no sure gain")
    none = study(**BASE, segments=reading(2.0))
    assert headline(none) == "Nothing that a checkpoint can hold was measured"


def test_a_gate_stops_every_word() -> None:
    found = replace(study(**BASE, yarn=reading(2.1)), gate="Nothing.", trivial_rule="frequencies")
    assert headline(found) == "Nothing can be said of tiny: it is no better than frequencies"
    assert set(words(found).values()) == {("unlearned", "unlearned")}
    assert remedies(found) == ()


def test_verdicts_hold_values_to_those_of_the_original_at_the_trained_length() -> None:
    """2.0 bits and 90 % of the needles; 64 are asked for."""
    found = study(
        direct=reading(4.0, 0.1),
        yarn=reading(2.09, 0.9),
        ntk=reading(2.11, 0.75),
        rerope=reading(2.5, 0.78),
        linear=reading(2.51, 0.5),
    )
    assert words(found) == {
        "yarn": ("holds", "holds"),
        "ntk": ("degrades", "unsure"),
        "rerope": ("degrades", "degrades"),
        "linear": ("breaks", "breaks"),
        "direct": ("breaks", "breaks"),
    }


def test_needles_of_all_depths_count() -> None:
    """64 a depth: of one, 75 % after 90 % may be a matter of chance; of three, not."""
    found = study(direct=reading(4.0, 0.1), yarn=reading(2.05, 0.75))
    assert words(found)["yarn"] == ("holds", "unsure")
    three = {
        method.key: replace(
            method.untuned, needles={n: 3 * shares for n, shares in method.untuned.needles.items()}
        )
        for method in found.findings
    }
    deep = replace(study(**three), depths=(0.0, 0.5, 1.0))
    assert words(deep)["yarn"] == ("holds", "degrades")


def test_values_are_held_to_the_original_and_not_to_the_best() -> None:
    best = replace(reading(2.09), loss={16: 1.0, 32: 2.09})
    assert words(study(direct=reading(4.0), yarn=best))["yarn"][0] == "holds"


def test_recall_is_not_judged_where_the_original_finds_nothing() -> None:
    assert words(study(**NOT_FINDING))["yarn"] == ("holds", "unlearned")
    nothing = blind({"direct": reading(2.5)}, 0.0, 0.0)
    assert words(replace(study(**nothing), chance=0.0))["direct"] == ("degrades", "unlearned")


def test_a_model_measured_as_it_is() -> None:
    found = study(direct=reading(2.5, 0.2))
    expected = "tiny degrades at 2 × the trained length: loss 2.000 → 2.500, recall 90% → 20%"
    assert headline(replace(found, factor=1.0)) == expected
    assert [row.reference for row in opening(found).verdicts.rows] == [True]
    assert [row.reference for row in opening(replace(found, factor=1.0)).verdicts.rows] == [False]
    short = replace(found, factor=1.0, lengths=(16,))
    assert headline(short) == "tiny at the trained length: loss 2.000, recall 90%"
    # without the trained one, values are held to those at the shortest
    found = replace(found, factor=1.0, length=8)
    expected = "tiny degrades at 4 × the trained length: loss 2.000 → 2.500, recall 90% → 20%"
    assert headline(found) == expected
    assert "trained at 16;" in opening(found).verdicts.guide


def test_the_effective_length_is_the_answer() -> None:
    """With the model first, in colour, and the control beside it."""
    effective = Effective(
        length=16, low=16, end=32, claimed=16, reference=16, margin=0.05, abilities=("loss",),
        limited_by="loss", honest=True,
    )  # fmt: skip
    found = study(direct=reading(4.0, 0.2), window=reading(2.0, 0.2))
    found = replace(found, factor=1.0, effective=effective)
    told = "tiny reads up to 16 bytes, its trained length; loss 2.000 → 4.000 at 32"
    assert headline(found) == told
    beyond = replace(found, effective=replace(effective, length=32, end=None))
    assert headline(beyond) == "tiny reads at least 32 bytes"
    rows = opening(found).verdicts.rows
    assert [(row.name, row.reference) for row in rows] == [("direct", False), ("window", True)]
    page = study_page(found)
    assert page.looks["direct"].dash == [1, 0]
    names = next(section for section in page.sections if section.key == "rows")
    assert [term.name for term in names.terms] == ["direct", "window"]


@pytest.mark.parametrize("length", [1, 20, 80])
def test_headlines_fit_a_line(length: int) -> None:
    key = "y" * length
    for found in (
        study(**BASE, **{key: reading(2.1)}),
        study(**BASE, **{key: reading(4.2, 0.1), "ntk": reading(4.3, 0.1)}),
        study(**BASE, **{key: reading(4.2, 0.1)}),
        replace(study(direct=reading(2.5)), factor=1.0, checkpoint=key),
    ):
        assert 0 < len(headline(found)) <= LONGEST


def test_what_is_level_with_the_best_is_open() -> None:
    found = study(**BASE, yarn=reading(2.05), ntk=reading(2.06, spread=0.5))
    (remedy,) = remedies(found)
    assert remedy.text == (
        "Undecided: ntk cannot be told from yarn by its loss on 64 stretches of text. "
        "Another text may settle it:"
    )
    assert remedy.command == ""
    command = "posenc extend tiny --out=a --method all --text 'a b' --factor 2"
    (remedy,) = remedies(replace(found, command=command))
    expected = "posenc extend tiny --method all --factor 2 --text ANOTHER.txt --out a-again"
    assert remedy.command == expected
    (remedy,) = remedies(replace(found, command="posenc extend --method all"))
    assert remedy.command.endswith("--method all --text ANOTHER.txt --out posenc-extend-again")
    hasty = replace(found, command="posenc extend --minutes 5", unread=3, seconds=300.0)
    (remedy,) = remedies(hasty)
    assert "More minutes may settle it" in remedy.text
    assert remedy.command == "posenc extend --minutes 10 --out posenc-extend-again"
    assert remedies(study(**BASE, yarn=reading(2.05), ntk=reading(2.5))) == ()


def test_other_needles_settle_recall() -> None:
    found = study(direct=reading(2.0, 0.9), yarn=reading(2.05, 0.75), ntk=reading(9.0, 0.1))
    remedy = remedies(replace(found, command="posenc extend tiny", seed=4))[-1]
    expected = "Undecided: how much yarn finds, of 64 needles a depth. Other needles may settle it:"
    assert remedy.text == expected
    assert remedy.command == "posenc extend tiny --seed 5 --out posenc-extend-again"
    alone = replace(study(direct=reading(2.5, 0.75)), factor=1.0)
    (remedy,) = remedies(alone)
    assert "how much direct finds" in remedy.text
    assert remedies(replace(alone, gate="Nothing.")) == ()


def test_definitions_of_words_that_occur() -> None:
    found = opening(study(**BASE, yarn=reading(2.05)))
    assert found.verdicts.meanings["holds"] == "at most 5% worse than as trained at 16"
    words = opening(study(**NOT_FINDING)).verdicts.meanings
    assert words["unlearned"].startswith("the model as trained finds hardly more needles")
    gated = replace(study(**BASE), gate="Nothing.", trivial=3.0, trivial_rule="frequencies")
    assert opening(gated).verdicts.meanings == {
        "unlearned": "no model beats frequencies alone (3.000)"
    }
