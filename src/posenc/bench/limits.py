"""Limits of the cost of each kind of encoding, relative to plain SDPA."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from posenc.bench.contenders import PLAIN
from posenc.bench.results import Level, Quantity, Reading, Verdict

NO_SCORE = ("nope", "rope")
CONSTANT = ("alibi", "sandwich", "t5@frozen")
LEARNED = ("t5", "kerple", "tupe")
IMAGES = ("swin", "decomposed2d")
DEBERTA = ("deberta@buckets=256",)
METHODS = (
    *(*NO_SCORE, *CONSTANT, *LEARNED, *IMAGES),
    *("shaw@scores", "shaw", "transformer_xl", *DEBERTA),
    *("forgetting", "cable", "fire", "cope", "stick_breaking", "dape", "path"),
)
"""Encodings with limits on the CPU."""

POSENC, FLEX, TRANSFORMERS = "posenc", "FlexAttention", "transformers"

NOT_MEASURED = "not measured"

HALF = 1.3
"""Factor of the limits in bfloat16, beside SDPA in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A bound on one quantity of posenc with ``backend="auto"``.

    Args:
        row: name of the group of encodings.
        encodings: the group.
        quantity: what is limited.
        lengths: tokens; of context, where a generated token is limited.
        bound: the largest value allowed, or the smallest of ``beats flex`` and ``fits``.
        causal: with a causal mask.
        dtype: of q, k and v.
        batch, heads: of q, k and v.
    """

    row: str
    encodings: Sequence[str]
    quantity: Quantity
    lengths: Sequence[int]
    bound: float
    causal: bool = False
    dtype: str = "float32"
    batch: int = 1
    heads: int = 8

    @property
    def at_least(self) -> bool:
        """True if ``bound`` is the smallest value allowed."""
        return self.quantity in ("beats flex", "fits")

    @property
    def about_memory(self) -> bool:
        return self.quantity in (*MEMORY, "fits")

    @property
    def level(self) -> Level:
        return "token" if self.quantity in ("of rope", "of transformers") else "call"


LENGTHS = (512, 1024, 2048, 4096)
EITHER, PAST = (False, True), (True,)

TIMES: tuple[tuple[str, Sequence[str], Sequence[int], Sequence[bool], float, float], ...] = (
    ("no score part", NO_SCORE, LENGTHS, EITHER, 1.12, 1.00),
    ("constant tables", CONSTANT, LENGTHS, EITHER, 1.12, 1.00),
    ("learned tables", LEARNED, LENGTHS, EITHER, 1.12, 1.00),
    ("images", IMAGES, (2048,), (False,), 1.15, 1.10),
    ("Shaw, keys", ("shaw@scores",), LENGTHS, EITHER, 1.12, 1.00),
    ("Shaw, keys and values", ("shaw",), LENGTHS, EITHER, 1.25, 1.25),
    ("Transformer-XL", ("transformer_xl",), (2048,), EITHER, 1.7, 1.8),
    ("DeBERTa", DEBERTA, (512,), EITHER, 2.2, 2.0),
    ("DeBERTa", DEBERTA, (2048,), EITHER, 1.8, 1.5),
    ("DeBERTa", DEBERTA, (4096,), EITHER, 1.5, 1.35),
    ("biases of tokens", ("forgetting", "cable"), LENGTHS, PAST, 1.15, 1.15),
    ("functions of distance", ("fire",), LENGTHS, EITHER, 1.4, 1.4),
    ("counted positions", ("cope", "stick_breaking"), LENGTHS, PAST, 2.5, 2.5),
    ("MLP across heads", ("dape",), LENGTHS, EITHER, 4.0, 4.0),
    ("products of reflections", ("path",), LENGTHS, PAST, 4.0, 4.0),
)
"""Row, encodings, lengths, masks, and the limits forward, and forward and backward."""

SHORT_ROWS = (
    ("short rows: T5", ("t5",), 1.15, 1.1),
    ("short rows: Shaw", ("shaw",), 1.3, 1.2),
    ("short rows: DeBERTa", DEBERTA, 2.2, 2.0),
)
"""The same with a batch of 16, 12 heads and 128 tokens."""

MEMORY: tuple[Quantity, ...] = ("forward memory", "both memory")

CONTEXTS = (256, 1024, 4096)


def _times() -> Iterator[Limit]:
    """Limits of calls in float32."""
    for row, encodings, lengths, masks, *bounds in TIMES:
        for causal, (quantity, bound) in product(masks, _pairs(*bounds)):
            yield Limit(
                row=row,
                encodings=encodings,
                quantity=quantity,
                lengths=lengths,
                bound=bound,
                causal=causal,
            )
    for row, encodings, *bounds in SHORT_ROWS:
        for quantity, bound in _pairs(*bounds):
            yield Limit(
                row=row,
                encodings=encodings,
                quantity=quantity,
                lengths=(128,),
                bound=bound,
                batch=16,
                heads=12,
            )


def _pairs(forward: float, both: float) -> tuple[tuple[Quantity, float], tuple[Quantity, float]]:
    return ("forward", forward), ("both", both)


def _limit(
    row: str,
    encodings: Sequence[str],
    quantity: Quantity,
    bound: float,
    *lengths: int,
    causal: bool = False,
    dtype: str = "float32",
) -> Limit:
    return Limit(
        row=row,
        encodings=encodings,
        quantity=quantity,
        lengths=lengths,
        bound=bound,
        causal=causal,
        dtype=dtype,
    )


CPU = (
    *_times(),
    *(replace(x, dtype="bfloat16", bound=round(HALF * x.bound, 3)) for x in _times()),
    _limit("ALiBi, long", ("alibi",), "forward", 0.35, 32768, causal=True),
    *(
        _limit("extra memory", [name], quantity, 2.5e8, 16384, causal=causal)
        for row, names, _, (causal, *_), *_ in TIMES
        for name, quantity in product(names, MEMORY)
    ),
    _limit("a token with a cache", ("rope",), "of transformers", 1.0, *CONTEXTS, causal=True),
    _limit(
        "a token with a cache", ("alibi", "t5", "shaw"), "of rope", 1.15, *CONTEXTS, causal=True
    ),
)
"""8 heads of 64, two cores."""

TWO_SIDED = ("shaw", "deberta", "transformer_xl")
TABLES = (*CONSTANT, "t5", "kerple", "swin")

CUDA = tuple(
    _limit(*values, dtype="bfloat16")
    for values in (
        ("tables", TABLES, "forward", 1.15, 8192),
        ("tables", TABLES, "both", 1.3, 8192),
        ("left and right terms", TWO_SIDED, "forward", 1.6, 8192),
        ("left and right terms", TWO_SIDED, "both", 2.0, 8192),
        ("against FlexAttention", ("t5", "kerple"), "beats flex", 1.5, 8192),
        ("one long call", (*NO_SCORE, *TABLES, *TWO_SIDED), "fits", 1.0, 131072),
    )
)
"""8 heads of 64."""


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
                dtype=limit.dtype,
                batch=limit.batch,
                heads=limit.heads,
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
    wanted = (limit.level, length, limit.causal, limit.dtype, limit.batch, limit.heads)
    measured = [
        r for r in readings if (r.level, r.length, r.causal, r.dtype, r.batch, r.heads) == wanted
    ]
    mine = _merged(measured, POSENC, encoding)
    if mine is None:
        return None, NOT_MEASURED
    value: float | None
    match limit.quantity:
        case "forward" | "of rope":
            value = mine.forward_ratio
        case "both":
            value = mine.both_ratio
        case "fits":
            value = None if mine.both_memory is None else 1.0
        case "of transformers":
            theirs = _merged(measured, TRANSFORMERS, encoding)
            if theirs is None or theirs.forward_ratio is None:
                return None, NOT_MEASURED if theirs is None else theirs.refusal
            value = (
                None if mine.forward_ratio is None else mine.forward_ratio / theirs.forward_ratio
            )
        case "beats flex":
            flex = _merged(measured, FLEX, encoding)
            if flex is None or flex.both_seconds is None:
                return None, flex.refusal if flex is not None else NOT_MEASURED
            value = None if mine.both_seconds is None else flex.both_seconds / mine.both_seconds
        case _:
            plain = _merged(measured, PLAIN)
            forward = limit.quantity == "forward memory"
            bytes_, base = (
                None if r is None else r.forward_memory if forward else r.both_memory
                for r in (mine, plain)
            )
            value = None if bytes_ is None or base is None else float(bytes_ - base)
    return value, "" if value is not None else mine.refusal or NOT_MEASURED


def _merged(
    measured: Sequence[Reading], contender: str, encoding: str | None = None
) -> Reading | None:
    chosen = [r for r in measured if r.contender == contender and encoding in (None, r.encoding)]
    return Reading.merge(chosen) if chosen else None
