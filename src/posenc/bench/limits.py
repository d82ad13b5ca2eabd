"""Limits: how much more than plain SDPA each kind of encoding may cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from posenc.bench.contenders import PLAIN
from posenc.bench.results import Quantity, Reading, Verdict

__all__ = ["ALL", "CPU", "CUDA", "Limit", "judge"]

NO_SCORE = ("nope", "rope")
CONSTANT = ("alibi", "sandwich", "t5@frozen")
LEARNABLE = ("t5", "kerple", "swin")
TWO_SIDED = ("shaw", "deberta", "transformer_xl")
ALL = (*NO_SCORE, *CONSTANT, *LEARNABLE, *TWO_SIDED)

POSENC, FLEX = "posenc", "FlexAttention"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A bound on one quantity of posenc's own choice, ``backend="auto"``.

    Args:
        row: what the encodings have in common.
        encodings: which.
        quantity: what is limited.
        lengths: tokens.
        causal: queries see the past only.
        bound: the largest value allowed, or the smallest of ``beats flex`` and ``fits``.
    """

    row: str
    encodings: Sequence[str]
    quantity: Quantity
    lengths: Sequence[int]
    bound: float
    causal: bool = False

    @property
    def at_least(self) -> bool:
        """Whether large values are good."""
        return self.quantity in ("beats flex", "fits")

    @property
    def about_memory(self) -> bool:
        return self.quantity in ("forward memory", "both memory")


def _table(
    row: str, encodings: Sequence[str], forward: float, both: float, *more: int
) -> tuple[Limit, ...]:
    """Limits of both passes at 2048 tokens, and of forward and backward at more lengths."""
    return (
        Limit(row=row, encodings=encodings, quantity="forward", lengths=(2048,), bound=forward),
        Limit(
            row=row,
            encodings=encodings,
            quantity="both",
            lengths=tuple(sorted({2048, *more})),
            bound=both,
        ),
    )


CPU = (
    *_table("no score part", NO_SCORE, 1.1, 1.2),
    *_table("constant tables", CONSTANT, 1.1, 1.15, 4096),
    *_table("learnable tables", LEARNABLE, 1.1, 1.5, 1024, 4096),
    *_table("left and right terms", TWO_SIDED, 1.8, 2.2),
    Limit(
        row="extra memory", encodings=ALL, quantity="forward memory", lengths=(16384,), bound=3e8
    ),
    Limit(row="extra memory", encodings=ALL, quantity="both memory", lengths=(16384,), bound=3e8),
    Limit(
        row="ALiBi, causal",
        encodings=("alibi",),
        quantity="forward",
        lengths=(32768,),
        bound=0.35,
        causal=True,
    ),
)
"""In float32, 8 heads of 64, two cores."""


def _cuda(
    row: str, encodings: Sequence[str], quantity: Quantity, length: int, bound: float
) -> Limit:
    return Limit(row=row, encodings=encodings, quantity=quantity, lengths=(length,), bound=bound)


TABLES = (*CONSTANT, *LEARNABLE)

CUDA = (
    _cuda("tables", TABLES, "forward", 8192, 1.15),
    _cuda("tables", TABLES, "both", 8192, 1.3),
    _cuda("left and right terms", TWO_SIDED, "forward", 8192, 1.6),
    _cuda("left and right terms", TWO_SIDED, "both", 8192, 2.0),
    _cuda("against FlexAttention", ("t5", "kerple"), "beats flex", 8192, 1.5),
    _cuda("one long call", ALL, "fits", 131072, 1.0),
)
"""In bfloat16, 8 heads of 64."""


def judge(limits: Iterable[Limit], readings: Sequence[Reading]) -> list[Verdict]:
    """Every limit, one encoding and length at a time, against what was measured."""
    verdicts = []
    for limit in limits:
        for encoding in limit.encodings:
            for length in limit.lengths:
                value, reason = _value(limit, encoding, length, readings)
                verdicts.append(
                    Verdict(
                        row=limit.row,
                        encoding=encoding,
                        length=length,
                        causal=limit.causal,
                        quantity=limit.quantity,
                        bound=limit.bound,
                        at_least=limit.at_least,
                        value=value,
                        reason=reason,
                    )
                )
    return verdicts


def _value(
    limit: Limit, encoding: str, length: int, readings: Sequence[Reading]
) -> tuple[float | None, str]:
    """The value; or None, and why."""
    found = [r for r in readings if (r.level, r.length, r.causal) == ("call", length, limit.causal)]
    mine = _merged(found, POSENC, encoding)
    if mine is None:
        return None, "not measured"
    value: float | None
    match limit.quantity:
        case "forward":
            value = mine.forward_ratio
        case "both":
            value = mine.both_ratio
        case "fits":
            value = None if mine.both_memory is None else 1.0
        case "beats flex":
            flex = _merged(found, FLEX, encoding)
            if flex is None or flex.both_seconds is None:
                return None, flex.refusal if flex is not None else "not measured"
            value = None if mine.both_seconds is None else flex.both_seconds / mine.both_seconds
        case _:
            plain = _merged(found, PLAIN)
            forward = limit.quantity == "forward memory"
            bytes_, base = (
                None if r is None else r.forward_memory if forward else r.both_memory
                for r in (mine, plain)
            )
            value = None if bytes_ is None or base is None else float(bytes_ - base)
    return value, "" if value is not None else mine.refusal or "not measured"


def _merged(
    found: Sequence[Reading], contender: str, encoding: str | None = None
) -> Reading | None:
    chosen = [r for r in found if r.contender == contender and encoding in (None, r.encoding)]
    return Reading.merge(chosen) if chosen else None
