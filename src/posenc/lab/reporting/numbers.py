"""Numbers and sentences as reports write them: sizes, means with 95 % intervals, macros."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from jinja2 import Environment, PackageLoader, StrictUndefined
from scipy import special


def size_in_words(size: float | None) -> str:
    """``420 MiB``; a dash for None."""
    if size is None:
        return "—"
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def time_in_words(seconds: float | None) -> str:
    """``1.3 ms``, ``2.0 s``; a dash for None."""
    if seconds is None:
        return "—"
    return f"{1e3 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def in_minutes(seconds: float) -> str:
    """``40 s``, ``12 min``, ``1.5 h``: a duration in what people wait in."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def count_in_words(count: float | None) -> str:
    """``147 k``: three digits are enough to compare by; a dash for None."""
    if count is None:
        return "—"
    for unit in ("", " k", " M"):
        if count < 1000:
            return f"{count:.0f}{unit}" if count >= 100 or not unit else f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} G"


def counted(number: int, noun: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def setting_in_words(value: object) -> str:
    """The value of a setting: items of a sequence between commas, those of a mapping by name."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {item}" for key, item in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return str(value)


CONFIDENCE = 0.95

LOOKING = 0.02
"""Probability that any look at growing measurements is misled; what is left of 5 % is the end's."""

MOST_PLACES = 6
"""Decimal places that are shown at most."""


@dataclass(frozen=True)
class Bounds:
    """Range of possible values."""

    low: float = -math.inf
    high: float = math.inf

    def clip(self, value: float) -> float:
        """The nearest possible value."""
        return min(max(value, self.low), self.high)


UNBOUNDED, SHARES = Bounds(), Bounds(0.0, 1.0)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval, which ends where possible values do.

    Args:
        mean: of the seeds.
        half_width: of the Student-t interval; None with one seed, which says nothing of spread.
        n: seeds.
        bounds: possible values.
    """

    mean: float
    half_width: float | None
    n: int
    bounds: Bounds = UNBOUNDED

    @property
    def low(self) -> float:
        """Lower end of the interval (the mean itself with one seed)."""
        return self.bounds.clip(self.mean - (self.half_width or 0.0))

    @property
    def high(self) -> float:
        """Upper end of the interval (the mean itself with one seed)."""
        return self.bounds.clip(self.mean + (self.half_width or 0.0))

    @property
    def sure(self) -> bool:
        """True if the interval is known and excludes zero."""
        return self.half_width is not None and not self.low <= 0.0 <= self.high

    def scaled(self, factor: float) -> Estimate:
        """The estimate of ``factor`` times the quantity."""
        low, high = sorted((factor * self.bounds.low, factor * self.bounds.high))
        half = None if self.half_width is None else abs(factor) * self.half_width
        return Estimate(factor * self.mean, half, self.n, Bounds(low, high))

    def shown(self, form: str | None = None, between: str = " ") -> str:
        """``2.06 (2.02 to 2.10)``, ``65% (0 to 100)``; the mean alone with one seed.

        Args:
            form: format of the three numbers, whose per cent sign follows the mean alone; by
                default three digits of the mean, but at most two of the half width.
            between: what separates the numbers.
        """
        mean = f"{self.mean:{form or self._form()}}"
        return between.join(filter(None, (mean, self.interval(form, between))))

    def interval(self, form: str | None = None, between: str = " ") -> str:
        """The interval as in ``shown``; empty with one seed."""
        if self.half_width is None:
            return ""
        form = form or self._form()
        low, high = (f"{end:{form}}".removesuffix("%") for end in (self.low, self.high))
        return f"({low}{between}to {high})"

    def _form(self) -> str:
        places = [_places(self.mean, 3)]
        if self.half_width:
            places.append(_places(self.half_width, 2))
        return f".{min(places)}f"

    def to_json(self) -> dict[str, float | int | None]:
        """Mean, ends of the interval (null with one seed) and number of seeds."""
        low, high = (None, None) if self.half_width is None else (self.low, self.high)
        return {"mean": self.mean, "low": low, "high": high, "n": self.n}


def estimate(
    values: Iterable[float], bounds: Bounds = UNBOUNDED, confidence: float = CONFIDENCE
) -> Estimate | None:
    """Mean and Student-t interval of ``values`` within ``bounds``; None if there are none."""
    numbers = list(values)
    count = len(numbers)
    if not count:
        return None
    mean = math.fsum(numbers) / count
    if count == 1:
        return Estimate(mean, None, 1, bounds)
    variance = math.fsum((value - mean) ** 2 for value in numbers) / (count - 1)
    half = quantile(count, confidence) * math.sqrt(variance / count)
    return Estimate(mean, half, count, bounds)


def quantile(count: int, confidence: float = CONFIDENCE) -> float:
    """Half the interval of a mean of ``count`` values, in standard errors (Student's t)."""
    return float(special.stdtrit(count - 1, (1 + confidence) / 2))


def confidence_at(look: int) -> float:
    """Confidence of the intervals at a look that may end the measurements, the first being 1.

    The errors of all looks, ``LOOKING · 6 / (π look)^2``, add up to ``LOOKING`` at most.
    """
    return 1 - LOOKING * 6 / (math.pi * look) ** 2


def confidence_after(looks: int) -> float:
    """Confidence of the intervals that are reported after so many looks."""
    return CONFIDENCE + LOOKING if looks else CONFIDENCE


def paired_difference(
    a: Mapping[int, float], b: Mapping[int, float], *, confidence: float = CONFIDENCE
) -> Estimate | None:
    """Mean and interval of ``a - b`` over common replicates, seeds or pieces of text.

    What a replicate does to all subjects (a seed fixes initial weights and data order) cancels.
    """
    common = sorted(a.keys() & b.keys())
    return estimate((a[key] - b[key] for key in common), confidence=confidence)


def _places(value: float, digits: int) -> int:
    """Decimal places that show so many digits of a value."""
    if not value or not math.isfinite(value):
        return digits - 1
    return min(MOST_PLACES, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


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
    """A sentence (or a few) by the macro of this name in ``templates/sentences.jinja``."""
    said: str = getattr(_sentences(), name)(**facts)
    return " ".join(line.strip() for line in said.splitlines() if line.strip())


@cache
def _sentences() -> Any:
    made = Environment(
        loader=PackageLoader("posenc.lab.reporting"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"amount": amount, "amounts": _amounts, "exactly": exactly, "listed": listed}
    made.filters["agree"] = _agree
    return made.get_template("sentences.jinja").module


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
