"""Rules that every task keeps, and each from its settings to the page of its report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posenc.errors import ArgumentError, Interrupted
from posenc.lab.experiments.compare import compare
from posenc.lab.experiments.executors import Executor
from posenc.lab.experiments.jobs import Job
from posenc.lab.experiments.page import comparison_page
from posenc.lab.experiments.progress import Event
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.summary import summarise
from posenc.lab.experiments.tasks import TASKS
from posenc.lab.training.checkpoint import TrainingPlan
from posenc.lab.training.loop import Watch, seeded_model, train
from tests.lab.experiments.tasks.small import NATURAL, frozen, make, measured, settings_of


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_keeps_the_rules(name: str, tmp_path: Path) -> None:
    """Pure batches, one start for all, a loss, as many measurements as promised, a saved model."""
    task, again = (make(name, tmp_path, **TASKS[name].sample) for _ in range(2))
    assert task.fingerprint == again.fingerprint
    first = task.batch(0, 3)
    task.batch(1, 1)
    assert all(torch.equal(first[key], x) for key, x in again.batch(0, 3).items())
    for other in (task.batch(0, 4), task.batch(4, 3)):
        assert any(not torch.equal(first[key], x) for key, x in other.items())
    control = dict(seeded_model(task, "nope", 3).named_parameters())
    for encoding in task.settings.trained:
        model = seeded_model(task, encoding, 3)
        own = dict(model.named_parameters())
        assert all(torch.equal(own[key], x) for key, x in control.items())
        loss = task.loss(model, first)
        assert loss.shape == ()
        assert torch.isfinite(loss)
    loss.backward()
    model = model.eval().requires_grad_(requires_grad=False)
    found = measured(task, encoding, model)
    assert {metric for *_, metric, _ in found} == {m.key for m in task.metrics} - {"training_loss"}
    (headline,) = [metric for metric in task.metrics if metric.headline]
    assert {x for *_, metric, x in found if metric == headline.key} == set(task.lengths)
    with pytest.raises(ArgumentError, match=r"batch: .*that fits into.*GB for \d+ windows of"):
        task.require_memory(model, 10)
    task.require_memory(model, 10**11)
    task.save(model, tmp_path / "model")
    saved = task.saved_model(model)
    loaded = type(saved).load(tmp_path / "model")
    state = loaded.state_dict()
    assert all(torch.equal(state[key], x) for key, x in saved.state_dict().items())
    for probe in (probe for probe in task.probes if headline.key in probe.metrics):
        untried = replace(probe, run=None)
        assert "GB of memory, of which 0.0 GB are free" in untried.attempt(model, available=10)


@pytest.mark.parametrize("name", NATURAL)
def test_training_that_was_stopped_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    task = make(name, tmp_path, train_length=8)
    losses = []
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        folder.mkdir()
        plan = TrainingPlan(
            encoding="rope", seed=1, steps=4, rate=task.settings.rate, folder=folder
        )
        if folder.name == "parts":
            asked = iter((False, True))
            with pytest.raises(Interrupted):
                train(task, plan, Watch(stop=lambda asked=asked: next(asked)))
        losses.append(train(task, plan).losses)
    assert torch.equal(*losses)


@pytest.mark.parametrize("name", [*NATURAL, "digits"])
def test_encodings_that_a_task_cannot_serve_are_refused(name: str, tmp_path: Path) -> None:
    task = make(name, tmp_path, **TASKS[name].sample)
    kinds = "plain or index positions" if name == "temperature" else "plain positions"
    for encoding, message in (
        ("forgetting", "requires a causal mask"),
        ("rope2d@randomized" if name == "digits" else "sinusoidal@randomized", kinds),
    ):
        with pytest.raises(ArgumentError, match=message):
            task.build(encoding)


@pytest.mark.parametrize("name", ["copy", "language", "masked", "phonemes", "word_order"])
def test_learned_table_ends_where_training_ends(name: str, tmp_path: Path) -> None:
    task = make(name, tmp_path, train_length=8)
    found = measured(task, "learned")
    (key,) = [metric.key for metric in task.metrics if metric.headline]
    assert isinstance(found[key, 8], float)
    assert "learned table" in found[key, task.lengths[-1]]
    assert measured(task, "learned", frozen(task, "learned", 1)).keys() == found.keys()


@pytest.mark.parametrize("name", ["copy", "language"])
def test_fingerprint_changes_with_what_decides_training(name: str, tmp_path: Path) -> None:
    def fingerprint(**changes: Any) -> str:
        return make(
            name, tmp_path, **({"train_length": 16, "test_lengths": (24,)} | changes)
        ).fingerprint

    base = fingerprint()
    assert fingerprint(encodings=("rope",)) == base
    own: dict[str, dict[str, Any]] = {
        "copy": {"options": {"symbols": 80}, "test_lengths": (32,)},
        "language": {"options": {"needle_rows": 0.0}, "text": None},
    }
    for key, value in {"batch": 4, "width": 32, "train_length": 12, **own[name]}.items():
        assert fingerprint(**{key: value}) != base, key


@pytest.mark.parametrize("name", list(TASKS))
def test_entries_say_what_they_are(name: str) -> None:
    entry = TASKS[name]
    for text in (entry.summary, entry.data, entry.metric, entry.expectation, entry.length_unit):
        assert text
    assert "20" in entry.expectation, "no year of a source"
    settings = ComparisonSettings(out=Path("out"), task=name)
    assert settings.lengths[0] == settings.train_length == entry.defaults.train_length
    assert settings.options == dict(entry.options)


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"translation", "phonemes"}))
def test_every_task_has_a_gate(name: str) -> None:
    """A level to reach, or a trivial one to leave; and known data measured where it is finite."""
    task = TASKS[name].make(ComparisonSettings(out=Path("out"), task=name))
    (headline,) = [metric for metric in task.metrics if metric.headline]
    assert headline.learned is not None or headline.trivial is not None
    measured_on_known = any(metric.key == "seen" for metric in task.metrics)
    assert measured_on_known == (name in ("language", "masked", "digits", "temperature"))


class Here(Executor):
    """Carries out the jobs in this process, one after the other."""

    def submit(self, jobs: Sequence[Job]) -> Sequence[Future[Any]]:
        """Their results."""
        handles = [Future[Any]() for _ in jobs]
        for handle, job in zip(handles, jobs, strict=True):
            handle.set_result(job.carry_out(lambda event: None))
        return handles

    def events(self) -> Iterable[Event]:
        """None, at once."""
        return ()


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_ends_in_a_report(name: str, tmp_path: Path) -> None:
    entry = TASKS[name]
    fields = {"encodings": entry.defaults.encodings[:1], "steps": 2, "seeds": (0,), "batch": 4}
    settings = settings_of(name, tmp_path, **{**fields, **entry.sample})
    comparison = compare(settings, executor=Here())
    assert comparison.complete
    assert {subject.name for subject in comparison.subjects} == {v.name for v in settings.variants}
    controls = [s for s in comparison.subjects if s.role != "candidate"]
    assert controls, "a comparison in which nothing must fail shows no leak"
    summary = summarise(comparison)
    for sentence in summary.answer:
        assert sentence.endswith("."), sentence
        assert not re.search(r"\b(nan|inf|None)\b", sentence), sentence
    whole = comparison_page(comparison, summary)
    charts, page = whole.charts, whole.render()
    others = {metric.key for metric in comparison.metrics if not metric.headline} - {"seen"}
    assert {chart.key for chart in charts} == others | {"headline", "change", "cost"}
    assert comparison.title in page
    assert settings.entry.expectation.split(":")[0].split("'")[0] in page
    for metric in comparison.metrics:
        assert metric.unit != "share", f"{metric.key}: of what?"
    first = charts[0].spec
    assert "trained" in str(first["datasets"])
    titles = [layer["encoding"].get("x", {}).get("title") for layer in first["layer"]]
    assert comparison.headline.axis in titles
    assert comparison.length_unit.split()[0] in comparison.headline.axis
