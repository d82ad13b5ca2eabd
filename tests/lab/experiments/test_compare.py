"""Whole comparisons, small ones: processes, folders, interruptions."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

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
from posenc.lab.experiments.compare import compare, prepare
from posenc.lab.experiments.progress import (
    Event,
    Finished,
    Measuring,
    RunFinished,
    RunsPrepared,
    RunStarted,
    Stepped,
    Stopping,
)
from posenc.lab.experiments.results import Comparison
from posenc.lab.experiments.settings import ComparisonSettings, load_settings, resume_command
from posenc.lab.experiments.tasks import TASKS
from posenc.models import Decoder
from posenc.registry import ENCODINGS
from tests.lab.experiments.small_comparisons import Log, press_ctrl_c, small


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[ComparisonSettings, Comparison, Log]:
    """A comparison that nothing disturbed."""
    settings = small(tmp_path_factory.mktemp("finished"), seeds=(0, 1))
    log = Log()
    return settings, compare(settings, command="posenc compare …", progress=log), log


def by_point(comparison: Comparison) -> dict[tuple[str, int, str, float], float]:
    return {(m.subject, m.seed, m.metric, m.x): m.value for m in comparison.measurements}


def test_comparison_has_every_subject_seed_and_length(
    finished: tuple[ComparisonSettings, Comparison, Log],
) -> None:
    _, comparison, _ = finished
    assert comparison.complete
    assert [s.name for s in comparison.subjects] == ["rope", "learned", "rope|window=16"]
    found = by_point(comparison)
    for metric in ("loss", "recall"):
        for seed in (0, 1):
            for x in (16, 32):
                assert ("rope", seed, metric, x) in found
                assert ("rope|window=16", seed, metric, x) in found
            assert ("learned", seed, metric, 16) in found
    assert {(r.subject, r.metric, r.x) for r in comparison.refusals} == {
        ("learned", "loss", 32),
        ("learned", "recall", 32),
        ("learned", "loss_by_position", 32),
    }
    assert found["rope", 0, "loss", 16] == found["rope|window=16", 0, "loss", 16]
    assert found["rope", 0, "loss", 16] != found["rope", 1, "loss", 16]
    curve = [
        x
        for subject, seed, metric, x in found
        if (subject, seed, metric) == ("rope", 0, "training_loss")
    ]
    assert curve == list(range(1, 13))


def test_runs_tell_what_they_cost(finished: tuple[ComparisonSettings, Comparison, Log]) -> None:
    _, comparison, _ = finished
    assert {(run.subject, run.seed) for run in comparison.runs} == {
        (subject, seed) for subject in ("rope", "learned", "rope|window=16") for seed in (0, 1)
    }
    sizes = {run.subject: run.parameters for run in comparison.runs}
    assert sizes["learned"] - sizes["rope"] == 16 * 16
    for run in comparison.runs:
        assert run.steps == 12
        assert run.tokens_per_second > 0
        assert run.train_seconds > 0


def test_provenance_is_enough_to_do_it_again(
    finished: tuple[ComparisonSettings, Comparison, Log],
) -> None:
    settings, comparison, _ = finished
    provenance = comparison.provenance
    assert provenance.command == "posenc compare …"
    assert provenance.versions["torch"] == torch.__version__
    assert provenance.seeds == (0, 1)
    assert provenance.settings["steps"] == 12
    assert provenance.corpus.train_bytes + provenance.corpus.held_out_bytes == 6000
    assert Comparison.from_json(json.loads(json.dumps(comparison.to_json()))) == comparison
    assert "out" not in provenance.settings
    assert settings.out.name == "out"


def test_events_come_in_order(finished: tuple[ComparisonSettings, Comparison, Log]) -> None:
    _, _, log = finished
    assert isinstance(log.events[0], RunsPrepared)
    assert log.events[0].runs == (("rope", 0), ("learned", 0), ("rope", 1), ("learned", 1))
    assert log.events[0].finished == 0
    assert isinstance(log.events[-1], Finished)
    assert log.events[-1].complete
    assert log.events[-1].resume is None
    for kind in (RunStarted, RunFinished):
        assert sorted((e.encoding, e.seed) for e in log.of(kind)) == [  # type: ignore[union-attr]
            ("learned", 0),
            ("learned", 1),
            ("rope", 0),
            ("rope", 1),
        ]
    steps = [e.step for e in log.of(Stepped) if isinstance(e, Stepped) and e.encoding == "rope"]
    assert steps.count(12) == 2
    last = [e for e in log.of(Measuring) if isinstance(e, Measuring)][-1]
    assert last.done == last.total


def test_trained_models_are_left_for_others(
    finished: tuple[ComparisonSettings, Comparison, Log],
) -> None:
    settings, _, _ = finished
    folder = settings.out / "runs" / "rope" / "seed-1"
    assert Decoder.load(folder / "model").config.encoding == "rope"
    assert sorted(path.name for path in folder.iterdir()) == ["model", "run.json"]


def test_finished_comparison_is_read_not_run(
    finished: tuple[ComparisonSettings, Comparison, Log],
) -> None:
    settings, comparison, _ = finished
    log = Log()
    again = compare(load_settings(settings.out), progress=log)
    assert not log.of(RunStarted)
    assert again.measurements == comparison.measurements
    assert again.runs == comparison.runs
    assert again.complete


def test_interrupted_comparison_goes_on_to_the_same_results(
    finished: tuple[ComparisonSettings, Comparison, Log], tmp_path: Path
) -> None:
    _, whole, _ = finished
    settings = small(tmp_path, seeds=(0, 1), workers=1)
    log = Log(Stepped, press_ctrl_c)
    before = signal.getsignal(signal.SIGINT)
    partial = compare(settings, progress=log)
    assert signal.getsignal(signal.SIGINT) is before
    assert not partial.complete
    assert len(partial.runs) < len(whole.runs)
    assert Comparison.from_json(json.loads(json.dumps(partial.to_json()))) == partial
    command = resume_command(settings.out)
    assert log.of(Stopping) == [Stopping(resume=command)]
    last = log.events[-1]
    assert isinstance(last, Finished)
    assert (last.complete, last.resume) == (False, command)

    resumed = compare(load_settings(settings.out))
    assert resumed.complete
    assert by_point(resumed) == by_point(whole)


def test_interrupted_while_measuring_does_not_train_again(tmp_path: Path) -> None:
    settings = small(tmp_path, encodings=("rope",), workers=1)
    assert not compare(settings, progress=Log(Measuring, press_ctrl_c)).complete
    log = Log()
    assert compare(load_settings(settings.out), progress=log).complete
    assert [event.step for event in log.of(RunStarted) if isinstance(event, RunStarted)] == [12]


@pytest.fixture
def children() -> Callable[[], list[BaseProcess]]:
    """Processes that the test has started, without those of other tests that still run."""
    before = set(multiprocessing.active_children())
    return lambda: [child for child in multiprocessing.active_children() if child not in before]


def test_second_interrupt_ends_at_once(
    tmp_path: Path, children: Callable[[], list[BaseProcess]]
) -> None:
    log = Log(Stopping, press_ctrl_c)
    steps = 1_000_000

    def progress(event: Event) -> None:
        log(event)
        if isinstance(event, Stepped) and not log.of(Stopping):
            press_ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        compare(small(tmp_path, encodings=("rope",), steps=steps), progress=progress)
    assert not children()


def test_killed_worker_is_told(tmp_path: Path, children: Callable[[], list[BaseProcess]]) -> None:
    def kill() -> None:
        for child in children():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)

    settings = small(tmp_path, encodings=("rope",), steps=1_000_000)
    with pytest.raises(PosencError, match=r"rope.*killed by signal 9.*fewer workers.*--resume"):
        compare(settings, progress=Log(Stepped, kill))
    assert not children()


def test_error_of_a_worker_reaches_the_caller_and_stops_the_others(tmp_path: Path) -> None:
    settings = small(tmp_path, steps=1_000_000, workers=2)
    blocked = settings.out / "runs" / "learned" / "seed-0"

    def block() -> None:
        blocked.rmdir()
        blocked.write_text("in the way")

    with pytest.raises(OutputError, match=r"seed-0.*Choose another folder"):
        compare(settings, progress=Log(RunsPrepared, block))
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
    found: list[Comparison] = []
    settings = small(tmp_path, encodings=("learned",), references=())
    thread = threading.Thread(target=lambda: found.append(compare(settings)))
    thread.start()
    thread.join()
    assert found[0].complete


def test_joined_comparison_is_shared(
    finished: tuple[ComparisonSettings, Comparison, Log], tmp_path: Path
) -> None:
    """Both calls end with everything, of which each has done a part, and none anything twice."""
    settings = small(tmp_path, seeds=(0, 1), workers=1)
    prepared = threading.Event()
    logs = Log(RunsPrepared, prepared.set), Log()
    found: list[Comparison] = []
    first = threading.Thread(target=lambda: found.append(compare(settings, progress=logs[0])))
    first.start()
    assert prepared.wait(60)
    partial: list[Comparison] = []
    joined = replace(load_settings(settings.out, "join"), workers=1)
    found.append(compare(joined, progress=logs[1], interim=partial.append))
    first.join()
    for comparison in found:
        assert comparison.complete
        assert by_point(comparison) == by_point(finished[1])
    started = [(e.encoding, e.seed) for log in logs for e in log.of(RunStarted)]  # type: ignore[union-attr]
    assert sorted(started) == [("learned", 0), ("learned", 1), ("rope", 0), ("rope", 1)]
    for log in logs:
        assert log.of(RunStarted)
        ended = [e.finished for e in log.of(RunFinished) if isinstance(e, RunFinished)]
        assert ended == [1, 2, 3, 4]
    assert 1 <= len(partial) <= 3
    assert not any(comparison.complete for comparison in partial)


def test_joining_needs_a_comparison_of_these_settings(tmp_path: Path) -> None:
    settings = small(tmp_path, existing="join")
    with pytest.raises(OutputError, match=r"no settings\.json.*a file system that both share"):
        compare(settings)
    waiting = small(tmp_path, steps=None, budget_minutes=0.5)
    prepare(waiting)
    with pytest.raises(ArgumentError, match=r"batch: expected 4.*same settings"):
        compare(replace(waiting, existing="join", batch=8))
    with pytest.raises(ArgumentError, match=r"join.*steps are known.*--resume"):
        compare(replace(waiting, existing="join"))


def test_replaced_comparison_is_noticed(tmp_path: Path) -> None:
    settings = small(tmp_path, workers=1)

    def replaced() -> None:
        compare(replace(settings, existing="replace", batch=8))

    with pytest.raises(ArgumentError, match="batch: expected 8"):
        compare(settings, progress=Log(RunsPrepared, replaced))


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
    assert [e.steps for e in log.of(RunStarted) if isinstance(e, RunStarted)] == [7]
    assert (settings.out / "notes.txt").exists()


def test_resuming_needs_the_same_settings_and_text(
    finished: tuple[ComparisonSettings, Comparison, Log],
) -> None:
    settings = replace(finished[0], existing="resume")
    with pytest.raises(ArgumentError, match="batch: expected 4, as in the comparison"):
        compare(replace(settings, batch=8))
    with pytest.raises(ArgumentError, match="steps"):
        compare(replace(settings, steps=13))
    assert settings.text is not None
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


def test_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small(tmp_path)

    def refuse(path: Path, *args: object, **options: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OutputError, match=r"Read-only file system.*Choose a folder"):
        compare(settings)


def test_folder_below_a_file(tmp_path: Path) -> None:
    settings = small(tmp_path)
    with pytest.raises(OutputError, match="Not a directory"):
        compare(replace(settings, out=tmp_path / "text.txt" / "out"))


def test_unusable_text_leaves_no_folder(tmp_path: Path) -> None:
    settings = small(tmp_path)
    with pytest.raises(DataError, match="nothing there"):
        compare(replace(settings, text=tmp_path / "absent.txt"))
    (tmp_path / "text.txt").write_bytes(b"")
    with pytest.raises(DataError, match="an empty file"):
        compare(settings)
    (tmp_path / "text.txt").write_bytes(b"tiny")
    with pytest.raises(DataError, match="longer text"):
        compare(settings)
    assert not settings.out.exists()


def test_unknown_task(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="language"):
        compare(small(tmp_path, task="langage"))


def test_encoding_that_cannot_serve_is_refused_before_anything(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="head_dim"):
        compare(small(tmp_path, width=6, heads=2))
    assert not (tmp_path / "out").exists()


def test_training_beyond_memory_is_refused_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "available_memory", lambda device: 1000)
    with pytest.raises(ArgumentError, match="fits into"):
        compare(small(tmp_path))
    assert not (tmp_path / "out").exists()
