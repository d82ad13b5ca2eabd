"""Sweeps whose processes are killed at random moments, against one that nothing disturbs.

    python -m benchmarks.killed_sweeps --executor processes --kills 100
    python -m benchmarks.killed_sweeps --executor ray --kills 20

A comparison of tiny runs is carried out by processes, submitit's local jobs, or a cluster of Ray on
this machine. Again and again

- a process at work on a run is killed,
- the process that called ``compare`` is killed, and another one resumes,
- a node of Ray is killed, and another one joins,
- or all of these are killed at once.

When all runs are finished, each must have been written once, with the results and the trained
weights of the undisturbed sweep; then another sweep begins, until enough were killed. Prints a line
a sweep, and a summary.
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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from posenc.errors import PosencError
from posenc.lab.experiments import executors
from posenc.lab.experiments.compare import compare
from posenc.lab.experiments.executors import LOGS, cluster_executor
from posenc.lab.experiments.results import Comparison
from posenc.lab.experiments.settings import RUNS, ComparisonSettings, load_settings
from posenc.lab.training import loop

SAVE_SECONDS = 0.05

Results = dict[tuple[str, int, str, float], float]


def tiny(out: Path, *, seeds: int, steps: int = 120) -> ComparisonSettings:
    """A sweep of two encodings, each run of which takes about a second."""
    return ComparisonSettings(
        out=out,
        task="copy",
        encodings=("rope", "alibi"),
        references=(),
        train_length=8,
        test_lengths=(16,),
        steps=steps,
        seeds=tuple(range(seeds)),
        width=16,
        layers=1,
        heads=2,
        batch=4,
        workers=2,
    )


def drive(settings: ComparisonSettings, executor: str) -> None:
    """Carry out or resume the comparison, as a process of its own."""
    hurry()
    if (settings.out / "settings.json").exists():
        settings = load_settings(settings.out)
    with suppress(PosencError):  # runs whose processes were killed too often
        cluster = None if executor == "processes" else cluster_executor(executor, settings.out, {})
        compare(settings, executor=cluster)


def hurry() -> None:
    """Save within fractions of a second; start workers by forking, which takes no time."""
    loop.SAVE_SECONDS = SAVE_SECONDS
    executors.get_context = lambda _: multiprocessing.get_context("fork")  # type: ignore[assignment]


@dataclass
class Sweep:
    """One sweep, and the process that drives it.

    Args:
        settings: of the sweep, in a new folder.
        context: starts the driver.
        draw: of the moments and kinds of the kills.
        executor: ``"processes"``, ``"local"`` or ``"ray"``.
        cluster: of Ray.
    """

    settings: ComparisonSettings
    context: BaseContext
    draw: random.Random
    executor: str = "processes"
    cluster: Any = None
    killed: Counter[str] = field(default_factory=Counter)
    written: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def run(self, kinds: Iterable[str], *, longest: float = 1.0) -> None:
        """Kill so, at intervals of at most ``longest`` seconds, then let it finish."""
        left = list(kinds)
        self._start()
        while not self._finished():
            time.sleep(self.draw.uniform(0.0, longest))
            self._observe()
            if left and self._kill(left[0]):
                left.pop(0)
            if not self.driver.is_alive() and not self._finished():
                self._start()
        self.driver.join()
        self._observe()

    def _start(self) -> None:
        self.driver = self.context.Process(target=drive, args=(self.settings, self.executor))
        self.driver.start()

    def _finished(self) -> bool:
        return len(self.written) == len(self.settings.trained) * len(self.settings.seeds)

    def workers(self) -> list[int]:
        """Processes at work on runs, or about to be."""
        if self.cluster is not None:
            nodes = self.cluster.worker_nodes
            raylets = [children(pid) for node in nodes for pid in raylet_pids(node)]
            return [pid for pids in raylets for pid in pids if "ray::perform" in command(pid)]
        if self.executor == "local":
            logs = str(self.settings.out / LOGS)
            return [pid for pid in pids() if logs in command(pid)]
        assert self.driver.pid is not None
        return children(self.driver.pid)

    def _kill(self, kind: str) -> bool:
        """False if there is nothing of this kind at present."""
        workers = self.workers()
        if kind in ("worker", "all") and not workers:
            return False
        if kind == "worker":
            send(self.draw.choice(workers), signal.SIGKILL)
        elif kind == "node":
            node = self.draw.choice(list(self.cluster.worker_nodes))
            self.cluster.remove_node(node, allow_graceful=False)
            self.cluster.add_node(num_cpus=1)
        else:
            for pid in workers if kind == "all" else ():
                send(pid, signal.SIGKILL)
            self.driver.kill()
            self.driver.join()
        self.killed[kind] += 1
        return True

    def _observe(self) -> None:
        """Note when each outcome was written; AssertionError if one is written again."""
        for path in self.settings.out.glob(f"{RUNS}/*/seed-*/run.json"):
            status = path.stat()
            stamp = (status.st_ino, status.st_mtime_ns)
            if self.written.setdefault(path, stamp) != stamp:
                raise AssertionError(f"{path} was written twice")


def pids() -> list[int]:
    """Numbers of all processes of this machine."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def command(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def raylet_pids(node: Any) -> list[int]:
    """Numbers of the processes of a node of Ray that start its workers."""
    return [info.process.pid for info in node.all_processes.get("raylet", ())]


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    with suppress(OSError):
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        return [int(word) for text in texts for word in text.split()]
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


def require_equal(out: Path, whole: Comparison, undisturbed: Path) -> None:
    """Refuse a sweep that differs from the undisturbed one in anything but times.

    Raises:
        AssertionError: with the difference.
    """
    comparison = compare(load_settings(out))
    checks: dict[str, Callable[[], bool]] = {
        "a run was lost": lambda: comparison.complete,
        "results differ": lambda: results(comparison) == results(whole),
        "weights differ": lambda: weights(out) == weights(undisturbed),
        f"left over: {leftovers(out)}": lambda: not leftovers(out),
    }
    for message, holds in checks.items():
        if not holds():
            raise AssertionError(message)


def local_cluster() -> Any:
    """Nodes of Ray on this machine: one of the callers, two that carry out a run each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    return cluster


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill as often as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executor", choices=("processes", "local", "ray"), default="processes")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--most", type=int, default=20, help="kills in one sweep")
    parser.add_argument("--seeds", type=int, default=6, help="of each of the two encodings")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--longest", type=float, default=1.0, help="seconds between two kills")
    options = parser.parse_args(arguments)
    cluster = local_cluster() if options.executor == "ray" else None
    kinds, shares = ("worker", "driver", "all"), (3, 2, 1)
    if cluster is not None:
        kinds, shares = (*kinds, "node"), (*shares, 3)
    context = multiprocessing.get_context("forkserver")
    preloaded = ["posenc.lab.experiments.compare", "posenc.lab.experiments.tasks.symbols"]
    context.set_forkserver_preload(preloaded)
    total: Counter[str] = Counter()
    began, sweeps = time.monotonic(), 0
    hurry()
    with tempfile.TemporaryDirectory() as folder:
        settings = tiny(Path(folder) / "undisturbed", seeds=options.seeds, steps=options.steps)
        whole = compare(settings)
        while (kills := min(options.most, options.kills - total.total())) > 0:
            out = Path(folder) / f"disturbed-{sweeps}"
            draw = random.Random(sweeps)
            sweep = Sweep(replace(settings, out=out), context, draw, options.executor, cluster)
            sweep.run(draw.choices(kinds, weights=shares, k=kills), longest=options.longest)
            require_equal(out, whole, settings.out)
            total += sweep.killed
            sweeps += 1
            print(f"sweep {sweeps}: {dict(sweep.killed)}, equal", flush=True)
    if cluster is not None:
        cluster.shutdown()
    runs = sweeps * len(settings.trained) * options.seeds
    seconds = time.monotonic() - began
    print(f"{total.total()} kills ({dict(total)}) of {sweeps} sweeps in {seconds:.0f} s:")
    print(f"{runs} runs, none lost, none written twice, results and weights identical")


if __name__ == "__main__":
    main()
