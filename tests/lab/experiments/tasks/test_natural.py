"""The tasks on masked bytes, temperatures and the order of words."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from posenc.errors import ArgumentError, DataError
from posenc.lab.experiments.tasks import Task, word_order
from posenc.lab.training.checkpoint import TrainingPlan
from posenc.lab.training.loop import seeded_model, train
from posenc.layout import Layout
from tests.lab.experiments.tasks import small
from tests.lab.experiments.tasks.small import measured


def make(name: str, folder: Path, **changes: Any) -> Any:
    return small.make(name, folder, **{"train_length": 8, **changes})


def trained(
    task: Task, encoding: str, folder: Path, rate: float | None = None
) -> dict[Any, float | str]:
    folder = folder / hashlib.sha256(encoding.encode()).hexdigest()[:8]
    folder.mkdir(parents=True)
    plan = TrainingPlan(
        encoding=encoding,
        seed=0,
        steps=task.settings.planned_steps,
        rate=task.settings.rate if rate is None else rate,
        folder=folder,
    )
    return measured(task, encoding, train(task, plan).model)


# Word order


@pytest.mark.parametrize("length", [5, 6, 7, 12, 40])
def test_minimal_pairs_have_the_same_words(length: int) -> None:
    source = Random(length)
    for _ in range(50):
        scene = word_order.draw_scene(length, source)
        words, turned = scene.words(), scene.turned()
        assert len(words) == length
        assert sorted(words) == sorted(turned.words())
        assert words != turned.words()
        assert scene.person_acts != turned.person_acts


def test_who_acts_follows_from_the_sentence() -> None:
    one = word_order.Scene(word_order.Phrase("dog"), word_order.Phrase("man"), "chased", "active")
    assert one.words() == ["the", "dog", "chased", "the", "man"]
    assert not one.person_acts
    other = replace(one, kind="passive")
    assert other.words() == ["the", "dog", "was", "chased", "by", "the", "man"]
    assert other.person_acts


def test_who_sees_no_order_tells_no_pair_apart(tmp_path: Path) -> None:
    """The control that must fail does, exactly; an encoding succeeds in the same few steps."""
    task = make("word_order", tmp_path, width=32, heads=4, batch=16, steps=120)
    failing = trained(task, "nope", tmp_path)
    assert {failing["accuracy", x] for x in task.lengths} == {0.5}
    assert {failing["pairs", x] for x in task.lengths} == {0.0}
    assert trained(task, "sinusoidal", tmp_path)["accuracy", 8] > 0.75


def labelled(folder: Path, lines: list[str]) -> Path:
    path = folder / "labelled.tsv"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_labelled_sentences_of_the_user(tmp_path: Path) -> None:
    source = Random(1)
    lines = []
    for index in range(300):
        words = source.choices(["film", "plot", "it", "was"], k=source.randint(2, 14))
        lines.append(f"{'good' if index % 3 else 'bad'}\t{' '.join(words)}!")
    task = make("word_order", tmp_path, text=labelled(tmp_path, lines), test_lengths=(8, 16, 99))
    (headline,) = [metric for metric in task.metrics if metric.headline]
    assert 0.5 < headline.trivial < 0.8
    assert "pairs" not in {metric.key for metric in task.metrics}
    found = measured(task, "t5")
    assert isinstance(found["accuracy", 8], float)
    assert isinstance(found["accuracy", 16], float)
    assert "only 0 sentences" in found["accuracy", 99]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["good\ta film"] * 50, "two labels or more"),
        (["good\ta film", "bad film"], "got 0 in line 2"),
        (["good\ta film", "bad\ta plot"], "16 examples of at most 8 words"),
    ],
)
def test_bad_labelled_sentences(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make("word_order", tmp_path, text=labelled(tmp_path, lines))


# Masked bytes


def test_the_same_bytes_are_masked_and_scored_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(torch.randint(256, (4000,)).tolist()))
    task = make("masked", tmp_path, text=path, test_lengths=(8, 16, 24, 64))
    seen = []
    for length in task.lengths:
        begin = (64 - length) // 2
        first, scored = task._middle(length)
        part = slice(begin + first, begin + first + scored)
        assert 0 <= first <= first + scored <= length
        seen.append((task._windows[:, part], task._masked[:, part]))
    for windows, masked in seen[1:]:
        assert torch.equal(windows, seen[0][0])
        assert torch.equal(masked, seen[0][1])


def test_masked_bytes_are_hidden_from_the_model(tmp_path: Path) -> None:
    batch = make("masked", tmp_path).batch(0, 0)
    hidden = batch["inputs"] != batch["targets"]
    assert (hidden & ~batch["chosen"]).sum() == 0
    assert hidden.any()


def test_text_that_is_too_short_to_mask(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_text("x" * 200)
    with pytest.raises(DataError, match="held out, to test at length 64"):
        make("masked", tmp_path, text=path)


# Temperatures


def test_times_are_hours_in_order_and_values_those_of_the_year(tmp_path: Path) -> None:
    batch = make("temperature", tmp_path).batch(0, 0)
    assert batch["values"].shape == batch["times"].shape == batch["hidden"].shape == (8, 8)
    assert (batch["times"].diff(dim=1) >= 1).all()
    assert batch["times"].min() >= 0
    assert batch["times"].max() < 24
    assert (batch["hidden"].sum(1) == 2).all()


def test_hidden_readings_do_not_reach_the_model(tmp_path: Path) -> None:
    task = make("temperature", tmp_path)
    model = seeded_model(task, "rope", 0).eval()
    batch = task.batch(0, 0)
    told = model(batch["values"], batch["times"], batch["hidden"])
    other = batch["values"] + 100 * batch["hidden"]
    assert torch.equal(model(other, batch["times"], batch["hidden"]), told)
    seen = batch["values"] + 100 * ~batch["hidden"]
    assert not torch.equal(model(seen, batch["times"], batch["hidden"]), told)


def test_index_positions_do_not_see_the_times(tmp_path: Path) -> None:
    task = make("temperature", tmp_path)
    batch = task.batch(0, 0)
    given = batch["values"], batch["hidden"]
    later = batch["times"] * 1.5 + 3
    for encoding, same in (("sinusoidal@index", True), ("sinusoidal", False)):
        model = seeded_model(task, encoding, 0).eval()
        one, other = (model(given[0], times, given[1]) for times in (batch["times"], later))
        assert torch.equal(one, other) == same
    by_index = seeded_model(task, "rope@index", 0).eval()
    plain = by_index.model(*given, Layout.sequence(8))
    assert torch.equal(by_index(given[0], batch["times"], given[1]), plain)


@pytest.mark.long
def test_times_tell_more_than_indices(tmp_path: Path) -> None:
    """The control that must fail does."""
    task = make("temperature", tmp_path, train_length=32, width=32, heads=4, batch=32, steps=300)
    by_time, by_index = (
        trained(task, encoding, tmp_path, rate=0.01)["error", 32]
        for encoding in ("sinusoidal", "sinusoidal@index")
    )
    assert by_time < 0.5 * by_index


def test_unknown_place_and_spans_beyond_a_stretch(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="Seattle or San Francisco"):
        make("temperature", tmp_path, options={"place": "Atlantis"})
    with pytest.raises(DataError, match="at most 160 readings"):
        make("temperature", tmp_path, test_lengths=(200,))
    other = make("temperature", tmp_path, options={"place": "San Francisco"})
    assert "San Francisco" in other.data
