"""RunLocks: one process alone holds a folder, whatever is killed or suspended."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from posenc.errors import OutputError
from posenc.lab.experiments import locks as module
from posenc.lab.experiments.locks import HEARTBEAT, RunLocks, make_folders, with_idle_paths
from tests.support.processes import forking


@pytest.fixture
def idle(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "rope" / "seed-0"
    make_folders([folder], tmp_path / "runs")
    return folder


def held_elsewhere(folder: Path) -> Path:
    """The folder, as if a process of another machine held it."""
    owner = folder.name.partition("@")[2]
    return folder.rename(folder.with_name(folder.name.replace(owner, "other-12345678-1-abcdef01")))


def names(idle: Path) -> list[str]:
    return [path.name for path in idle.parent.iterdir()]


def test_folder_is_released_with_what_was_written(idle: Path) -> None:
    with RunLocks() as locks:
        folder = locks.acquire(idle)
        assert folder is not None
        assert names(idle) == [folder.name]
        assert f"-{os.getpid()}-" in folder.name
        (folder / "result").write_text("found")
        assert not locks.lost(folder)
        assert locks.release(folder)
    assert names(idle) == ["seed-0"]
    assert [path.name for path in idle.iterdir()] == ["result"]


def test_one_of_many_wins(idle: Path) -> None:
    taken: list[Path] = []
    start = threading.Barrier(8)

    def work() -> None:
        locks = RunLocks()
        start.wait()
        folder = locks.acquire(idle)
        if folder is not None:
            taken.append(folder)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(idle) == [folder.name for folder in taken]
    assert len(taken) == 1


def test_end_of_the_block_releases_held_folders(idle: Path) -> None:
    def work() -> None:
        with RunLocks() as locks:
            assert locks.acquire(idle)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert names(idle) == ["seed-0"]


def lock_and_die(idle: Path) -> None:
    """Lock the folder and end without releasing it."""
    os._exit(3 if RunLocks().acquire(idle) else 1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the lease tells")
def test_folder_of_a_dead_process_of_this_machine_is_taken_at_once(idle: Path) -> None:
    owner = forking().Process(target=lock_and_die, args=(idle,))  # type: ignore[attr-defined]
    owner.start()
    owner.join()
    assert owner.exitcode == 3
    assert names(idle) != ["seed-0"]
    with RunLocks() as locks:
        assert locks.acquire(idle)


def test_owner_on_another_machine_is_dead_when_its_heartbeat_stands_still(
    idle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    owner, looker = RunLocks(), RunLocks()
    taken = owner.acquire(idle)
    assert taken is not None
    folder = held_elsewhere(taken)
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
    taken = RunLocks().acquire(idle)
    assert taken is not None
    (held_elsewhere(taken) / HEARTBEAT).unlink()
    looker = RunLocks()
    assert looker.acquire(idle) is None
    assert looker.acquire(idle) is not None


def test_process_that_slept_does_not_take_the_others_for_dead(
    idle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    taken = RunLocks().acquire(idle)
    assert taken is not None
    held_elsewhere(taken)
    looker = RunLocks()
    assert looker.acquire(idle) is None
    now[0] += 10_000.0  # all machines were suspended, this one wakes first
    assert looker.acquire(idle) is None


def test_owner_that_was_taken_over_can_neither_write_nor_release(
    idle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_SECONDS", 0.0)
    suspended, other = RunLocks(), RunLocks()
    old = suspended.acquire(idle)
    assert old is not None
    assert other.acquire(idle) is None
    new = other.acquire(idle)
    assert new is not None
    assert suspended.lost(old)
    assert not other.lost(new)
    with pytest.raises(FileNotFoundError):
        (old / "run.json").write_text("of another time")
    assert not suspended.release(old)
    assert names(idle) == [new.name]
    assert other.release(new)


def test_half_written_files_of_the_dead_are_removed(idle: Path) -> None:
    (idle / ".checkpoint.safetensors.7.partial").write_bytes(b"half")
    with RunLocks() as locks:
        folder = locks.acquire(idle)
        assert folder is not None
        assert [path.name for path in folder.iterdir()] == [HEARTBEAT]


def test_heartbeats_go_on(idle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.001)
    with RunLocks() as locks:
        folder = locks.acquire(idle)
        assert folder is not None
        beats = set()
        while len(beats) < 3:
            beats.add((folder / HEARTBEAT).read_bytes())


def test_folders_are_made_once_by_any_number_of_processes(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    folders = [root / name / f"seed-{seed}" for name in ("rope", "t5@buckets=8") for seed in (0, 1)]
    start = threading.Barrier(8)
    held: list[Path] = []

    def work() -> None:
        start.wait()
        make_folders(folders, root)
        locks = RunLocks()
        held.extend(filter(None, (locks.acquire(folder) for folder in folders)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 4
    assert sorted(root.glob("*/.*")) == sorted(held)
    assert list(tmp_path.iterdir()) == [root]


def test_missing_folder_is_made_anew(idle: Path) -> None:
    other = idle.with_name("seed-1")
    make_folders([idle, other], idle.parent.parent)
    with RunLocks() as locks:
        folder = locks.acquire(idle)
        assert folder is not None
        make_folders([idle, other], idle.parent.parent)
        assert sorted(names(idle)) == sorted([folder.name, "seed-1"])


def test_read_only_folder(idle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OutputError, match=r"seed-0.*Read-only file system.*Choose a folder"):
        RunLocks().acquire(idle)


def test_errors_name_the_idle_path(idle: Path) -> None:
    with RunLocks() as locks:
        folder = locks.acquire(idle)
        assert folder is not None
        error = OutputError(
            "out", expected=f"to write {folder / 'run.json'}", got="x", remedy="Do."
        )
        renamed = with_idle_paths(error)
    assert type(renamed) is OutputError
    assert str(renamed) == f"out: expected to write {idle / 'run.json'}, got x. Do."
