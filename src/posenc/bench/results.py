"""Results of a bench: a reading for every contender in every case, and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from posenc.codec import to_plain

__all__ = ["Quantity", "Reading", "Report", "Verdict"]

Quantity = Literal["forward", "both", "forward memory", "both memory", "beats flex", "fits"]
"""Times as ratios to plain SDPA of the same causality; memory in bytes beyond its; ``beats flex``:
FlexAttention's time forward and backward over posenc's; ``fits``: 1 if a call forward and backward
comes to its end."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One contender in one case; what was not measured is None.

    Args:
        level: ``"call"`` of attention, or a whole ``"layer"`` with its projections.
        encoding, length, causal: of the case.
        contender: what computed it.
        served_by: the backend, where posenc chose one.
        rounds: how many were timed forward, and forward and backward.
        forward_seconds, both_seconds: medians; ``both`` is forward and backward, all gradients.
        forward_ratio, both_ratio: medians of the ratios to the base of the same round.
        forward_memory, both_memory: peak bytes beyond the inputs.
        output_error, gradient_error: largest difference from float64, as a share of the largest
            value.
        refusal: why something is missing.
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
        """Several readings of one contender in one case as one; what is first known, stands."""
        plain = [asdict(reading) for reading in readings]
        return Reading(**{f.name: _first(plain, f.name) for f in fields(Reading)})

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return to_plain(self)


def _first(plain: list[dict[str, Any]], name: str) -> Any:
    empty = (None, "", (0, 0))
    return next((each[name] for each in plain if each[name] not in empty), plain[0][name])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One value of posenc's against its limit.

    Args:
        row: what the encodings of the limit have in common.
        encoding, length, causal: the case.
        quantity: what is limited.
        bound: the largest value allowed, or the smallest.
        at_least: whether it is the smallest.
        value: None where it could not be measured.
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
    """A finished bench.

    Args:
        date: of the day, in UTC.
        seconds: what it took.
        settings: that it was done with.
        device: in words.
        machine: system, cores and threads.
        versions: of what took part.
        readings: all that was measured.
        verdicts: on every limit there is for these settings.
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
        """For each contender and each reason why something is missing, the encodings."""
        found: dict[str, dict[str, list[str]]] = {}
        for reading in self.readings:
            if reading.refusal:
                named = found.setdefault(reading.contender, {}).setdefault(reading.refusal, [])
                if reading.encoding not in named:
                    named.append(reading.encoding)
        return found

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
