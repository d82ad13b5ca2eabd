"""Executors of runs: locks of folders, submitit, Ray, and processes that are killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.killed_sweeps import Sweep, require_equal, results, tiny

from posenc.errors import ArgumentError, DataError, Interrupted, OutputError
from posenc.lab.experiments.compare import compare
from posenc.lab.experiments.executors import Submission, cluster_executor, perform
from posenc.lab.experiments.jobs import OUTCOME, TrainingJob
from posenc.lab.experiments.settings import RECORD, load_settings, locked, open_folder, stop_file
from tests.support.processes import forking


def lock_and_die(path: Path) -> None:
    """End without releasing the lock."""
    with locked(path):
        os._exit(3)


def test_a_dead_process_leaves_its_lock_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    owner = forking().Process(target=lock_and_die, args=(path,))
    owner.start()
    owner.join()
    assert owner.exitcode == 3
    with locked(path), pytest.raises(OutputError, match="another call or job is"), locked(path):
        pass


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    """A job whose comparison has been begun."""
    settings = tiny(tmp_path / "out", seeds=1, steps=3)
    with open_folder(settings, settings.entry.make(settings).fingerprint):
        return TrainingJob(settings=settings, encoding="rope", seed=0)


def test_finished_run_is_not_done_again(job: TrainingJob) -> None:
    events: list[Any] = []
    outcome, _ = perform(job, events.append)
    assert events
    written = (job.folder / OUTCOME).stat().st_mtime_ns
    events.clear()
    assert perform(job, events.append)[0] == outcome
    assert not events
    assert (job.folder / OUTCOME).stat().st_mtime_ns == written


def test_job_waits_for_one_of_the_same_run(job: TrainingJob) -> None:
    """Its own end is a stop, or the end of the other."""
    job.folder.mkdir(parents=True)
    answers: list[Any] = []
    lock = job.folder.with_name(".seed-0.lock")
    with locked(lock):
        waiting = threading.Thread(target=lambda: answers.append(perform(job)))
        waiting.start()
        waiting.join(0.5)
        assert not answers
        assert not (job.folder / OUTCOME).exists()
        stop_file(job.settings.out).touch()
        waiting.join()
        with pytest.raises(OutputError, match="another call or job is"):
            compare(replace(job.settings, existing="replace"))
    assert isinstance(answers.pop(), Interrupted)
    stop_file(job.settings.out).unlink()
    assert len(perform(job)[0].runs) == 1


def test_job_of_another_comparison_changes_nothing(job: TrainingJob) -> None:
    record = job.settings.out / RECORD
    plain = json.loads(record.read_text())
    record.write_text(json.dumps(plain | {"data": "other"}))
    assert isinstance(perform(job), DataError)
    plain["settings"]["batch"] = 8
    record.write_text(json.dumps(plain))
    assert isinstance(perform(job), ArgumentError)
    assert not list(job.folder.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("name", ["local", "ray"])
def test_cluster_gives_what_processes_give(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ray" if name == "ray" else "submitit")
    settings = tiny(tmp_path / "out", seeds=1, steps=3)
    comparison = compare(settings, executor=cluster_executor(name, settings.out, {}))
    assert comparison.complete
    expected = compare(replace(settings, out=tmp_path / "processes"))
    assert results(comparison) == results(expected)
    again = compare(load_settings(settings.out), executor=cluster_executor(name, settings.out, {}))
    assert again.runs == comparison.runs


def test_submitit_submits_a_preempted_job_again(job: TrainingJob) -> None:
    pytest.importorskip("submitit")
    again = Submission(job).checkpoint()
    again.function(*again.args, **again.kwargs)
    assert (job.folder / OUTCOME).exists()


def test_what_no_cluster_can_do_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", "")
    out = tmp_path / "out"
    for name, options, message in (
        ("slurm", {}, r"srun.*login node"),
        ("cloud", {}, "slurm, local or ray"),
        ("local", {"partitoin": "gpu"}, r"launch_option.*partitoin"),
    ):
        with pytest.raises(ArgumentError, match=message):
            cluster_executor(name, out, options)
    settings = replace(tiny(out, seeds=1), steps=None, minutes=3.0)
    with pytest.raises(ArgumentError, match=r"minutes.*--steps"):
        compare(settings, executor=cluster_executor("local", out, {}))
    assert not out.exists()


@pytest.mark.long
def test_no_run_is_lost_or_done_twice(tmp_path: Path) -> None:
    """Processes are killed; benchmarks have the long form."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("its workers fork")
    settings = replace(tiny(tmp_path / "undisturbed", seeds=2), steps=60)
    whole = compare(settings)
    sweep = Sweep(replace(settings, out=tmp_path / "disturbed"), forking(), random.Random(4))
    sweep.run(("worker", "driver", "all"), longest=0.5)
    require_equal(sweep.settings.out, whole, settings.out)
