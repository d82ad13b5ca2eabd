"""Settings of a comparison and names of what is trained, allowed and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posenc.errors import ArgumentError, CheckpointError, UnknownNameError
from posenc.lab.experiments.recipe import Recipe, Variant
from posenc.lab.experiments.settings import ComparisonSettings

OUT = Path("out")
COUNTS = ("layers", "heads", "batch", "workers", "threads")


def test_defaults_compare_six_encodings_a_baseline_and_the_control() -> None:
    settings = ComparisonSettings(out=OUT)
    names = [variant.name for variant in settings.variants]
    assert names == [*settings.encodings, "rope|window=64"]
    assert len(settings.encodings) == 6
    assert "nope" in settings.encodings
    assert settings.trained == tuple(settings.encodings)
    assert settings.lengths == (64, 128, 256, 512)


def test_references_are_added_and_trained_for() -> None:
    settings = ComparisonSettings(out=OUT, encodings=("alibi",), train_length=32)
    assert [v.name for v in settings.variants] == ["alibi", "nope", "rope|window=32"]
    assert settings.trained == ("alibi", "nope", "rope")
    assert ComparisonSettings(out=OUT, encodings=("alibi",), references=()).trained == ("alibi",)


def test_training_length_is_always_tested() -> None:
    assert ComparisonSettings(out=OUT, test_lengths=(512, 128)).lengths == (64, 128, 512)


def test_wide_models_learn_slower() -> None:
    assert ComparisonSettings(out=OUT).rate == ComparisonSettings(out=OUT, width=16).rate == 0.01
    assert ComparisonSettings(out=OUT, width=256).rate == pytest.approx(0.0025)
    assert ComparisonSettings(out=OUT, width=256, learning_rate=0.1).rate == 0.1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("existing", "overwrite", "refuse"),
        ("encodings", (), "at least one name"),
        ("encodings", "rope", "a sequence"),
        ("encodings", ("rope", "rope"), "each name once"),
        ("references", ("rope|window", "rope|window=64"), "each name once"),
        ("references", ("rope|widow",), "window=NUMBER"),
        ("references", ("rope|window=0",), "window=NUMBER"),
        ("train_length", 4, "8 or more"),
        ("train_length", 64.0, "a whole number"),
        ("test_lengths", (32,), "64 or more"),
        ("test_lengths", 128, "a sequence"),
        ("steps", True, "a whole number"),
        ("seeds", (), "at least one"),
        ("seeds", (1, 1), "each once"),
        ("seeds", (-1,), "0 or more"),
        ("seeds", (2**31,), "at most"),
        ("width", 66, "a multiple of heads"),
        ("learning_rate", 0.0, "more than 0"),
        ("learning_rate", float("nan"), "a finite number"),
        ("options", {"needle_rows": "all"}, "needle_rows: expected a value of type float"),
        ("options", {"needles": 1}, "Did you mean 'needle_rows'"),
        ("task", "langage", "Did you mean 'language'"),
        ("minutes", -1.0, "more than 0"),
        ("device", "gpu", "cpu, cuda"),
        ("device", "meta", "cpu, cuda"),
        ("device", "cuda:99", "one that this machine has"),
        ("precision", "8-true", "32-true"),
        *((count, 0, "1 or more") for count in ("steps", *COUNTS)),
        ("encodings", ("ropa",), "Did you mean 'rope'"),
        ("encodings", ("t5+sinusoid",), "sinusoidal"),
    ],
)
def test_bad_value_is_refused_by_name(name: str, value: Any, message: str) -> None:
    fields: dict[str, Any] = {name: value}
    with pytest.raises(ArgumentError, match=message) as caught:
        ComparisonSettings(out=OUT, **fields)
    assert caught.value.remedy


def test_steps_and_budget_exclude_each_other() -> None:
    with pytest.raises(ArgumentError, match="both"):
        ComparisonSettings(out=OUT, steps=100, minutes=5.0)


def test_variant_names_are_read_back() -> None:
    for name in ("rope", "t5+sinusoidal", "rope|window=7"):
        assert Variant.parse(name, window=64).name == name
    assert Variant.parse("rope|window", window=64).name == "rope|window=64"


def test_settings_survive_json() -> None:
    settings = ComparisonSettings(out=OUT, text=Path("a.txt"), seeds=(3, 4), minutes=2.5)
    assert ComparisonSettings.from_json(settings.to_json()) == settings


def test_settings_of_another_version_are_refused() -> None:
    plain = ComparisonSettings(out=OUT).to_json()
    with pytest.raises(CheckpointError, match="another version"):
        ComparisonSettings.from_json({**plain, "colour": "red"})
    with pytest.raises(CheckpointError, match="valid values"):
        ComparisonSettings.from_json({**plain, "batch": -1})


def test_differences_name_what_decides_results() -> None:
    settings = ComparisonSettings(out=OUT)
    same = ComparisonSettings(out=Path("elsewhere"), existing="resume", workers=7, steps=100)
    assert settings.differences(same) == []
    other = ComparisonSettings(out=OUT, batch=8, seeds=(5,))
    assert settings.differences(other) == ["batch", "seeds"]
    five, six = (ComparisonSettings(out=OUT, steps=steps) for steps in (5, 6))
    assert five.differences(six) == ["steps"]


def test_changes_are_read_by_their_type() -> None:
    recipe = Recipe.parse("shaw+sinusoidal@max_distance=0@randomized")
    assert recipe.encoding == "shaw+sinusoidal"
    assert recipe.options == {"max_distance": 0}
    assert recipe.positions == "randomized"
    assert Recipe.parse("rope").positions == "plain"
    assert Recipe.parse("alibi@learned=false").options == {"learned": False}
    assert Recipe.parse("sine2d", axes=2).encoding == "sine2d"


@pytest.mark.parametrize(
    ("name", "axes", "error", "message"),
    [
        ("sinusoidal@randomised", 1, UnknownNameError, "Did you mean 'randomized'"),
        ("shaw@max_distanc=3", 1, UnknownNameError, "Did you mean 'max_distance'"),
        ("ropa@randomized", 1, UnknownNameError, "Did you mean 'rope'"),
        ("rope@", 1, UnknownNameError, "option of rope"),
        ("sine2d", 1, ArgumentError, "one for text"),
        ("sinusoidal", 2, ArgumentError, "positions of 2 axes"),
        ("shaw@max_distance", 1, ArgumentError, "Write max_distance=…"),
        ("rope@base=abc", 1, ArgumentError, "base: expected a finite number"),
        ("alibi@learned=maybe", 1, ArgumentError, "learned: expected True or False"),
    ],
)
def test_changes_that_there_are_not_are_refused(
    name: str, axes: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Recipe.parse(name, axes=axes)
