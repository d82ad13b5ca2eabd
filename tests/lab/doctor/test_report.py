"""The report of a diagnosis claims what its layers, limits and engines say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from posenc.lab.doctor.report import diagnosis_page, facts_table, opening
from posenc.lab.doctor.words import Engines
from posenc.lab.reporting.opening import LONGEST
from posenc.transformers.doctor.advice import Advice, Limit
from posenc.transformers.doctor.config_findings import Finding
from posenc.transformers.doctor.costs import LayerCost
from posenc.transformers.doctor.diagnosis import Diagnosis, diagnose
from posenc.transformers.doctor.facts import (
    UNKNOWN,
    AttentionFacts,
    LayerReading,
    Layers,
    PositionTable,
    RotationFacts,
)
from posenc.transformers.engines import ConfigRemedy, Served

FOLDER = Path("folder")
ROTATION = RotationFacts(features=4, frequencies=(1.0, 0.01))
SERVED = Served("transformers", 64, {"": None})


def layers(*facts: AttentionFacts) -> LayerReading:
    kinds = (Layers(numbers=(n,), attention=fact) for n, fact in enumerate(facts))
    return LayerReading(layers=tuple(kinds))


def rotating(**facts: object) -> AttentionFacts:
    return AttentionFacts(module="layers.*", kind="self", causal=True, rotation=ROTATION, **facts)


def diagnosis(reading: LayerReading, **changes: object) -> Diagnosis:
    base = Diagnosis(
        model_type="llama",
        reading=reading,
        limits=(Limit(64, "longer distances were never trained", "degrades"),),
        findings=(),
        advice=Advice("yarn", "factor 4", "posenc extend folder --method yarn --factor 4", {}),
        costs=(),
        acceleration="",
        kernels="",
    )
    return replace(base, **changes)


NONE = Advice("", "no layer encodes positions", "", {})


def words(found: Diagnosis, engines: Engines | None = None) -> list[tuple[str, ...]]:
    return [row.words for row in opening(found, FOLDER, engines).verdicts.rows]


def test_words_on_layers_up_to_the_limit_and_beyond() -> None:
    reading = layers(
        rotating(),
        rotating(back=7),
        rotating(back=UNKNOWN),
        replace(rotating(), rotation=UNKNOWN),
        AttentionFacts(module="layers.*", kind="self", rotation=None),
        AttentionFacts(module="layers.*", kind="none", instead=("Mamba",)),
    )
    table = PositionTable(module="positions", rows=66, first=2)
    before, beyond = zip(*words(diagnosis(replace(reading, tables=(table,)))), strict=True)
    assert before == ("holds", "holds", "holds", "unknown", "holds", "holds", "holds")
    assert beyond == ("degrades", "holds", "unknown", "unknown", "holds", "holds", "breaks")


def test_kinds_are_named_by_what_they_see() -> None:
    """Numbers of layers are long; they are the name where kinds see the same."""
    apart = ["window 8 (1 layer)", "full (1 layer)"]
    for causal, backs, names in (
        (True, (7, None), apart),
        (UNKNOWN, (7, None), apart),
        (True, (None, None), ["1 layer: 0", "1 layer: 1"]),
    ):
        kinds = [replace(rotating(back=back), causal=causal) for back in backs]
        rows = opening(diagnosis(layers(*kinds)), FOLDER).verdicts.rows
        assert [row.name for row in rows] == names


def test_without_a_limit_there_is_one_column() -> None:
    found = diagnosis(layers(rotating(back=7)), limits=(), advice=NONE)
    assert words(found) == [("holds",)]
    told = opening(found, FOLDER)
    assert told.headline == "Take folder as it is: nothing in it limits the length"
    assert "breaks" not in told.verdicts.guide


def test_what_is_unknown_is_not_advised() -> None:
    for reading in (LayerReading(layers=()), layers(rotating()), layers(rotating(back=UNKNOWN))):
        found = diagnosis(reading, limits=(), advice=NONE)
        assert opening(found, FOLDER).headline == "How long the texts of folder may be is not known"


def test_the_headline_names_limit_and_method() -> None:
    found = diagnosis(layers(rotating()))
    told = opening(found, FOLDER)
    assert told.headline == "Up to 64 tokens take folder as it is, beyond them yarn"
    (extend,) = told.remedies
    assert extend.command == "posenc extend folder --method yarn --factor 4"
    alone = opening(replace(found, advice=NONE), FOLDER)
    assert alone.headline == "Up to 64 tokens take folder as it is; beyond, no method is advised"
    assert alone.remedies == ()
    mend = Finding("rope_theta", "is ignored", '"rope_theta": 1.0')
    mended = opening(replace(found, findings=(mend,)), FOLDER)
    assert mended.headline.endswith("yarn; mend 1 setting first")


ENGINES = (
    SERVED,
    Served("vLLM", 64, {"": None}),
    Served("mlx-lm", None, {"": None}, difference="ignores the scaling", effect="worse"),
    Served("llama.cpp", None, {}, difference="does not start: no such kind"),
)


def test_words_on_engines() -> None:
    late = replace(ENGINES[2], difference="rotates texts up to the trained length as longer ones")
    engines = Engines((*ENGINES, replace(late, engine="SGLang")), None)
    model = diagnosis(layers(rotating()))
    found = opening(model, FOLDER, engines)
    rows = {row.name: row for row in found.verdicts.rows if row.reference}
    assert {name: row.words for name, row in rows.items()} == {
        "vLLM": ("same", "same"),
        "mlx-lm": ("differs", "differs"),
        "llama.cpp": ("refuses", "refuses"),
        "SGLang": ("differs", "same"),
    }
    assert rows["mlx-lm"].why == "mlx-lm ignores the scaling: worse."
    assert rows["vLLM"].why == ""
    assert {"same", "differs", "refuses"} < set(found.verdicts.meanings)
    assert found.headline.endswith("; 3 engines differ")
    assert found.remedies == opening(model, FOLDER).remedies
    remedy = ConfigRemedy({"rope_theta": 1.0}, "", {"SGLang": "differs"})
    told = opening(model, FOLDER, Engines(ENGINES, remedy)).remedies[0]
    assert told.text.startswith("mlx-lm and llama.cpp rotate otherwise: write the lines right in")
    alike = opening(model, FOLDER, Engines(ENGINES[:2], None))
    assert "differ" not in alike.headline


def test_facts_on_engines() -> None:
    *unlike, none = Engines(ENGINES, None).facts(layers())
    assert unlike == [
        ("mlx-lm", "ignores the scaling: worse"),
        ("llama.cpp", "does not start: no such kind"),
    ]
    assert none[1].startswith("no line of config.json")
    left = ConfigRemedy({"rope_theta": 1.0}, "", {"SGLang": "ignores it"})
    assert [*Engines(ENGINES, left).facts(layers())][-1] == ("SGLang", "still ignores it")
    assert list(Engines(ENGINES[:2], None).facts(layers())) == []
    expected = [("all", "not compared, the config states no rotation")]
    assert list(Engines((), None).facts(layers())) == expected


def test_kinds_and_engines_that_differ_within_the_ramp_are_told_apart(tmp_path: Path) -> None:
    """Their slowest pairs, gains and longest texts are the same."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    yarn |= {"attention_factor": 1.0, "original_max_position_embeddings": 2048}
    kinds = {"full_attention": yarn, "sliding_attention": yarn | {"beta_fast": 8.0}}
    fields = {
        "model_type": "gemma3_text", "num_hidden_layers": 2, "max_position_embeddings": 8192,
        "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "sliding_window": 512,
        "layer_types": list(kinds), "rope_parameters": kinds,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    engines = Engines.of(tmp_path, "vllm")
    columns, rows = engines.table()
    assert columns[-1] == "pairs that differ"
    told = [row[-1] for row in rows if row[0].startswith("transformers")]
    assert told == ["", "12 of 32 from full_attention"]
    assert [row[1:-1] for row in rows[:1]] == [row[1:-1] for row in rows[1:2]]
    found = diagnose(tmp_path, budget=0, run_seconds=0)
    page = diagnosis_page(found, tmp_path, engines=engines, command="").render()
    assert "12 of 32 from full_attention" in page
    (first, *_) = engines.to_json()["engines"]
    assert first["differing_pairs"] == dict(zip(kinds, told, strict=True))
    alike = replace(engines, served=(replace(engines.served[0], rotations={}),))
    assert alike.table()[0] == columns[:-1]


@pytest.mark.parametrize("name", ["a", "a" * 90])
def test_headlines_fit_a_line(name: str) -> None:
    mend = tuple(Finding("f", "p", "c") for _ in range(12))
    million = (Limit(10_485_760, "why", "degrades"),)
    for limits in ((), million):
        for engines in (None, Engines(ENGINES, None)):
            found = diagnosis(layers(rotating()), findings=mend, limits=limits)
            assert 0 < len(opening(found, Path(name), engines).headline) <= LONGEST


def test_the_page_of_a_folder_draws_the_rotations(tmp_path: Path) -> None:
    fields = {
        "model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 2048,
        "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = diagnose(tmp_path, budget=0, run_seconds=0)
    page = diagnosis_page(found, tmp_path, engines=Engines.of(tmp_path, "all"), command="posenc")
    (turns,) = page.charts
    drawn = {row["subject"] for row in max(turns.spec["datasets"].values(), key=len)}
    assert drawn == {"all 2 layers", "yarn × 4"}
    assert page.opening.headline.startswith("Up to 2,048 tokens take ")
    text = page.render()
    assert "Above the dashed line a pair never turned once in training" in text
    assert "&#34;max_position_embeddings&#34;: 8192," in text
    assert "read from its config" in text


def test_costs_are_the_first_chart_where_nothing_rotates(tmp_path: Path) -> None:
    costs = tuple(LayerCost(128 * n, *(float(n),) * 4, measured=True) for n in (1, 2))
    for reading, heights in ((layers(), [400, 230]), (layers(rotating()), [400, 230, 230])):
        found = diagnosis(reading, costs=costs)
        page = diagnosis_page(found, tmp_path, engines=None, command="")
        assert [chart.spec["height"] for chart in page.charts] == heights


def test_facts_are_a_table() -> None:
    """How the model was read and why, its layers, limits, advice and settings, each in a row."""
    mend = Finding("rope_theta", "is ignored", '"rope_theta": 1.0')
    reading = replace(layers(rotating()), by="config", reason="it took long.")
    table = facts_table(diagnosis(reading, findings=(mend,)), None)
    rows = {name.text: text.text for name, text in table.rows}
    assert rows["read"] == "from its config: it took long"
    assert rows["the layer"].endswith("RoPE, base 10,000")
    assert rows["degrades beyond"] == "64 tokens: longer distances were never trained"
    assert rows["advice"] == "yarn, factor 4"
    assert rows["rope_theta"] == 'is ignored. Write "rope_theta": 1.0.'
    bare = facts_table(diagnosis(LayerReading(layers=()), limits=()), None)
    assert {"layers", "settings"} <= {row[0].text for row in bare.rows}
