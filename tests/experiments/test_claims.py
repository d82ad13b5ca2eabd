"""Claims: one process alone holds a folder, whatever is killed or suspended."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from posenc.errors import OutputError
from posenc.experiments import claims as module
from posenc.experiments.claims import HEARTBEAT, Claims, make_folders, with_idle_paths
from tests.support.processes import forking


@pytest.fixture
def rest(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "rope" / "seed-0"
    make_folders([folder], tmp_path / "runs")
    return folder


def elsewhere(folder: Path) -> Path:
    """The folder, as if a process of another machine held it."""
    owner = folder.name.partition("@")[2]
    return folder.rename(folder.with_name(folder.name.replace(owner, "other-12345678-1-abcdef01")))


def names(rest: Path) -> list[str]:
    return [path.name for path in rest.parent.iterdir()]


def test_claim_is_returned_with_what_was_written(rest: Path) -> None:
    with Claims() as claims:
        folder = claims.take(rest)
        assert folder is not None
        assert names(rest) == [folder.name]
        assert f"-{os.getpid()}-" in folder.name
        (folder / "result").write_text("found")
        assert not claims.lost(folder)
        assert claims.release(folder)
    assert names(rest) == ["seed-0"]
    assert [path.name for path in rest.iterdir()] == ["result"]


def test_one_of_many_wins(rest: Path) -> None:
    taken: list[Path] = []
    start = threading.Barrier(8)

    def work() -> None:
        claims = Claims()
        start.wait()
        folder = claims.take(rest)
        if folder is not None:
            taken.append(folder)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(rest) == [folder.name for folder in taken]
    assert len(taken) == 1


def test_end_of_the_block_returns_what_is_held(rest: Path) -> None:
    def work() -> None:
        with Claims() as claims:
            assert claims.take(rest)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert names(rest) == ["seed-0"]


def take_and_die(rest: Path) -> None:
    """Claim the folder and end without returning it."""
    os._exit(3 if Claims().take(rest) else 1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the lease tells")
def test_folder_of_a_dead_process_of_this_machine_is_taken_at_once(rest: Path) -> None:
    owner = forking().Process(target=take_and_die, args=(rest,))  # type: ignore[attr-defined]
    owner.start()
    owner.join()
    assert owner.exitcode == 3
    assert names(rest) != ["seed-0"]
    with Claims() as claims:
        assert claims.take(rest)


def test_owner_on_another_machine_is_dead_when_its_heartbeat_stands_still(
    rest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    owner, looker = Claims(), Claims()
    taken = owner.take(rest)
    assert taken is not None
    folder = elsewhere(taken)
    for _ in range(100):  # alive: it changes, by a clock that is years behind or ahead
        (folder / HEARTBEAT).write_text(f"{now[0]}")
        os.utime(folder / HEARTBEAT, (2 * now[0], 2 * now[0]))
        now[0] += module.HEARTBEAT_SECONDS
        assert looker.take(rest) is None
    looks = 0
    while (mine := looker.take(rest)) is None:
        now[0] += 1.0
        looks += 1
    assert looks == module.LEASE_SECONDS
    assert names(rest) == [mine.name]


def test_owner_that_dies_before_its_first_heartbeat_is_noticed(
    rest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_SECONDS", 0.0)
    taken = Claims().take(rest)
    assert taken is not None
    (elsewhere(taken) / HEARTBEAT).unlink()
    looker = Claims()
    assert looker.take(rest) is None
    assert looker.take(rest) is not None


def test_process_that_slept_does_not_take_the_others_for_dead(
    rest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    taken = Claims().take(rest)
    assert taken is not None
    elsewhere(taken)
    looker = Claims()
    assert looker.take(rest) is None
    now[0] += 10_000.0  # all machines were suspended, this one wakes first
    assert looker.take(rest) is None


def test_owner_that_was_taken_over_can_neither_write_nor_return(
    rest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_SECONDS", 0.0)
    suspended, other = Claims(), Claims()
    old = suspended.take(rest)
    assert old is not None
    assert other.take(rest) is None
    new = other.take(rest)
    assert new is not None
    assert suspended.lost(old)
    assert not other.lost(new)
    with pytest.raises(FileNotFoundError):
        (old / "run.json").write_text("of another time")
    assert not suspended.release(old)
    assert names(rest) == [new.name]
    assert other.release(new)


def test_half_written_files_of_the_dead_are_removed(rest: Path) -> None:
    (rest / ".checkpoint.safetensors.7.partial").write_bytes(b"half")
    with Claims() as claims:
        folder = claims.take(rest)
        assert folder is not None
        assert [path.name for path in folder.iterdir()] == [HEARTBEAT]


def test_heartbeats_go_on(rest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.001)
    with Claims() as claims:
        folder = claims.take(rest)
        assert folder is not None
        seen = set()
        while len(seen) < 3:
            seen.add((folder / HEARTBEAT).read_bytes())


def test_folders_are_made_once_by_any_number_of_processes(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    folders = [root / name / f"seed-{seed}" for name in ("rope", "t5@buckets=8") for seed in (0, 1)]
    start = threading.Barrier(8)
    held: list[Path] = []

    def work() -> None:
        start.wait()
        make_folders(folders, root)
        claims = Claims()
        held.extend(filter(None, (claims.take(folder) for folder in folders)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 4
    assert sorted(root.glob("*/.*")) == sorted(held)
    assert list(tmp_path.iterdir()) == [root]


def test_missing_folder_is_made_anew(rest: Path) -> None:
    other = rest.with_name("seed-1")
    make_folders([rest, other], rest.parent.parent)
    with Claims() as claims:
        folder = claims.take(rest)
        assert folder is not None
        make_folders([rest, other], rest.parent.parent)
        assert sorted(names(rest)) == sorted([folder.name, "seed-1"])


def test_read_only_folder(rest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OutputError, match=r"seed-0.*Read-only file system.*Choose a folder"):
        Claims().take(rest)


def test_errors_tell_the_path_at_rest(rest: Path) -> None:
    with Claims() as claims:
        folder = claims.take(rest)
        assert folder is not None
        error = OutputError(
            "out", expected=f"to write {folder / 'run.json'}", got="x", remedy="Do."
        )
        error_at_rest = with_idle_paths(error)
    assert type(error_at_rest) is OutputError
    assert str(error_at_rest) == f"out: expected to write {rest / 'run.json'}, got x. Do."
