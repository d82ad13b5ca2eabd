"""Results of benchmarks and of the lab, by method."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.tasks import cell
from scripts.docs.markdown import table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MACHINES = (("attention_amd", "attention_amd_others"), ("attention_cascadelake",))
"""Results of each machine; the README's table is of the last."""

NONE = ("nope", "posenc")
"""Encoding and contender that the others are read beside: attention alone, by posenc."""

SIZES = ((False, 512), (False, 2048), (True, 512), (True, 2048))
"""Causal or not, and tokens, of the times on a page."""


@cache
def readings(files: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """Timed calls of attention in float32, one batch row."""
    rows = [
        row
        for name in files
        for row in json.loads((RESULTS / f"{name}.json").read_text())["readings"]
    ]
    return tuple(
        row
        for row in rows
        if (row["level"], row["dtype"], row["batch"]) == ("call", "float32", 1)
        and (row["forward_ratio"] is not None or row["forward_memory"] is not None)
    )


@cache
def machine(files: tuple[str, ...]) -> str:
    """Processor, version and date of the times."""
    found = json.loads((RESULTS / f"{files[0]}.json").read_text())
    return f"{found['device']}, PyTorch {found['versions']['torch']}, {found['date']}"


def timed(name: str, files: tuple[str, ...]) -> dict[tuple[str, str, bool, int], dict[str, Any]]:
    """Times of a method by encoding with its options, contender, causal mask and tokens."""
    found: dict[tuple[str, str, bool, int], dict[str, Any]] = {}
    for row in readings(files):
        if row["encoding"].partition("@")[0] == name:
            case = (row["encoding"], row["contender"], row["causal"], row["length"])
            found.setdefault(case, row)
    return found


def speed(name: str) -> list[str]:
    """Blocks on the times and memory of a method, none if it was not timed."""
    tables = [block for files in MACHINES for block in _times(name, files)]
    if not tables:
        return []
    text = (
        "Time of attention, forward / forward and backward, in multiples of PyTorch's "
        "`scaled_dot_product_attention` without an encoding on the same machine; 8 heads of 64, "
        "float32, gradients of learned parts. PyTorch's kernel does better on some processors than "
        "on others, so compare rows of a table: `nope` is posenc's attention without an encoding."
    )
    return [text, *tables, *_memory(name)]


def _times(name: str, files: tuple[str, ...]) -> list[str]:
    """The machine and a table of the times on it, none if the method was not timed there."""
    found = timed(name, files)
    cases = [case for case in dict.fromkeys(case[:2] for case in found) if case[1] != "plain SDPA"]
    if not cases:
        return []
    found |= timed(NONE[0], files)
    lines = [
        (
            f"`{encoding}`, {contender}",
            *(_ratio(found.get((encoding, contender, *size)), "ratio") for size in SIZES),
        )
        for encoding, contender in dict.fromkeys([NONE, *cases])
    ]
    heads = ("", *(f"{tokens:,} tokens{', causal' * causal}" for causal, tokens in SIZES))
    return [f"{machine(files)}:", table(heads, lines)]


def _memory(name: str) -> list[str]:
    """A sentence on each length whose memory was measured."""
    files = MACHINES[0]
    plain = {case[2:]: row for case, row in timed("nope", files).items() if case[1] == "plain SDPA"}
    return [
        f"Memory beside the inputs over {length:,} tokens{', causal' * causal}: "
        f"{_ratio(row, 'memory')} MiB; PyTorch's without an encoding "
        f"{_ratio(plain.get((causal, length)), 'memory')} MiB (`{encoding}`, {contender})."
        for (encoding, contender, causal, length), row in timed(name, files).items()
        if row["forward_memory"] is not None and contender == "posenc"
    ]


def _ratio(row: dict[str, Any] | None, quantity: str) -> str:
    if row is None:
        return "–"
    values = (row[f"{way}_{quantity}"] for way in ("forward", "both"))
    unit, digits = (2**20, 0) if quantity == "memory" else (1, 2)
    return " / ".join("–" if value is None else f"{value / unit:.{digits}f}" for value in values)


@cache
def lab() -> tuple[tuple[str, str, str, list[dict[str, str]]], ...]:
    """Task, subject, label of its first metric, and rows by length."""
    found = []
    for path in sorted((RESULTS / "tasks").glob("*.csv")):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        first = rows[0]["metric"]
        for subject in dict.fromkeys(row["subject"] for row in rows):
            kept = [r for r in rows if (r["subject"], r["metric"]) == (subject, first)]
            if kept:
                kept.sort(key=lambda row: float(row["length"] or 0))
                found.append((path.stem, subject, kept[0]["label"], kept))
    return tuple(found)


def learned(name: str) -> list[str]:
    """Blocks on what a method did in the lab, none if it was in no task."""
    lines = [
        (f"[{task}](../results/{task.partition('-')[0]}.md)", f"`{subject}`", label, *_ends(rows))
        for task, subject, label, rows in lab()
        if subject.partition("@")[0].partition(" ")[0] == name
    ]
    if not lines:
        return []
    heads = ("task", "with", "measure", "at the trained length", "at the longest")
    text = (
        "Small models, trained with equal budgets; means over seeds with 95 % intervals, each "
        "after its length. [All tasks and controls](../results/index.md)."
    )
    return [text, table(heads, lines)]


def _ends(rows: list[dict[str, str]]) -> Iterator[str]:
    for row in (rows[0], rows[-1]):
        yield f"{row['length']}: {cell(row)}"
