"""Sentences of all reports, from macros of templates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Protocol

from jinja2 import Environment, PackageLoader, StrictUndefined

from posenc.lab.reporting.numbers import Estimate, size_in_words

TEMPLATES = ("sentences.jinja", "study.jinja", "bench.jinja", "doctor.jinja")
"""Files of ``posenc.lab.reporting.templates`` that have the sentences."""


class Quantity(Protocol):
    """A measured quantity.

    Attributes:
        unit: of the value.
        is_share: values are shares, shown in percent.
    """

    @property
    def unit(self) -> str: ...

    @property
    def is_share(self) -> bool: ...


def sentence(name: str, /, **facts: Any) -> str:
    """A sentence (or a few) by the macro of this name in one of ``TEMPLATES``."""
    modules = (_templates().get_template(template).module for template in TEMPLATES)
    macro = next(getattr(module, name) for module in modules if hasattr(module, name))
    return " ".join(line.strip() for line in macro(**facts).splitlines() if line.strip())


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("posenc.lab.reporting"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"amount": amount, "amounts": _amounts, "exactly": exactly, "listed": listed}
    made.filters |= {"agree": _agree, "joined": _joined, "size": size_in_words}
    return made


def amount(value: Estimate, metric: Quantity, *, unit: bool = True) -> str:
    """A value with its interval, shares in percent: ``54.3% (46.3 to 62.3) of needles``.

    Args:
        value: of the metric.
        metric: decides form and unit.
        unit: with its unit.
    """
    of = metric.unit.removeprefix("share").strip() if unit else ""
    return f"{value.shown('.1%' if metric.is_share else None)} {of}".strip()


def exactly(value: float, metric: Quantity) -> str:
    """A value without an interval, shares in percent."""
    return f"{value:.1%}" if metric.is_share else f"{value:.3g}"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: a; a and b; a, b and c."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _amounts(values: Iterable[tuple[str, Estimate]], metric: Quantity) -> str:
    """Names with their amounts, the first with the unit."""
    return "; ".join(
        f"{name} {amount(value, metric, unit=not place)}"
        for place, (name, value) in enumerate(values)
    )


def _agree(names: Sequence[str], one: str, several: str) -> str:
    """The form of a verb, or a pronoun, that agrees with one name or several."""
    return several if len(names) > 1 else one


def _joined(pairs: Iterable[tuple[str, str]]) -> str:
    """Names with their values in words."""
    return ", ".join(f"{name} {value}" for name, value in pairs)
