"""Starting the processes of a shared comparison on a cluster, by submitit."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posenc.errors import ArgumentError
from posenc.lab.experiments.compare import compare, prepare
from posenc.lab.experiments.report import LiveReport, write_report
from posenc.lab.experiments.settings import ComparisonSettings, load_settings

CLUSTERS = ("slurm", "local")

LOGS = "launch"
"""Folder of the processes' logs, in the comparison's."""


@dataclass(frozen=True)
class Join:
    """Takes part in the comparison in ``out``, and writes its report; run by submitit."""

    out: str

    def __call__(self) -> bool:
        """Returns when all runs are finished."""
        out = Path(self.out)
        comparison = compare(
            load_settings(out, "join"),
            command=f"posenc compare --join {out}",
            interim=LiveReport(out / "report"),
        )
        write_report(comparison, out / "report", overwrite=True)
        return comparison.complete

    def checkpoint(self) -> Any:
        """Resubmit this job; submitit calls it on preemption and timeout."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def launch(
    settings: ComparisonSettings, *, cluster: str, nodes: int = 1, options: Mapping[str, Any]
) -> list[Any]:
    """Begin (or continue) a comparison by processes that a cluster starts.

    Args:
        settings: of the comparison; ``out`` must be on a file system that all nodes share.
        cluster: ``"slurm"``, or ``"local"`` for processes of this machine.
        nodes: how many processes, each on a node of its own.
        options: of submitit's ``update_parameters`` (``timeout_min``, ``slurm_partition``, …).

    Returns:
        submitit's jobs, a process each.

    Raises:
        ArgumentError: without submitit or the cluster, for unknown options, and for a budget in
            minutes, which needs the number of processes that will be at work.
        OutputError, DataError: as ``compare``.
    """
    if settings.budget_minutes is not None:
        raise ArgumentError(
            "budget_minutes",
            expected="none: it is not known how many processes will be at work",
            got=settings.budget_minutes,
            remedy="Give --steps.",
        )
    with tempfile.TemporaryDirectory() as folder:
        _executor(Path(folder), cluster, options)  # its errors leave nothing behind
    prepare(settings)
    executor = _executor(settings.out / LOGS, cluster, options)
    with executor.batch():
        return [executor.submit(Join(str(settings.out.resolve()))) for _ in range(nodes)]


def _executor(logs: Path, cluster: str, options: Mapping[str, Any]) -> Any:
    try:
        import submitit
    except ImportError as error:
        raise ArgumentError(
            "launch",
            expected="submitit to be installed",
            got="no such module",
            remedy='Run pip install "posenc[slurm]".',
        ) from error
    if cluster not in CLUSTERS:
        remedy = "Choose one."
        raise ArgumentError("launch", expected=" or ".join(CLUSTERS), got=cluster, remedy=remedy)
    try:
        executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        executor.update_parameters(**{"name": "posenc", **options})
    except (TypeError, ValueError, NameError) as error:
        raise ArgumentError(
            "launch_option",
            expected="options of submitit",
            got=error,
            remedy="See submitit's documentation, for example timeout_min=60.",
        ) from error
    except RuntimeError as error:
        raise ArgumentError(
            "launch",
            expected="a machine from which jobs can be submitted to Slurm",
            got=error,
            remedy="Run it on a login node, or run posenc compare --join on each node.",
        ) from error
    return executor
