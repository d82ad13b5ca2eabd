"""Models that read contexts in turns: who reads on, when all stop, and how often that misleads."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from posenc.errors import Interrupted
from posenc.lab.evaluation import turns as reading_in_turns
from posenc.lab.evaluation.candidates import Method
from posenc.lab.evaluation.checkpoint import Checkpoint
from posenc.lab.evaluation.choosing import best, unsettled
from posenc.lab.evaluation.progress import PLANNED
from posenc.lab.evaluation.results import Findings, StudyReading
from posenc.lab.evaluation.settings import Tuning
from posenc.lab.evaluation.study import ExtensionResult, measure_extensions
from posenc.lab.evaluation.suites.contexts import PARTS
from posenc.lab.evaluation.turns import SURE_FROM, Turns
from posenc.lab.reporting.numbers import confidence_after, confidence_at, estimate
from tests.lab.evaluation.studies import BASE, reading, study
from tests.lab.evaluation.test_contexts import Uniform, suite
from tests.lab.evaluation.test_evaluate import SENTENCE, folder_of_bytes


def counts(readings: dict[str, StudyReading]) -> dict[str, int]:
    return {key: len(each.windows) // PARTS for key, each in readings.items()}


def turns(**fields: Any) -> Turns:
    models: dict[str, nn.Module] = {"plain": Uniform(), "good": Uniform(begin=512, better=4.0)}
    given: dict[str, Any] = {"unsettled": lambda readings, look: readings, "seconds": None}
    given |= {"report": lambda stage, share: None} | fields
    return Turns(suite(Uniform(), lengths=(512, 1024, 4096)), models, **given)  # a row a call


def test_all_read_while_nothing_is_settled() -> None:
    shares: list[float] = []
    found = turns(report=lambda stage, share: shares.append(share)).read()
    assert counts(found) == {"plain": 6, "good": 6}
    assert shares == sorted(shares)
    assert found["plain"].looks == 6 - SURE_FROM


def test_one_that_is_settled_reads_no_more() -> None:
    found = turns(unsettled=lambda readings, look: ["good"] if look < 3 else ()).read()
    assert counts(found) == {"plain": SURE_FROM, "good": SURE_FROM + 2}


def test_what_will_be_read_is_said_first() -> None:
    stages: list[str] = []
    turns(report=lambda stage, share: stages.append(stage)).read()
    assert stages[0].startswith(PLANNED)
    assert "2 models read contexts of 4096 tokens" in stages[0]
    assert stages[0].endswith("6 each")
    stages.clear()
    turns(seconds=1e-3, report=lambda stage, share: stages.append(stage)).read()
    assert "at most 1 each in 1 s, all 6 in" in stages[0]
    assert not any(stage.startswith(PLANNED) for stage in stages[1:])


def test_no_context_begins_that_would_end_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 10 seconds: of 45, 20 have passed after one context each, 40 after two."""
    now, timed = [0.0], turns(seconds=45.0)
    contexts = timed.suite.contexts

    def slowly(*given: Any, **options: Any) -> Any:
        now[0] += 10.0
        return contexts(*given, **options)

    monkeypatch.setattr(reading_in_turns.time, "monotonic", lambda: now[0])
    object.__setattr__(timed.suite, "contexts", slowly)
    assert counts(timed.read()) == {"plain": 2, "good": 2}
    assert now[0] == 40.0


def test_a_model_that_reads_less_is_shown_with_what_all_contexts_cost() -> None:
    uneven = turns(unsettled=lambda readings, look: ["good"] if look < 3 else ())
    whole = uneven.read()["good"]
    all_by = uneven.contexts["good"]
    few, shown = (uneven.suite.reading(all_by[:2], all_by=by) for by in ((), all_by))
    assert few.loss[4096] != pytest.approx(whole.loss[4096], abs=1e-6)
    assert shown.loss == pytest.approx(whole.loss, abs=1e-6)
    for (place, value), (other, wanted) in zip(shown.by_position, whole.by_position, strict=True):
        assert (place, value) == (other, pytest.approx(wanted, abs=1e-4))


def test_a_settled_model_is_shown_by_the_one_that_read_most() -> None:
    """Of two that are alike the losses are, though one has read three contexts and one six."""
    models = {key: Uniform(begin=512, better=4.0) for key in ("few", "many")}
    found = Turns(
        turns().suite, models, None, lambda readings, look: ["many"], lambda stage, share: None
    ).read()
    assert counts(found) == {"few": SURE_FROM, "many": 6}
    assert found["few"].loss == pytest.approx(found["many"].loss, abs=1e-6)


def test_needles_decide_where_they_are_surely_fewer() -> None:
    better = study(**BASE, yarn=reading(2.3, 0.4), ntk=reading(2.5, 0.5))
    assert best(better, tuned=False) == "yarn", "one of eight needles more is no difference"
    blind = study(**BASE, yarn=reading(2.3, 0.0), ntk=reading(2.5, 1.0))
    assert best(blind, tuned=False) == "ntk"


def test_without_time_each_reads_one() -> None:
    shares: list[float] = []
    found = turns(seconds=1e-9, report=lambda stage, share: shares.append(share)).read()
    assert counts(found) == {"plain": 1, "good": 1}
    assert shares == sorted(shares)
    assert all(0 <= share <= 1 for share in shares)
    assert not found["plain"].timed, "one pass says nothing of its spread"


def test_what_was_read_is_not_read_again() -> None:
    kept: dict[str, Any] = {}

    def stop(key: str, contexts: Any) -> None:
        kept[key] = contexts
        if len(contexts) == 2 and key == "plain":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turns(keep=stop).read()
    assert {key: len(read) for key, read in kept.items()} == {"plain": 2, "good": 1}
    again: list[int] = []
    found = turns(contexts=kept, keep=lambda key, read: again.append(len(read))).read()
    assert sorted(again) == [2, 3, 3, 4, 4, 5, 5, 6, 6]
    whole = turns().read()
    for key, each in whole.items():
        assert found[key].pieces == each.pieces


def test_models_surely_worse_or_surely_level_are_settled() -> None:
    level = replace(reading(2.301), pieces={"loss": {32: (2.301,) * 64}})
    found = study(**BASE, yarn=reading(2.3), ntk=level, rerope=reading(2.6), string=reading(2.3))
    assert unsettled(found, tuned=False, look=1) == set()
    near = study(**BASE, yarn=reading(2.3), ntk=reading(2.31, spread=0.3))
    assert unsettled(near, tuned=False, look=1) == {"yarn", "ntk"}


def test_looks_mislead_in_one_study_of_fifty_and_all_in_one_of_twenty() -> None:
    """Of equal models, whose differences are noise: how often is one surely better?"""
    draw, studies = random.Random(0), 400
    early = late = 0
    for _ in range(studies):
        differences = [draw.gauss(0, 1) for _ in range(PARTS * SURE_FROM)]
        for look in range(1, 16):
            if estimate(differences, confidence=confidence_at(look)).sure:
                early += 1
                break
            differences += [draw.gauss(0, 1) for _ in range(PARTS)]
        late += estimate(differences, confidence=confidence_after(15)).sure
    assert early <= 0.04 * studies
    assert late <= 0.07 * studies
    assert early + late > 0, "it is tried at all"


def extended(folder: Path, **options: Any) -> ExtensionResult:
    opened = Checkpoint.open(folder)
    methods = [Method.parse(name) for name in ("yarn", "interpolate")]
    given: dict[str, Any] = {"factor": 2, "tuning": Tuning(), "always": True, "minutes": 1e-6}
    data = opened.data(text=folder.parent / "text.txt")
    return measure_extensions(opened, data, methods, **given | options)


def test_a_stopped_study_of_contexts_goes_on(tmp_path: Path) -> None:
    folder = folder_of_bytes(tmp_path / "model", length=1600)
    (tmp_path / "text.txt").write_bytes(SENTENCE * 250)
    state = tmp_path / "state.json"
    with pytest.raises(Interrupted, match="a stop after 1"):
        extended(folder, state=state, stop=lambda: True)
    assert list(json.loads(state.read_text())["contexts"]) == ["direct"]
    found = extended(folder, state=state).study
    assert [each.key for each in found.findings] == ["direct", "window", "yarn", "interpolate"]
    assert found.asked == 1
    for one, other in zip(found.findings, extended(folder).study.findings, strict=True):
        assert isinstance(one, Findings)
        assert one.untuned.pieces == other.untuned.pieces
