"""Readings of contenders, and verdicts on limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from posenc.codec import to_plain

Quantity = Literal["forward", "both", "forward memory", "both memory", "beats flex", "fits"]
"""Times relative to plain SDPA; memory in bytes beyond its; ``beats flex``: time of FlexAttention
forward and backward, relative to posenc; ``fits``: 1 if a call forward and backward succeeds."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One contender in one case; None: not measured.

    Args:
        level: ``"call"`` of attention, or a whole ``"layer"`` with its projections.
        encoding, length, causal: of the case.
        contender: its name.
        served_by: the backend that posenc chose.
        rounds: timed forward, and forward and backward.
        forward_seconds, both_seconds: medians; ``both`` is forward and backward.
        forward_ratio, both_ratio: medians of ratios to the reference in the same round.
        forward_memory, both_memory: peak bytes beyond the inputs.
        output_error, gradient_error: largest difference from float64, relative to the largest
            value.
        refusal: the reason for missing values.
    """

    level: Literal["call", "layer"]
    encoding: str
    contender: str
    length: int
    causal: bool
    served_by: str = ""
    rounds: tuple[int, int] = (0, 0)
    forward_seconds: float | None = None
    both_seconds: float | None = None
    forward_ratio: float | None = None
    both_ratio: float | None = None
    forward_memory: int | None = None
    both_memory: int | None = None
    output_error: float | None = None
    gradient_error: float | None = None
    refusal: str = ""

    @staticmethod
    def merge(readings: Sequence[Reading]) -> Reading:
        """Readings of one contender in one case as one, with the first known values."""
        plain = [asdict(reading) for reading in readings]
        return Reading(**{f.name: _first(plain, f.name) for f in fields(Reading)})

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return to_plain(self)


def _first(plain: list[dict[str, Any]], name: str) -> Any:
    empty = (None, "", (0, 0))
    return next((fields[name] for fields in plain if fields[name] not in empty), plain[0][name])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A value of posenc compared with its limit; see ``Limit``.

    Args:
        row, encoding, length, causal, quantity, bound, at_least: of the limit.
        value: None if not measured.
        reason: why not.
    """

    row: str
    encoding: str
    length: int
    causal: bool
    quantity: Quantity
    bound: float
    at_least: bool
    value: float | None
    reason: str = ""

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values, and whether it is met (None where not measured)."""
        return to_plain(self) | {"met": None if self.value is None else self.met}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of a bench.

    Args:
        date: in UTC.
        seconds: duration.
        settings: of the bench.
        device: description.
        machine: system, cores and threads.
        versions: of the packages.
        readings: all measurements.
        verdicts: on the limits for these settings.
    """

    date: str
    seconds: float
    settings: Mapping[str, Any]
    device: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    readings: tuple[Reading, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def refusals(self) -> dict[str, dict[str, list[str]]]:
        """Encodings by contender and refusal."""
        refusals: dict[str, dict[str, list[str]]] = {}
        for reading in self.readings:
            if reading.refusal:
                named = refusals.setdefault(reading.contender, {}).setdefault(reading.refusal, [])
                if reading.encoding not in named:
                    named.append(reading.encoding)
        return refusals

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return {
            "date": self.date,
            "seconds": round(self.seconds, 1),
            "device": self.device,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "settings": dict(self.settings),
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "readings": [reading.to_json() for reading in self.readings],
        }
