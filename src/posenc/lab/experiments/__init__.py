"""Comparisons: train small models that differ in their encoding, and see which hold up.

A script that compares, writes the report and prints the answer::

    from pathlib import Path

    from posenc.lab.experiments.compare import compare
    from posenc.lab.experiments.report import write_report
    from posenc.lab.experiments.settings import ComparisonSettings
    from posenc.lab.experiments.summary import summarise

    if __name__ == "__main__":  # compare starts processes, which import this script
        comparison = compare(ComparisonSettings(out=Path("out"), encodings=("rope", "alibi")))
        write_report(comparison, Path("out/report"))
        print("\n".join(summarise(comparison).answer))

Nothing here prints; progress is reported by the events of ``posenc.lab.experiments.progress``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from posenc.arguments import EXACT, Count, Interval, Length, Rate, Width
from posenc.lab.declared import Option

OF_TASK: Any = None
"""A field that is left at this takes the task's default."""

BY_TASK = "the task's"
"""Displayed default of an option whose default depends on the task."""

DATA, MODEL, TRAINING, MACHINE = "Task and data", "Model", "Training", "Machine"
"""Groups of options."""

LARGEST_SEED = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """The fields, described at ``ComparisonSettings``; without imports that slow a command down."""

    task: Annotated[str, Option("Task to train on (see posenc tasks).", group=DATA)] = "language"
    text: Annotated[
        Path | None, Option("Text file or folder for task language.", "posenc's own source", DATA)
    ] = None
    encodings: Annotated[
        Sequence[str], Option("Encodings: rope,t5+fourier,t5@buckets=16.", BY_TASK, DATA)
    ] = OF_TASK
    train_length: Annotated[
        int,
        Interval(8, EXACT),
        Option("Training length, in bytes or the task's unit.", BY_TASK, DATA),
    ] = OF_TASK
    test_lengths: Annotated[
        Sequence[Length] | None,
        Option("Test lengths, comma-separated.", "the task's multiples of --train-length", DATA),
    ] = None
    steps: Annotated[Length | None, Option("Training steps per run.", BY_TASK, TRAINING)] = None
    minutes: Annotated[
        Rate | None,
        Option("Limit of the total time, to which the steps are fitted.", "none", TRAINING),
    ] = None
    seeds: Annotated[
        Sequence[Annotated[int, Interval(0, LARGEST_SEED)]],
        Option("Number of seeds, or a list (0,1,2).", "3", TRAINING),
    ] = (0, 1, 2)
    width: Annotated[Width, Option("Model width.", BY_TASK, MODEL)] = OF_TASK
    layers: Annotated[Count, Option("Number of blocks.", BY_TASK, MODEL)] = OF_TASK
    heads: Annotated[Count, Option("Attention heads.", BY_TASK, MODEL)] = OF_TASK
    batch: Annotated[Width, Option("Sequences per step.", BY_TASK, TRAINING)] = OF_TASK
    learning_rate: Annotated[Rate | None, Option("Peak learning rate.", BY_TASK, TRAINING)] = None
    device: Annotated[str, Option("Device: cpu, cuda, cuda:N or mps.", group=MACHINE)] = "cpu"
    precision: Annotated[
        Literal["32-true", "bf16-mixed"], Option("Precision: 32-true or bf16-mixed.", group=MACHINE)
    ] = "32-true"
    workers: Annotated[Count | None, Option("Parallel processes.", "one per core", MACHINE)] = None
