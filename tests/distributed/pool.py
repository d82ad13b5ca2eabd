"""One set of processes for all tests of collectives: jobs come by name."""

from __future__ import annotations

import importlib
import traceback
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.processes import forking

MOST = 4
"""Processes of a pool on the CPU."""

SECONDS = 300
"""Longest job, on a machine that has others to do."""


class Pool:
    """Processes with a group of each number of ranks.

    Args:
        folder: an empty one, for the processes to meet in.
        backend: of the groups; with ``"nccl"`` each process has the CUDA device of its rank.
        most: processes.
    """

    def __init__(self, folder: Path, *, backend: str = "gloo", most: int = MOST) -> None:
        context = forking()
        self.jobs: list[Queue[Any]] = [context.Queue() for _ in range(most)]  # type: ignore[attr-defined]
        self.results: Queue[Any] = context.Queue()  # type: ignore[attr-defined]
        self.processes = [
            context.Process(  # type: ignore[attr-defined]
                target=work,
                args=(rank, most, backend, str(folder / "store"), jobs, self.results),
                daemon=True,
            )
            for rank, jobs in enumerate(self.jobs)
        ]
        for process in self.processes:
            process.start()
        self.runs = 0

    def run(self, job: str, ranks: int, **arguments: Any) -> list[Any]:
        """The results of ``job`` on each of the first ``ranks`` ranks.

        Args:
            job: ``module:function``; the function takes the process group and ``arguments``.

        Raises:
            AssertionError: with the tracebacks of the ranks on which it raised.
        """
        self.runs += 1
        for queue in self.jobs[:ranks]:
            queue.put((self.runs, job, ranks, arguments))
        answers = dict(self._answer() for _ in range(ranks))
        failures = [
            f"rank {rank}:\n{answers[rank][1]}" for rank in range(ranks) if answers[rank][1]
        ]
        assert not failures, "\n".join(failures)
        return [answers[rank][0] for rank in range(ranks)]

    def _answer(self) -> tuple[int, tuple[Any, str]]:
        """The next answer to the present run; those to runs that were given up are skipped."""
        while True:
            run, rank, result, failure = self.results.get(timeout=SECONDS)
            if run == self.runs:
                return rank, (result, failure)

    def close(self) -> None:
        """End the processes."""
        for queue in self.jobs:
            queue.put(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def work(
    rank: int, most: int, backend: str, store: str, jobs: Queue[Any], results: Queue[Any]
) -> None:
    """Run jobs until there is none."""
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    patience = timedelta(seconds=SECONDS)
    address = f"file://{store}"
    dist.init_process_group(backend, address, rank=rank, world_size=most, timeout=patience)
    groups = {n: dist.new_group(list(range(n)), timeout=patience) for n in range(1, most + 1)}
    while (job := jobs.get()) is not None:
        run, name, ranks, arguments = job
        module, function = name.split(":")
        torch.manual_seed(0)
        try:
            result = getattr(importlib.import_module(module), function)(groups[ranks], **arguments)
            results.put((run, rank, result, ""))
        except BaseException:
            results.put((run, rank, None, traceback.format_exc()))
    dist.destroy_process_group()
