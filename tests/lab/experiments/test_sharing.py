"""Processes that share a comparison: one alone holds a run, whatever is killed or suspended."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.killed_sweeps import KILLS, Sweep, require_equal, tiny

from posenc.errors import ArgumentError, OutputError
from posenc.lab.experiments import locks as module
from posenc.lab.experiments.compare import compare, prepare
from posenc.lab.experiments.launch import launch
from posenc.lab.experiments.locks import HEARTBEAT, RunLocks, make_folders, with_idle_paths
from posenc.lab.experiments.settings import ComparisonSettings
from tests.support.processes import forking


@pytest.fixture
def idle(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "rope" / "seed-0"
    make_folders([folder], tmp_path / "runs")
    return folder


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test sets."""
    seconds = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: seconds[0])
    return seconds


def take(idle: Path, locks: RunLocks | None = None) -> Path:
    folder = (locks or RunLocks()).acquire(idle)
    assert folder is not None
    return folder


def held_elsewhere(folder: Path) -> Path:
    """The folder, as if a process of another machine held it."""
    owner = folder.name.partition("@")[2]
    return folder.rename(folder.with_name(folder.name.replace(owner, "other-12345678-1-abcdef01")))


def names(idle: Path) -> list[str]:
    return [path.name for path in idle.parent.iterdir()]


def at_once(work: Callable[[], Any]) -> list[Any]:
    """What eight threads return that begin together."""
    start = threading.Barrier(8)

    def begin(_: int) -> Any:
        start.wait()
        return work()

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(begin, range(8)))


def test_folder_is_released_with_what_was_written(idle: Path) -> None:
    """Half-written files of the dead are removed."""
    (idle / ".checkpoint.safetensors.7.partial").write_bytes(b"half")
    with RunLocks() as locks:
        folder = take(idle, locks)
        assert names(idle) == [folder.name]
        assert [path.name for path in folder.iterdir()] == [HEARTBEAT]
        assert f"-{os.getpid()}-" in folder.name
        (folder / "result").write_text("found")
        assert not locks.lost(folder)
        assert locks.release(folder)
    assert names(idle) == ["seed-0"]
    assert [path.name for path in idle.iterdir()] == ["result"]


def test_one_of_many_wins(idle: Path) -> None:
    taken = [folder for folder in at_once(lambda: RunLocks().acquire(idle)) if folder]
    assert names(idle) == [folder.name for folder in taken]
    assert len(taken) == 1


def test_end_of_the_block_releases_held_folders(idle: Path) -> None:
    def work() -> None:
        with RunLocks() as locks:
            take(idle, locks)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert names(idle) == ["seed-0"]


def lock_and_die(idle: Path) -> None:
    """Lock the folder and end without releasing it."""
    os._exit(3 if RunLocks().acquire(idle) else 1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the lease tells")
def test_folder_of_a_dead_process_of_this_machine_is_taken_at_once(idle: Path) -> None:
    owner = forking().Process(target=lock_and_die, args=(idle,))
    owner.start()
    owner.join()
    assert owner.exitcode == 3
    assert names(idle) != ["seed-0"]
    with RunLocks() as locks:
        take(idle, locks)


def test_owner_on_another_machine_is_dead_when_its_heartbeat_stands_still(
    idle: Path, now: list[float]
) -> None:
    folder = held_elsewhere(take(idle))
    looker = RunLocks()
    for _ in range(100):  # alive: it changes, by a clock that is years behind or ahead
        (folder / HEARTBEAT).write_text(f"{now[0]}")
        os.utime(folder / HEARTBEAT, (2 * now[0], 2 * now[0]))
        now[0] += module.HEARTBEAT_SECONDS
        assert looker.acquire(idle) is None
    looks = 0
    while (mine := looker.acquire(idle)) is None:
        now[0] += 1.0
        looks += 1
    assert looks == module.LEASE_SECONDS
    assert names(idle) == [mine.name]


def test_owner_that_dies_before_its_first_heartbeat_is_noticed(
    idle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_SECONDS", 0.0)
    (held_elsewhere(take(idle)) / HEARTBEAT).unlink()
    looker = RunLocks()
    assert looker.acquire(idle) is None
    assert looker.acquire(idle) is not None


def test_process_that_slept_does_not_take_the_others_for_dead(idle: Path, now: list[float]) -> None:
    held_elsewhere(take(idle))
    looker = RunLocks()
    assert looker.acquire(idle) is None
    now[0] += 10_000.0  # all machines were suspended, this one wakes first
    assert looker.acquire(idle) is None


def test_owner_that_was_taken_over_can_neither_write_nor_release(
    idle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_SECONDS", 0.0)
    suspended, other = RunLocks(), RunLocks()
    old = take(idle, suspended)
    assert other.acquire(idle) is None
    new = take(idle, other)
    assert suspended.lost(old)
    assert not other.lost(new)
    with pytest.raises(FileNotFoundError):
        (old / "run.json").write_text("of another time")
    assert not suspended.release(old)
    assert names(idle) == [new.name]
    assert other.release(new)


def test_heartbeats_go_on(idle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.001)
    with RunLocks() as locks:
        folder = take(idle, locks)
        beats = set()
        while len(beats) < 3:
            beats.add((folder / HEARTBEAT).read_bytes())


def test_folders_are_made_once_by_any_number_of_processes(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    folders = [root / name / f"seed-{seed}" for name in ("rope", "t5@buckets=8") for seed in (0, 1)]

    def work() -> list[Path]:
        make_folders(folders, root)
        locks = RunLocks()
        return list(filter(None, (locks.acquire(folder) for folder in folders)))

    held = [folder for folders in at_once(work) for folder in folders]
    assert len(held) == 4
    assert sorted(root.glob("*/.*")) == sorted(held)
    assert list(tmp_path.iterdir()) == [root]


def test_missing_folder_is_made_anew(idle: Path) -> None:
    other = idle.with_name("seed-1")
    make_folders([idle, other], idle.parent.parent)
    with RunLocks() as locks:
        folder = take(idle, locks)
        make_folders([idle, other], idle.parent.parent)
        assert sorted(names(idle)) == sorted([folder.name, "seed-1"])


def test_errors_name_the_idle_path(idle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLocks() as locks:
        written = take(idle, locks) / "run.json"
        error = OutputError("out", expected=f"to write {written}", got="x", remedy="Do.")
        renamed = with_idle_paths(error)
    assert type(renamed) is OutputError
    assert str(renamed) == f"out: expected to write {idle / 'run.json'}, got x. Do."

    def refuse(path: Path, target: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OutputError, match=r"seed-0.*Read-only file system.*Choose a folder"):
        RunLocks().acquire(idle)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="it finds workers by /proc")
def test_no_run_is_lost_or_done_twice(tmp_path: Path) -> None:
    """Processes are killed and suspended; benchmarks have the long form."""
    settings = replace(tiny(tmp_path / "undisturbed", seeds=2), steps=60)
    whole = compare(replace(settings, workers=None))
    out = tmp_path / "disturbed"
    prepare(replace(settings, out=out))
    sweep = Sweep(out, forking(), random.Random(4), processes=2)
    sweep.run(kinds=KILLS, longest=0.5)
    assert sweep.killed
    require_equal(sweep, whole, settings.out)


# Started by submitit


def launched(folder: Path) -> ComparisonSettings:
    pytest.importorskip("submitit")
    return replace(tiny(folder / "out", seeds=1), encodings=("rope", "alibi"), steps=3, workers=1)


@pytest.mark.long
def test_local_process_joins_a_comparison(tmp_path: Path) -> None:
    settings = launched(tmp_path)
    (job,) = launch(settings, cluster="local", options={"timeout_min": 5})
    assert job.result() is True
    comparison = json.loads((settings.out / "report" / "comparison.json").read_text())
    assert comparison["complete"]
    assert {run["subject"] for run in comparison["runs"]} == {"rope", "alibi"}
    assert (settings.out / "report" / "index.html").exists()
    with pytest.raises(OutputError, match=r"which exists.*--resume"):
        launch(settings, cluster="local", options={})


def test_launch_without_a_cluster_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    settings = launched(tmp_path)
    for cluster, options, changes, message in (
        ("slurm", {}, {}, r"srun.*login node"),
        ("cloud", {}, {}, "slurm or local"),
        ("local", {}, {"steps": None, "budget_minutes": 3.0}, r"budget_minutes.*--steps"),
        ("local", {"partitoin": "gpu"}, {}, r"launch_option.*partitoin"),
    ):
        with pytest.raises(ArgumentError, match=message):
            launch(replace(settings, **changes), cluster=cluster, options=options)
    assert not settings.out.exists()
