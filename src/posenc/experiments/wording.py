"""Sentences from templates, and the values and lists of names in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from posenc.experiments.results import Metric
from posenc.experiments.statistics import Estimate


def sentence(name: str, **facts: Any) -> str:
    """A sentence (or a few) about a comparison, by the macro of this name."""
    return render("posenc.experiments", name, facts)


def render(package: str, name: str, facts: Mapping[str, Any]) -> str:
    """Sentences by a macro of the package's ``templates/sentences.jinja``."""
    text: str = getattr(_templates(package).get_template("sentences.jinja").module, name)(**facts)
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


@cache
def _templates(package: str) -> Environment:
    made = Environment(
        loader=PackageLoader(package),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"amount": amount, "exactly": _exactly, "listed": listed}
    return made


def amount(value: Estimate, metric: Metric, *, unit: bool = True) -> str:
    """A value with its interval, shares in percent: ``54.3% (46.3 to 62.3) of needles``.

    Args:
        value: of the metric.
        metric: decides form and unit.
        unit: with its unit.
    """
    of = metric.unit.removeprefix("share").strip() if unit else ""
    return f"{value.shown('.1%' if metric.is_share else None)} {of}".strip()


def _exactly(value: float, metric: Metric) -> str:
    return f"{value:.1%}" if metric.is_share else f"{value:.3g}"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: a; a and b; a, b and c."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
