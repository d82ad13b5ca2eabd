"""What is said of a study beside its tables: why, what it costs, and what else is as good."""

from __future__ import annotations

from dataclasses import replace

import pytest

from posenc.extension import EXTENSIONS
from posenc.lab.evaluation.candidates import Method
from posenc.lab.evaluation.choosing import choose, short_cost, verdicts, worse_by
from posenc.lab.evaluation.report import study_page, tables
from posenc.lab.evaluation.results import Study
from posenc.lab.evaluation.suites.next_token import words
from posenc.lab.evaluation.summary import answer, headline
from tests.lab.evaluation.studies import BASE, reading, study


def column(found: Study, name: str) -> dict[str, str]:
    """Cells of a column of the table of results, by method, with their intervals."""
    table = tables(found)[0]
    place = [column.name for column in table.columns].index(name)
    return {row[0].text: f"{row[place].text} {row[place].small}".strip() for row in table.rows}


def test_the_answer_says_why_and_the_table_how_sure() -> None:
    found = study(
        **BASE,
        yarn=reading(2.5),
        ntk=reading(2.51, spread=0.3),
        rerope=reading(2.7, 0.52),
        interpolate=reading(3.0, 0.2),
    )
    found = replace(found, chosen="yarn", reason="Because.")
    assert answer(found) == ["Written: yarn. Because.", "yarn: yarn has a ramp."]
    behind = column(found, "behind")
    assert behind["rerope"] == "0.200 (0.200 to 0.200)"
    assert behind["window"] == "-0.100 (-0.100 to -0.100)"
    low, high = (float(end) for end in behind["ntk"].strip(")").split("(")[1].split(" to "))
    assert low < 0 < high
    assert behind["yarn"] == "—"
    page = study_page(found)
    assert page.opening.headline == headline(found)
    assert [section.key for section in page.sections][:2] == ["findings", "table"]


def test_times_that_are_not_known_well_are_marked() -> None:
    slow = replace(reading(2.3, 0.9), per_second=0.25)
    assert (slow.timed, slow.speed) == (True, "0")
    assert replace(slow, time_error=0.6).speed == "≈ 0"


def test_what_short_texts_cost_is_said_where_it_is_much() -> None:
    dear = replace(reading(2.3, 0.9), loss={16: 2.08, 32: 2.3})
    cheap = replace(reading(2.31, 0.9, spread=0.3), loss={16: 2.01, 32: 2.31})
    found = study(**BASE, yarn=dear, llama3=cheap)
    assert short_cost(found, dear, tuned=False) == pytest.approx(0.04)
    assert column(found, "short texts")["yarn"] == "+4.0%"
    told = answer(replace(found, chosen="yarn"))[1]
    assert "On texts of 16 bytes" in told
    assert told.endswith("+4.0% against the original's; as good on long ones: llama3 +0.5%.")
    level = replace(study(**BASE, yarn=cheap), chosen="yarn")
    assert not any("On texts of" in told for told in answer(level))


def test_how_extensions_are_tried() -> None:
    for name, entry in EXTENSIONS.items():
        assert entry.trials.keys() <= {"text_table", "image_table", "short"}
        for ways in entry.trials.values():
            assert all(Method.parse(f"{name}{way}").spec.startswith(name) for way in ways)


def test_no_checkpoint_is_said_to_be_written_where_none_was() -> None:
    none = replace(study(**BASE, yarn=reading(2.3)), reason="It gains nothing.")
    assert answer(none) == ["It gains nothing."]
    assert answer(replace(none, gate="Not learned.")) == ["Not learned."]


def test_a_recall_at_the_trained_length_falls_by_points() -> None:
    """40 % before, and 36 %: 4 points less."""
    recall = words("retrieval", goal=32, count=64, depths=1)["metrics"]
    readings = {
        key: replace(reading(2.0), needles={16: (share,), 32: (share,)})
        for key, share in {"cut": 0.4, "yarn": 0.36}.items()
    }
    found = replace(study(**readings), metrics=recall)
    cost = short_cost(found, readings["yarn"], tuned=False)
    assert cost == pytest.approx(0.04)
    assert worse_by(found, cost) == "-4 points"
    assert worse_by(found, None) == "—"


def test_what_holds_and_yet_gains_nothing_is_explained() -> None:
    """A verdict compares with the trained length, advice with the model as it is at the goal."""
    level = {"direct": reading(2.05, 0.9), "yarn": reading(2.05, 0.9)}
    clause = (
        "; that it holds says that it is at most 5% worse than the model as trained is at 16, "
        "not that it gains"
    )
    found = study(**level)
    assert {method.key: each[0] for method, each in verdicts(found)}["yarn"] == "holds"
    assert headline(found).startswith("Do not stretch by yarn")
    two = study(**level, ntk=reading(2.06, 0.9))
    assert choose(two, tuned=False)[1].endswith(f"{clause}.")
    assert choose(found, tuned=False)[1].endswith(f"{clause}.")
    worse = study(direct=reading(2.11, 0.9), yarn=reading(2.11, 0.9))
    assert "holds" not in answer(worse)[0], "it degrades"
    gains = study(direct=reading(4.0, 0.1), yarn=reading(2.05, 0.9))
    assert "holds" not in answer(gains)[0], "use it"
