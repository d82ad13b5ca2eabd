"""Wording of the suites' metrics and tables, from ``metrics.toml``."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

from posenc.lab.codec import from_plain
from posenc.lab.evaluation.results import StudyMetric


def words(suite: str, **values: object) -> dict[str, Any]:
    """The fields ``guide`` and ``metrics`` of a ``Study``, with placeholders filled in."""
    table = tomllib.loads((files(__package__) / "metrics.toml").read_text(encoding="utf-8"))[suite]

    def filled(fields: dict[str, Any]) -> dict[str, Any]:
        return {n: v.format(**values) if isinstance(v, str) else v for n, v in fields.items()}

    metrics = tuple(from_plain(StudyMetric, filled(metric)) for metric in table["metrics"])
    return {"guide": table["guide"].format(**values), "metrics": metrics}
