"""Exclusive locks on folders of runs that several processes, perhaps on several machines, share.

A folder has one name at a time: its own, while idle; and ``.NAME@OWNER`` while a process holds it.
Locking it, taking it over from an owner that is dead, and releasing it are one rename each, which
the file system lets a single process win. An owner that was wrongly taken for dead no longer finds
its folder, so that it can neither write its result nor release the folder.

An owner rewrites a small file in its folder every few seconds. Other machines judge by whether they
see it change, never by its time, so that clocks need not agree.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from posenc.errors import PosencError
from posenc.storage import unwritable

HEARTBEAT_SECONDS = 5.0
"""Time between the signs of life of an owner."""

LEASE_SECONDS = 60.0
"""An owner that gives no sign of life for so long is taken for dead."""

LONGEST_LOOK = 2.0
"""Most seconds that one look at an unchanged heartbeat counts; more means that the looker slept."""

HEARTBEAT = "heartbeat"

HELD = re.compile(r"\.([^/@]+)@[^/\s]+-\d+-[0-9a-f]{8}")


@dataclass
class _Heartbeat:
    """The last heartbeat read, unchanged for ``still`` seconds."""

    beat: bytes
    looked: float
    still: float = 0.0


class RunLocks:
    """The locks of this process, and the last heartbeats of others; a context manager.

    A thread writes the heartbeats. On exit, locks still held are released.
    """

    def __init__(self) -> None:
        self._held: dict[Path, Path] = {}
        self._heartbeats: dict[Path, _Heartbeat] = {}
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)

    def __enter__(self) -> RunLocks:
        return self

    def __exit__(self, *exception: object) -> None:
        for folder in list(self._held):
            with suppress(PosencError):
                self.release(folder)
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def acquire(self, idle: Path) -> Path | None:
        """Lock a folder that is idle, or held by an owner that is dead.

        Args:
            idle: its path while no process holds it.

        Returns:
            Its path while it is held; None if another process holds it.

        Raises:
            OutputError: if the file system refuses.
        """
        mine = idle.with_name(f".{idle.name}@{MACHINE}-{os.getpid()}-{secrets.token_hex(4)}")
        for folder in (idle, *self._dead(idle)):
            try:
                folder.rename(mine)
                for leftover in mine.glob(".*.partial"):
                    leftover.unlink(missing_ok=True)
                _beat(mine, 0)
            except FileNotFoundError:  # another process was faster
                continue
            except OSError as error:
                with suppress(OSError):
                    mine.rename(idle)
                raise unwritable(idle, error) from error
            with self._lock:
                self._held[mine] = idle
            if not self._thread.is_alive():
                self._thread.start()
            return mine
        return None

    def lost(self, folder: Path) -> bool:
        """True if a held folder was taken over by another process."""
        return not folder.exists()

    def release(self, folder: Path) -> bool:
        """Rename a held folder to its idle path; False if it was taken over.

        Raises:
            OutputError: if the file system refuses.
        """
        with self._lock:
            idle = self._held.pop(folder)
        try:
            (folder / HEARTBEAT).unlink(missing_ok=True)
            folder.rename(idle)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise unwritable(idle, error) from error
        return True

    def _dead(self, idle: Path) -> Iterator[Path]:
        """Held forms of the folder whose owner is dead."""
        for folder in idle.parent.glob(f".{idle.name}@*"):
            if folder in self._held:
                continue
            machine, pid, _ = folder.name.partition("@")[2].rsplit("-", 2)
            if (machine == MACHINE and _ended(int(pid))) or self._is_silent(folder):
                yield folder

    def _is_silent(self, folder: Path) -> bool:
        try:
            beat = (folder / HEARTBEAT).read_bytes()
        except OSError:
            beat = b""
        now = time.monotonic()
        last = self._heartbeats.get(folder)
        if last is None or last.beat != beat:
            self._heartbeats[folder] = _Heartbeat(beat, now)
            return False
        last.still += min(now - last.looked, LONGEST_LOOK)
        last.looked = now
        return last.still >= LEASE_SECONDS

    def _live(self) -> None:
        count = 0
        while not self._ending.wait(HEARTBEAT_SECONDS):
            count += 1
            with self._lock:
                for folder in self._held:
                    with suppress(OSError):  # then others see no sign of life
                        _beat(folder, count)


def make_folders(folders: list[Path], root: Path) -> None:
    """Make folders that can be locked, each once, though other processes do the same.

    Args:
        folders: their idle paths, all below ``root``.
        root: made as a whole if it is not there.

    Raises:
        OutputError: if the file system refuses.
    """
    try:
        if not root.exists():
            _make_tree(folders, root)
        missing = folders
        for _ in range(2):  # one look could miss a folder that is being renamed
            missing = [f for f in missing if not (f.exists() or [*f.parent.glob(f".{f.name}@*")])]
        for folder in missing:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(root, error) from error


def _make_tree(folders: list[Path], root: Path) -> None:
    scratch = root.with_name(f".{root.name}.{secrets.token_hex(4)}.partial")
    try:
        for folder in folders:
            (scratch / folder.relative_to(root)).mkdir(parents=True)
        scratch.rename(root)
    except OSError:
        if not root.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def with_idle_paths(error: PosencError) -> PosencError:
    """The error with the paths of held folders as they are while idle."""
    words = (error.argument, error.expected, error.got, error.remedy)
    argument, expected, got, remedy = (HELD.sub(r"\1", text) for text in words)
    return type(error)(argument, expected=expected, got=got, remedy=remedy)


def _beat(folder: Path, count: int) -> None:
    (folder / HEARTBEAT).write_bytes(b"%d\n" % count)


def _ended(pid: int) -> bool:
    """True if the process of this number has certainly ended; never true but on Linux."""
    if not Path("/proc/self/stat").exists():
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def _machine() -> str:
    """The name of this machine since its start, within which process numbers are unique."""
    marks = [socket.gethostname()]
    with suppress(OSError):
        marks.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        marks.append(str(Path("/proc/self/ns/pid").readlink()))
    name = re.sub(r"[^\w.]", "_", marks[0])[:64]
    return f"{name}-{hashlib.sha256(repr(marks).encode()).hexdigest()[:8]}"


MACHINE = _machine()
