"""Limits of the cost of each kind of encoding, relative to plain SDPA."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from posenc.bench.contenders import PLAIN
from posenc.bench.results import Quantity, Reading, Verdict

NO_SCORE = ("nope", "rope")
CONSTANT = ("alibi", "sandwich", "t5@frozen")
LEARNABLE = ("t5", "kerple", "swin")
TWO_SIDED = ("shaw", "deberta", "transformer_xl")
ALL = (*NO_SCORE, *CONSTANT, *LEARNABLE, *TWO_SIDED)

POSENC, FLEX = "posenc", "FlexAttention"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A bound on one quantity of posenc with ``backend="auto"``.

    Args:
        row: name of the group of encodings.
        encodings: the group.
        quantity: what is limited.
        lengths: tokens.
        bound: the largest value allowed, or the smallest of ``beats flex`` and ``fits``.
        causal: with a causal mask.
    """

    row: str
    encodings: Sequence[str]
    quantity: Quantity
    lengths: Sequence[int]
    bound: float
    causal: bool = False

    @property
    def at_least(self) -> bool:
        """True if ``bound`` is the smallest value allowed."""
        return self.quantity in ("beats flex", "fits")

    @property
    def about_memory(self) -> bool:
        return self.quantity in ("forward memory", "both memory")


def _limit(
    row: str,
    encodings: Sequence[str],
    quantity: Quantity,
    bound: float,
    *lengths: int,
    causal: bool = False,
) -> Limit:
    return Limit(
        row=row, encodings=encodings, quantity=quantity, lengths=lengths, bound=bound, causal=causal
    )


LENGTHS = (512, 1024, 2048, 4096)

LOG_BUCKETS = ("deberta@buckets=256",)

CPU = (
    _limit("no score part", NO_SCORE, "forward", 1.12, *LENGTHS),
    _limit("no score part", NO_SCORE, "both", 1.0, *LENGTHS),
    _limit("constant tables", CONSTANT, "forward", 1.12, *LENGTHS),
    _limit("constant tables", CONSTANT, "both", 1.0, *LENGTHS),
    _limit("learnable tables", ("t5", "kerple", "tupe"), "forward", 1.12, *LENGTHS),
    _limit("learnable tables", ("t5", "kerple", "tupe"), "both", 1.0, *LENGTHS),
    _limit("images", ("swin", "decomposed2d"), "forward", 1.15, 2048),
    _limit("images", ("swin", "decomposed2d"), "both", 1.1, 2048),
    _limit("Shaw, keys and values", ("shaw",), "forward", 1.25, 2048),
    _limit("Shaw, keys and values", ("shaw",), "both", 1.25, 2048),
    _limit("Transformer-XL", ("transformer_xl",), "forward", 1.7, 2048),
    _limit("Transformer-XL", ("transformer_xl",), "both", 1.8, 2048),
    *(
        _limit("DeBERTa", LOG_BUCKETS, "forward", x, n)
        for x, n in ((2.2, 512), (1.8, 2048), (1.5, 4096))
    ),
    *(
        _limit("DeBERTa", LOG_BUCKETS, "both", x, n)
        for x, n in ((2.0, 512), (1.5, 2048), (1.35, 4096))
    ),
    _limit("extra memory", ALL, "forward memory", 2.5e8, 16384),
    _limit("extra memory", ALL, "both memory", 2.5e8, 16384),
    _limit("ALiBi, causal", ("alibi",), "forward", 0.35, 32768, causal=True),
)
"""In float32, 8 heads of 64, two cores."""

CPU_HALF = tuple(
    replace(limit, bound=round(1.3 * limit.bound, 3))
    for limit in CPU
    if limit.quantity in ("forward", "both") and not limit.causal
)
"""In bfloat16, beside SDPA in bfloat16."""

TABLES = (*CONSTANT, *LEARNABLE)

CUDA = (
    _limit("tables", TABLES, "forward", 1.15, 8192),
    _limit("tables", TABLES, "both", 1.3, 8192),
    _limit("left and right terms", TWO_SIDED, "forward", 1.6, 8192),
    _limit("left and right terms", TWO_SIDED, "both", 2.0, 8192),
    _limit("against FlexAttention", ("t5", "kerple"), "beats flex", 1.5, 8192),
    _limit("one long call", ALL, "fits", 1.0, 131072),
)
"""In bfloat16, 8 heads of 64."""


def judge(limits: Iterable[Limit], readings: Sequence[Reading]) -> list[Verdict]:
    """Verdicts on every limit, encoding and length."""
    verdicts = []
    for limit in limits:
        for encoding, length in product(limit.encodings, limit.lengths):
            value, reason = _value(limit, encoding, length, readings)
            verdict = Verdict(
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
            verdicts.append(verdict)
    return verdicts


def _value(
    limit: Limit, encoding: str, length: int, readings: Sequence[Reading]
) -> tuple[float | None, str]:
    """The value, or None and the reason."""
    measured = [
        r for r in readings if (r.level, r.length, r.causal) == ("call", length, limit.causal)
    ]
    mine = _merged(measured, POSENC, encoding)
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
            flex = _merged(measured, FLEX, encoding)
            if flex is None or flex.both_seconds is None:
                return None, flex.refusal if flex is not None else "not measured"
            value = None if mine.both_seconds is None else flex.both_seconds / mine.both_seconds
        case _:
            plain = _merged(measured, PLAIN)
            forward = limit.quantity == "forward memory"
            bytes_, base = (
                None if r is None else r.forward_memory if forward else r.both_memory
                for r in (mine, plain)
            )
            value = None if bytes_ is None or base is None else float(bytes_ - base)
    return value, "" if value is not None else mine.refusal or "not measured"


def _merged(
    measured: Sequence[Reading], contender: str, encoding: str | None = None
) -> Reading | None:
    chosen = [r for r in measured if r.contender == contender and encoding in (None, r.encoding)]
    return Reading.merge(chosen) if chosen else None
