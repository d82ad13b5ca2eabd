"""Whole comparisons, small ones: processes, folders, interruptions, budgets."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from posenc.errors import (
    ArgumentError,
    CheckpointError,
    DataError,
    OutputError,
    PosencError,
    UnknownNameError,
)
from posenc.lab.experiments import compare as comparing
from posenc.lab.experiments import progress as events
from posenc.lab.experiments.compare import compare
from posenc.lab.experiments.executors import RETRIES
from posenc.lab.experiments.jobs import Outcome, TrainingJob, train_and_measure
from posenc.lab.experiments.results import Comparison, Measurement
from posenc.lab.experiments.settings import ComparisonSettings, load_settings, resume_command
from posenc.lab.experiments.tasks import TASKS
from posenc.lab.training.stopping import Deadline
from posenc.models import Decoder
from posenc.registry import ENCODINGS
from tests.lab.experiments.small_comparisons import Log, press_ctrl_c, small


class Undisturbed(NamedTuple):
    settings: ComparisonSettings
    comparison: Comparison
    log: Log


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A comparison that nothing disturbed."""
    settings, log = small(tmp_path_factory.mktemp("finished"), seeds=(0, 1)), Log()
    return Undisturbed(settings, compare(settings, command="posenc compare …", progress=log), log)


RUNS = [("learned", 0), ("learned", 1), ("rope", 0), ("rope", 1)]


def by_point(comparison: Comparison) -> dict[tuple[str, int, str, float], float]:
    return {(m.subject, m.seed, m.metric, m.x): m.value for m in comparison.measurements}


def test_comparison_has_every_subject_seed_and_length(finished: Undisturbed) -> None:
    comparison = finished.comparison
    assert comparison.complete
    assert [s.name for s in comparison.subjects] == ["rope", "learned", "rope|window=16"]
    found = by_point(comparison)
    for point in product(("rope", "rope|window=16"), (0, 1), ("loss", "recall"), (16, 32)):
        assert point in found
    for point in product(("learned",), (0, 1), ("loss", "recall"), (16,)):
        assert point in found
    refused = {(r.subject, r.metric, r.x) for r in comparison.refusals}
    assert refused == {("learned", key, 32) for key in ("loss", "recall", "loss_by_position")}
    assert found["rope", 0, "loss", 16] == found["rope|window=16", 0, "loss", 16]
    assert found["rope", 0, "loss", 16] != found["rope", 1, "loss", 16]
    curve = [x for *run, x in found if run == ["rope", 0, "training_loss"]]
    assert curve == list(range(1, 13))


def test_runs_tell_what_they_cost(finished: Undisturbed) -> None:
    runs = finished.comparison.runs
    names = ("rope", "learned", "rope|window=16")
    assert {(run.subject, run.seed) for run in runs} == set(product(names, (0, 1)))
    sizes = {run.subject: run.parameters for run in runs}
    assert sizes["learned"] - sizes["rope"] == 16 * 16
    for run in runs:
        assert run.steps == 12
        assert min(run.tokens_per_second, run.train_seconds) > 0


def test_provenance_is_enough_to_do_it_again(finished: Undisturbed) -> None:
    comparison = finished.comparison
    provenance = comparison.provenance
    assert provenance.command == "posenc compare …"
    assert provenance.versions["torch"] == torch.__version__
    assert provenance.seeds == (0, 1)
    assert provenance.settings["steps"] == 12
    assert "out" not in provenance.settings
    assert provenance.corpus.train_bytes + provenance.corpus.held_out_bytes == 6000
    assert Comparison.from_json(json.loads(json.dumps(comparison.to_json()))) == comparison


def test_events_come_in_order(finished: Undisturbed) -> None:
    log = finished.log
    first, last = log.events[0], log.events[-1]
    assert first.runs == (("rope", 0), ("learned", 0), ("rope", 1), ("learned", 1))
    assert first.finished == 0
    assert isinstance(last, events.Finished)
    assert (last.complete, last.resume) == (True, None)
    for kind in (events.RunStarted, events.RunFinished):
        assert sorted((e.encoding, e.seed) for e in log.of(kind)) == RUNS
    steps = [event.step for event in log.of(events.Stepped) if event.encoding == "rope"]
    assert steps.count(12) == 2
    measuring = log.of(events.Measuring)[-1]
    assert measuring.done == measuring.total


def test_finished_comparison_is_read_not_run(finished: Undisturbed) -> None:
    """Its trained models are left for others."""
    folder = finished.settings.out / "runs" / "rope" / "seed-1"
    assert Decoder.load(folder / "model").config.encoding == "rope"
    assert sorted(path.name for path in folder.iterdir()) == ["model", "run.json"]
    log = Log()
    again = compare(load_settings(finished.settings.out), progress=log)
    assert not log.of(events.RunStarted)
    assert again.measurements == finished.comparison.measurements
    assert again.runs == finished.comparison.runs
    assert again.complete


def test_interrupted_comparison_goes_on_to_the_same_results(
    finished: Undisturbed, tmp_path: Path
) -> None:
    whole = finished.comparison
    settings = small(tmp_path, seeds=(0, 1), workers=1)
    log = Log(events.Stepped, press_ctrl_c)
    before = signal.getsignal(signal.SIGINT)
    partial = compare(settings, progress=log)
    assert signal.getsignal(signal.SIGINT) is before
    assert not partial.complete
    assert len(partial.runs) < len(whole.runs)
    assert Comparison.from_json(json.loads(json.dumps(partial.to_json()))) == partial
    command = resume_command(settings.out)
    assert log.of(events.Stopping) == [events.Stopping(resume=command)]
    assert (log.events[-1].complete, log.events[-1].resume) == (False, command)
    resumed = compare(load_settings(settings.out))
    assert resumed.complete
    assert by_point(resumed) == by_point(whole)


def test_interrupted_while_measuring_does_not_train_again(tmp_path: Path) -> None:
    settings = small(tmp_path, encodings=("rope",), workers=1)
    assert not compare(settings, progress=Log(events.Measuring, press_ctrl_c)).complete
    log = Log()
    assert compare(load_settings(settings.out), progress=log).complete
    assert [event.step for event in log.of(events.RunStarted)] == [12]


@pytest.fixture
def children() -> Callable[[], list[BaseProcess]]:
    """Processes that the test has started, without those of other tests that still run."""
    before = set(multiprocessing.active_children())
    return lambda: [child for child in multiprocessing.active_children() if child not in before]


def test_second_interrupt_ends_at_once(
    tmp_path: Path, children: Callable[[], list[BaseProcess]]
) -> None:
    log = Log(events.Stopping, press_ctrl_c)

    def progress(event: events.Event) -> None:
        log(event)
        if isinstance(event, events.Stepped) and not log.of(events.Stopping):
            press_ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        compare(small(tmp_path, encodings=("rope",), steps=1_000_000), progress=progress)
    assert not children()


def kill(children: Callable[[], list[BaseProcess]]) -> None:
    for child in children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)


def test_run_of_a_killed_worker_goes_on_in_another(
    finished: Undisturbed, tmp_path: Path, children: Callable[[], list[BaseProcess]]
) -> None:
    log = Log(events.Stepped, partial(kill, children))
    comparison = compare(small(tmp_path, seeds=(0, 1), workers=1), progress=log)
    assert by_point(comparison) == by_point(finished.comparison)
    (restarted,) = log.of(events.Restarted)
    assert restarted == events.Restarted(encoding="rope", seed=0, reason="killed by signal 9")
    assert not children()


def test_worker_that_is_killed_again_and_again_is_told(
    tmp_path: Path, children: Callable[[], list[BaseProcess]]
) -> None:
    def progress(event: events.Event) -> None:
        log(event)
        if isinstance(event, events.Stepped):
            kill(children)

    log = Log()
    settings = small(tmp_path, encodings=("rope",), references=(), steps=1_000_000)
    with pytest.raises(PosencError, match=r"rope.*killed by signal 9.*fewer workers.*--resume"):
        compare(settings, progress=progress)
    assert len(log.of(events.Restarted)) == RETRIES
    assert not children()


def test_error_of_a_worker_reaches_the_caller_and_stops_the_others(tmp_path: Path) -> None:
    settings = small(tmp_path, steps=1_000_000, workers=2)
    blocked = settings.out / "runs" / "learned" / "seed-0"

    def block() -> None:
        blocked.parent.mkdir(parents=True)
        blocked.write_text("in the way")

    with pytest.raises(OutputError, match=r"seed-0.*Choose another folder"):
        compare(settings, progress=Log(events.RunsPrepared, block))
    saved = settings.out / "runs" / "rope" / "seed-0" / "checkpoint.safetensors"
    assert saved.exists()


def test_names_of_this_process_alone_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As registered under ``if __name__ == "__main__":``."""
    for registry, name, like in ((ENCODINGS, "mine", "rope"), (TASKS, "ours", "language")):
        monkeypatch.setitem(registry._read, name, registry[like])
    settings = small(tmp_path, encodings=("mine",), references=())
    with pytest.raises(UnknownNameError, match=r"worker processes know.*'mine'.*posenc\.register"):
        compare(settings)
    other = replace(small(tmp_path), task="ours", out=tmp_path / "other")
    with pytest.raises(UnknownNameError, match=r"worker processes know.*'ours'.*posenc\.register"):
        compare(other)


def test_other_threads_may_compare(tmp_path: Path) -> None:
    settings = small(tmp_path, encodings=("learned",), references=())
    with ThreadPoolExecutor() as pool:
        assert pool.submit(compare, settings).result().complete


def test_two_calls_are_not_at_work_in_one_folder(tmp_path: Path) -> None:
    settings = small(tmp_path, encodings=("learned",), references=())
    refusals = []

    def again() -> None:
        for existing in ("resume", "replace"):
            with pytest.raises(OutputError, match=r"another call or job is.*Wait for its end"):
                compare(replace(settings, existing=existing))
            refusals.append(existing)

    assert compare(settings, progress=Log(events.RunsPrepared, again)).complete
    assert len(refusals) == 2
    assert compare(replace(settings, existing="replace")).complete


def test_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    settings = small(tmp_path)
    settings.out.mkdir()
    (settings.out / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match=r"which exists.*--resume.*--replace"):
        compare(settings)
    with pytest.raises(OutputError, match=r"no settings\.json"):
        compare(replace(settings, existing="replace"))
    with pytest.raises(OutputError, match=r"no settings\.json"):
        compare(replace(settings, existing="resume"))
    assert [path.name for path in settings.out.iterdir()] == ["thesis.tex"]
    with pytest.raises(OutputError, match="which exists"):
        compare(replace(settings, out=tmp_path / "text.txt"))


def test_comparison_is_replaced_on_request(tmp_path: Path) -> None:
    settings = small(tmp_path, encodings=("learned",), references=())
    compare(settings)
    (settings.out / "notes.txt").write_text("mine")
    log = Log()
    compare(replace(settings, existing="replace", steps=7), progress=log)
    assert [event.steps for event in log.of(events.RunStarted)] == [7]
    assert (settings.out / "notes.txt").exists()


def test_resuming_needs_the_same_settings_and_text(finished: Undisturbed) -> None:
    settings = replace(finished.settings, existing="resume")
    with pytest.raises(ArgumentError, match="batch: expected 4, as in the comparison"):
        compare(replace(settings, batch=8))
    with pytest.raises(ArgumentError, match="steps"):
        compare(replace(settings, steps=13))
    content = settings.text.read_bytes()
    settings.text.write_bytes(content[::-1])
    try:
        with pytest.raises(DataError, match="the text that the comparison began with"):
            compare(settings)
    finally:
        settings.text.write_bytes(content)


def test_damaged_outcome_is_named(tmp_path: Path) -> None:
    settings = small(tmp_path, encodings=("learned",), references=())
    compare(settings)
    path = settings.out / "runs" / "learned" / "seed-0" / "run.json"
    for content in ("{", '{"runs": []}', '{"runs": [{}], "measurements": [], "refusals": []}'):
        path.write_text(content)
        with pytest.raises(CheckpointError, match=r"run\.json.*Delete it"):
            compare(load_settings(settings.out))
    (settings.out / "settings.json").write_text('{"kind": "something"}')
    with pytest.raises(CheckpointError, match=r"settings\.json"):
        load_settings(settings.out)


def test_folders_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small(tmp_path)
    with pytest.raises(OutputError, match="Not a directory"):
        compare(replace(settings, out=tmp_path / "text.txt" / "out"))

    def refuse(path: Path, *args: object, **options: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OutputError, match=r"Read-only file system.*Choose a folder"):
        compare(settings)


def test_what_cannot_be_trained_is_refused_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small(tmp_path)
    with pytest.raises(ArgumentError, match="head_dim"):
        compare(replace(settings, width=6, heads=2))
    with pytest.raises(DataError, match="nothing there"):
        compare(replace(settings, text=tmp_path / "absent.txt"))
    for content, message in ((b"", "an empty file"), (b"tiny", "longer text")):
        settings.text.write_bytes(content)
        with pytest.raises(DataError, match=message):
            compare(settings)
    monkeypatch.setattr(comparing, "available_memory", lambda device: 1000)
    with pytest.raises(ArgumentError, match="fits into"):
        compare(small(tmp_path))
    assert not settings.out.exists()


# Within a number of minutes


def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A callback that ends the budget."""
    return lambda: monkeypatch.setattr(Deadline, "left", property(lambda self: -1.0))


def test_budget_is_turned_into_steps_and_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small(tmp_path, encodings=("rope",), steps=None, minutes=30.0)
    log = Log(events.Paced, spend(monkeypatch))
    assert not compare(settings, progress=log).complete
    (paced,), (stopping,) = log.of(events.Paced), log.of(events.Stopping)
    assert paced.steps >= 20
    assert paced.steps % 10 == 0
    assert 0.0 < paced.seconds <= 1800.5
    assert stopping.over_budget
    assert load_settings(settings.out).steps == paced.steps


def test_budget_too_small_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "LEAST_STEPS", 10**7)
    settings = small(tmp_path, encodings=("rope",), steps=None, minutes=3.0)
    with pytest.raises(ArgumentError, match=r"minutes: expected at least \d+\.\d on this"):
        compare(settings)


def test_a_budget_that_is_spent_at_once_leaves_nothing(tmp_path: Path) -> None:
    """It ends the preparation of the data, which goes on in a process of its own."""
    settings = small(tmp_path, steps=None, minutes=1e-6)
    with pytest.raises(ArgumentError, match="1e-06, which ends while the data is prepared"):
        compare(settings)
    assert not settings.out.exists()


def test_a_budget_that_ends_with_the_first_steps_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    settings = small(tmp_path, encodings=("rope",), steps=None, minutes=3.0)
    with pytest.raises(ArgumentError, match=r"speed of training is measured.*add --resume"):
        compare(settings, progress=Log(events.RunsPrepared, spend(monkeypatch)))
    assert list(scratch.iterdir()) == [], "processes that are ended leave nothing behind"
    assert load_settings(settings.out).minutes == 3.0


# Numbers that are not finite


def outcome_of(folder: Path, *, steps: int = 2, damage: float = 0.0, **changes: object) -> Outcome:
    """The outcome of a run; ``damage`` is added to its losses at 32."""
    settings = small(folder, steps=steps, **changes)
    task = settings.entry.make(settings)
    measure = task.measure

    def measured(*arguments: Any, **options: Any) -> Iterator[list[Any]]:
        for piece in measure(*arguments, **options):
            yield [
                replace(item, value=item.value + damage)
                if isinstance(item, Measurement) and (item.metric, item.x) == ("loss", 32)
                else item
                for item in piece
            ]

    task.measure = measured
    job = TrainingJob(settings=settings, encoding="rope", seed=3, sharing=1)
    job.folder.mkdir(parents=True)
    outcome = train_and_measure(job, task, stop=lambda: False, emit=lambda event: None)
    assert Outcome.read(job.folder / "run.json") == outcome
    return outcome


@pytest.mark.parametrize(("rate", "steps", "step"), [(1e30, 2, 2), (1e39, 1, 1)])
def test_training_that_diverges_is_an_outcome(
    tmp_path: Path, rate: float, steps: int, step: int
) -> None:
    """Also where the last step leaves weights that are not finite, but had a loss that is."""
    outcome = outcome_of(tmp_path, steps=steps, learning_rate=rate)
    assert {item.metric for item in outcome.measurements} <= {"training_loss"}
    refused = {(item.subject, item.x) for item in outcome.refusals if item.metric == "loss"}
    assert refused == set(product(("rope", "rope|window=16"), (16, 32)))
    for item in outcome.refusals:
        assert item.reason.startswith(f"training of seed 3 diverged at step {step}: its loss or ")


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refusals(tmp_path: Path, damage: float) -> None:
    outcome = outcome_of(tmp_path, damage=damage)
    assert {item.x for item in outcome.measurements if item.metric == "loss"} == {16}
    refused = [(item.subject, item.metric) for item in outcome.refusals if item.x == 32]
    assert sorted(refused) == [("rope", "loss"), ("rope|window=16", "loss")]
    assert {r.reason for r in outcome.refusals} == {f"the model of seed 3 gives {damage}"}
