"""Values and lists of names in the sentences of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from posenc.experiments.results import Metric
from posenc.experiments.statistics import Estimate

__all__ = ["amount", "listed"]


def amount(value: Estimate, metric: Metric, *, unit: bool = True) -> str:
    """A value with its interval, shares in percent.

    Args:
        value: of the metric.
        metric: which one.
        unit: with its unit.
    """
    form, fine = (".1%", ".1%") if metric.is_share else (".3g", ".2g")
    spread = "" if value.half_width is None else f" ± {value.half_width:{fine}}"
    of = metric.unit.removeprefix("share").strip() if unit else ""
    return f"{value.mean:{form}}{spread} {of}".strip()


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: a; a and b; a, b and c."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
