"""Sweeps whose processes are killed at random moments, against one that nothing disturbs.

    python -m benchmarks.killed_sweeps --kills 200

Several processes share a comparison of tiny runs, each as ``posenc compare --join`` does, with a
worker process of its own. Again and again one of them is picked at random and

- its worker is killed,
- the process itself is killed (its worker notices and ends),
- it and its worker are suspended until others have taken over its run, then continued,
- or all processes are killed at once, as by the failure of a machine;

and new ones join. When all runs are finished, each must have been written once, with the results
and the trained weights of the undisturbed sweep; then another sweep begins, until enough were
killed. Prints a line a sweep, and a summary.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

from safetensors.torch import load_file

from posenc.errors import PosencError
from posenc.lab.experiments import locks, workers
from posenc.lab.experiments.compare import compare, prepare
from posenc.lab.experiments.results import Comparison
from posenc.lab.experiments.settings import ComparisonSettings, load_settings
from posenc.lab.training import loop

SAVE_SECONDS = 0.05
HEARTBEAT_SECONDS = 0.05
LEASE_SECONDS = 0.6

KILLS = ("worker", "process", "suspended", "machine")

Results = dict[tuple[str, int, str, float], float]


def tiny(out: Path, *, seeds: int) -> ComparisonSettings:
    """A sweep of two encodings, each run of which takes about a second."""
    return ComparisonSettings(
        out=out,
        task="copy",
        encodings=("rope", "alibi"),
        references=(),
        train_length=8,
        test_lengths=(16,),
        steps=120,
        seeds=tuple(range(seeds)),
        width=16,
        layers=1,
        heads=2,
        batch=4,
        workers=1,
    )


def join(out: str) -> None:
    """Take part in the comparison, as a process of its own with a worker."""
    os.setsid()
    hurry()
    # An owner that has died would be known by its number; here its lease must run out.
    locks.MACHINE = f"{locks.MACHINE}.{os.getpid()}"
    with suppress(PosencError):  # a worker was killed
        compare(load_settings(Path(out), "join"))


def hurry() -> None:
    """Save, beat and expire within fractions of a second; start workers by forking."""
    loop.SAVE_SECONDS = SAVE_SECONDS
    locks.HEARTBEAT_SECONDS, locks.LEASE_SECONDS = HEARTBEAT_SECONDS, LEASE_SECONDS
    workers.multiprocessing = SimpleNamespace(get_context=lambda _: Forking())  # type: ignore[attr-defined]


class Forking:
    """Starts processes as ``spawn`` would, but by forking, which takes no time."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")
        self._ours: list[Connection] = []

    def Pipe(self) -> tuple[Connection, Connection]:  # noqa: N802
        """A pipe whose first end is closed in the processes."""
        ours, theirs = self._context.Pipe()
        self._ours.append(ours)
        return ours, theirs

    def Process(  # noqa: N802
        self, *, target: Callable[..., None], args: tuple[object, ...], daemon: bool
    ) -> BaseProcess:
        """A process, not yet started."""

        def closed() -> None:
            for connection in self._ours:
                connection.close()
            target(*args)

        return self._context.Process(target=closed, daemon=daemon)


@dataclass
class Sweep:
    """One sweep and the processes at work on it.

    Args:
        out: folder of a comparison that has been begun.
        context: starts the processes.
        draw: of the moments and kinds of the kills.
        processes: how many take part at a time.
    """

    out: Path
    context: BaseContext
    draw: random.Random
    processes: int = 3
    killed: Counter[str] = field(default_factory=Counter)
    members: list[BaseProcess] = field(default_factory=list)
    written: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def run(self, kinds: Iterable[str], *, longest: float = 1.0) -> None:
        """Kill so, at intervals of at most ``longest`` seconds, then let it finish."""
        left = iter(kinds)
        self._fill()
        while not self._finished():
            time.sleep(self.draw.uniform(0.0, longest))
            self._observe()
            if (kind := next(left, None)) is not None:
                self._kill(kind)
            self._fill()
        for member in self.members:
            member.join()
        self._observe()

    def _fill(self) -> None:
        self.members = [member for member in self.members if member.is_alive()]
        while len(self.members) < self.processes:
            member = self.context.Process(target=join, args=(str(self.out),))
            member.start()
            self.members.append(member)

    def _finished(self) -> bool:
        settings = load_settings(self.out)
        return len(self.written) == len(settings.trained) * len(settings.seeds)

    def _kill(self, kind: str) -> None:
        member = self.draw.choice(self.members)
        assert member.pid is not None
        if kind == "worker":
            for child in children(member.pid)[:1]:
                send(child, signal.SIGKILL)
                self.killed[kind] += 1
        elif kind == "process":
            send(member.pid, signal.SIGKILL)
            self.killed[kind] += 1
        elif kind == "suspended":
            family = (member.pid, *children(member.pid))
            for process in family:
                send(process, signal.SIGSTOP)
            time.sleep(2 * LEASE_SECONDS)
            for process in family:
                send(process, signal.SIGCONT)
            self.killed[kind] += 1
        else:
            for other in self.members:
                assert other.pid is not None
                for process in (other.pid, *children(other.pid)):
                    send(process, signal.SIGKILL)
            self.killed[kind] += 1
        for other in self.members:
            if kind in ("process", "machine") and (kind == "machine" or other is member):
                other.join()

    def _observe(self) -> None:
        """Note when each outcome was written; AssertionError if one is written again."""
        for path in self.out.glob("runs/*/seed-*/run.json"):
            with suppress(FileNotFoundError):  # locked by a process that saw it unfinished
                status = path.stat()
                stamp = (status.st_ino, status.st_mtime_ns)
                first = self.written.setdefault(path, stamp)
                if first != stamp:
                    raise AssertionError(f"{path} was written twice")


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(word) for word in text.split()]
    return []


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def results(comparison: Comparison) -> Results:
    """Every measurement, by what was measured."""
    return {(m.subject, m.seed, m.metric, m.x): m.value for m in comparison.measurements}


def weights(out: Path) -> dict[str, bytes]:
    """The trained weights of each run, to the bit (the order of a file's header is not fixed)."""
    return {
        f"{path.relative_to(out)} {name}": x.numpy().tobytes()
        for path in out.glob("runs/*/*/model/model.safetensors")
        for name, x in load_file(path).items()
    }


def leftovers(out: Path) -> list[str]:
    """Whatever lies beside the results of a sweep that is over."""
    expected = {"model", "run.json"}
    extra = [path for path in out.glob("runs/*/*/*") if path.name not in expected]
    return [str(path.relative_to(out)) for path in (*extra, *out.glob("runs/*/.*"))]


def require_equal(sweep: Sweep, whole: Comparison, undisturbed: Path) -> None:
    """Refuse a sweep that differs from the undisturbed one in anything but times.

    Raises:
        AssertionError: with the difference.
    """
    comparison = compare(load_settings(sweep.out))
    checks: dict[str, Callable[[], bool]] = {
        "a run was lost": lambda: comparison.complete,
        "results differ": lambda: results(comparison) == results(whole),
        "weights differ": lambda: weights(sweep.out) == weights(undisturbed),
        f"left over: {leftovers(sweep.out)}": lambda: not leftovers(sweep.out),
    }
    for message, holds in checks.items():
        if not holds():
            raise AssertionError(message)


def main() -> None:
    """Kill as often as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=6, help="of each of the two encodings")
    parser.add_argument("--processes", type=int, default=3)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    preloaded = ["posenc.lab.experiments.compare", "posenc.lab.experiments.tasks.symbols"]
    context.set_forkserver_preload(preloaded)
    total: Counter[str] = Counter()
    began, sweeps = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        settings = tiny(Path(folder) / "undisturbed", seeds=arguments.seeds)
        whole = compare(replace(settings, workers=None))
        while (kills := arguments.kills - total.total()) > 0:
            out = Path(folder) / f"disturbed-{sweeps}"
            prepare(replace(settings, out=out))
            draw = random.Random(sweeps)
            sweep = Sweep(out, context, draw, arguments.processes)
            sweep.run(draw.choices(KILLS, weights=(3, 3, 2, 1), k=kills))
            require_equal(sweep, whole, settings.out)
            total += sweep.killed
            sweeps += 1
            print(f"sweep {sweeps}: {dict(sweep.killed)}, equal", flush=True)
    runs = sweeps * len(settings.trained) * arguments.seeds
    seconds = time.monotonic() - began
    print(f"{total.total()} kills ({dict(total)}) of {sweeps} sweeps in {seconds:.0f} s:")
    print(f"{runs} runs, none lost, none written twice, results and weights identical")


if __name__ == "__main__":
    main()
