"""The numbers and verdicts of a comparison as plain JSON values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posenc.lab.experiments.gates import reason
from posenc.lab.experiments.results import Comparison
from posenc.lab.experiments.summary import Summary
from posenc.lab.experiments.verdicts import Row
from posenc.lab.reporting.intervals import Estimate


def numbers(comparison: Comparison, summary: Summary, *, out: Path) -> list[dict[str, Any]]:
    """A record for each encoding, in the order of the table.

    Each has its rank, ``verdict``, ``gate`` (why there is no verdict, or null) and its ``reason``
    in a sentence, verdicts by what it ``predicts`` and ``finds``, the change from the training
    length, and for every length the estimates of the headline metric and of recall (``mean``,
    ``low`` and ``high`` end of the 95 % interval, ``n`` seeds) or why there are none
    (``refusal``).

    Args:
        comparison: the records.
        summary: of it.
        out: folder of the comparison.
    """
    return [_record(comparison, row, out) for row in summary.rows]


def models(comparison: Comparison, out: Path, subject: str) -> list[Path]:
    """Folders of the trained models of a subject, the first seed first.

    Args:
        comparison: the records.
        out: folder of the comparison.
        subject: an encoding, or one as it is looked at in another way (``rope|window=64``).
    """
    encoding = subject.partition("|")[0]
    seeds = sorted(run.seed for run in comparison.runs if run.subject == subject)
    return [out / "runs" / encoding / f"seed-{seed}" / "model" for seed in seeds]


def _record(comparison: Comparison, row: Row, out: Path) -> dict[str, Any]:
    subject, key = row.subject, comparison.headline.key
    lengths = {}
    for length in comparison.test_lengths:
        estimates: dict[str, Any] = {key: _estimate(row.values.get(length))}
        if comparison.metric("recall") is not None:
            estimates["recall"] = _estimate(row.recall.get(length))
        lengths[str(length)] = estimates | {"refusal": row.refusals.get(length)}
    return {
        "name": subject.name,
        "label": subject.label,
        "role": subject.role,
        "rank": row.rank,
        "verdict": row.verdict,
        "gate": row.gate,
        "reason": reason(comparison, row),
        "predicts": row.predicts,
        "finds": row.finds,
        "change": _estimate(row.change),
        "seen": _estimate(row.seen),
        "lengths": lengths,
        "tokens_per_second": row.tokens_per_second,
        "peak_memory_bytes": row.peak_memory_bytes,
        "parameters": row.parameters,
        "models": [str(path) for path in models(comparison, out, subject.name)],
    }


def _estimate(value: Estimate | None) -> dict[str, Any] | None:
    return None if value is None else value.to_json()
