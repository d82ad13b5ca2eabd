"""Limits of the cost of each kind of encoding, relative to plain SDPA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from posenc.lab.bench import METHODS
from posenc.lab.bench.run import PLAIN

Row = Mapping[str, Any]
"""A reading: see ``benchmarks.attention.run.measure``."""

Quantity = Literal[
    *("forward", "both", "forward memory", "both memory"),
    *("of rope", "of transformers", "beats flex", "fits"),
]
"""Times relative to plain SDPA; memory in bytes beyond its; time of a token with a cache relative
to RoPE, and to transformers; ``beats flex``: time of FlexAttention forward and backward, relative
to posenc; ``fits``: 1 if a call forward and backward succeeds."""

NO_SCORE = ("nope", "rope")
CONSTANT = ("alibi", "sandwich", "t5@frozen")
LEARNED = ("t5", "kerple", "tupe")
IMAGES = ("swin", "decomposed2d")
DEBERTA = ("deberta@buckets=256",)

HALF = 1.3
"""Factor of the limits in bfloat16, beside SDPA in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A bound on one quantity of posenc with ``backend="auto"`` in one case.

    Args:
        row: name of the group of encodings.
        encoding, length, causal, dtype, batch, heads: of the case; where a generated token is
            limited, ``length`` is that of the context.
        quantity: what is limited.
        bound: the largest value allowed, or the smallest of ``beats flex`` and ``fits``.
    """

    row: str
    encoding: str
    length: int
    quantity: Quantity
    bound: float
    causal: bool = False
    dtype: str = "float32"
    batch: int = 1
    heads: int = 8

    @property
    def about_memory(self) -> bool:
        return self.quantity in (*MEMORY, "fits")

    @property
    def level(self) -> str:
        return "token" if self.quantity in ("of rope", "of transformers") else "call"

    def met(self, value: float) -> bool:
        """True if a value is within the limit."""
        least = self.quantity in ("beats flex", "fits")
        return value >= self.bound if least else value <= self.bound


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
    ("sums of gates' logarithms", ("grape_additive",), LENGTHS, PAST, 1.5, 1.5),
    ("MLP across heads", ("dape",), LENGTHS, EITHER, 4.0, 4.0),
    ("products of reflections", ("path",), LENGTHS, PAST, 4.0, 4.0),
)
"""Row, encodings, lengths, masks, and the limits forward, and forward and backward."""

SHORT_ROWS = (
    ("short rows: T5", "t5", 1.15, 1.1),
    ("short rows: Shaw", "shaw", 1.3, 1.2),
    ("short rows: DeBERTa", *DEBERTA, 2.2, 2.0),
)
"""The same with a batch of 16, 12 heads and 128 tokens."""

MEMORY: tuple[Quantity, Quantity] = ("forward memory", "both memory")
PASSES: tuple[Quantity, Quantity] = ("forward", "both")

CONTEXTS = (256, 1024, 4096)
DECODED = ("rope", "alibi", "t5", "shaw")
"""Encodings whose generation has a limit."""

LONG = 16384
"""Tokens at which memory on the CPU has a limit."""


def _limits(
    row: str, encodings: Sequence[str], quantity: Quantity, bound: float, *lengths: int, **case: Any
) -> Iterator[Limit]:
    for encoding, length in product(encodings, lengths):
        yield Limit(
            row=row, encoding=encoding, quantity=quantity, length=length, bound=bound, **case
        )


def _times(dtype: str, factor: float = 1.0) -> Iterator[Limit]:
    """Limits of the times of calls on the CPU."""
    for row, encodings, lengths, masks, *bounds in TIMES:
        for causal, (quantity, bound) in product(masks, zip(PASSES, bounds, strict=True)):
            bound = round(factor * bound, 3)
            yield from _limits(
                row, encodings, quantity, bound, *lengths, causal=causal, dtype=dtype
            )
    for row, encoding, *bounds in SHORT_ROWS:
        for quantity, bound in zip(PASSES, bounds, strict=True):
            bound = round(factor * bound, 3)
            yield from _limits(
                row, [encoding], quantity, bound, 128, dtype=dtype, batch=16, heads=12
            )


def _cpu() -> Iterator[Limit]:
    yield from _times("float32")
    yield from _times("bfloat16", HALF)
    yield from _limits("ALiBi, long", ["alibi"], "forward", 0.35, 32768, causal=True)
    for encoding in METHODS:
        causal = next(masks[0] for _, names, _, masks, *_ in TIMES if encoding in names)
        for quantity in MEMORY:
            yield from _limits("extra memory", [encoding], quantity, 2.5e8, LONG, causal=causal)
    token = "a token with a cache"
    yield from _limits(token, DECODED[:1], "of transformers", 1.0, *CONTEXTS, causal=True)
    yield from _limits(token, DECODED[1:], "of rope", 1.15, *CONTEXTS, causal=True)


TWO_SIDED = ("shaw", "deberta", "transformer_xl")
TABLES = (*CONSTANT, "t5", "kerple", "swin")


def _cuda() -> Iterator[Limit]:
    rows: tuple[tuple[str, Sequence[str], Quantity, float, int], ...] = (
        ("tables", TABLES, "forward", 1.15, 8192),
        ("tables", TABLES, "both", 1.3, 8192),
        ("left and right terms", TWO_SIDED, "forward", 1.6, 8192),
        ("left and right terms", TWO_SIDED, "both", 2.0, 8192),
        ("against FlexAttention", ("t5", "kerple"), "beats flex", 1.5, 8192),
        ("one long call", (*NO_SCORE, *TABLES, *TWO_SIDED), "fits", 1.0, 131072),
    )
    for row in rows:
        yield from _limits(*row, dtype="bfloat16")


BY_AMX = {
    ("nope", 512, "forward"): 0.75,
    ("nope", 2048, "forward"): 0.66,
    ("nope", 2048, "both"): 0.45,
    **{(name, 512, "forward"): 1.0 for name in ("rope", "alibi", "t5")},
    **{(name, 2048, "forward"): 0.8 for name in ("rope", "alibi", "t5")},
    **{(name, 2048, "both"): 0.5 for name in ("rope", "alibi", "t5")},
    ("shaw", 512, "forward"): 1.3,
    ("shaw", 2048, "forward"): 0.9,
    (*DEBERTA, 512, "forward"): 2.5,
    (*DEBERTA, 2048, "forward"): 1.6,
}
"""Limits of full attention in bfloat16 on processors with AMX, in place of those of others."""


def _amx() -> Iterator[Limit]:
    for limit in _cpu():
        case = limit.encoding, limit.length, limit.quantity
        by_tiles = limit.dtype == "bfloat16" and limit.batch == 1 and not limit.causal
        yield replace(limit, bound=BY_AMX[case]) if by_tiles and case in BY_AMX else limit


LIMITS = {"cpu": tuple(_cpu()), "amx": tuple(_amx()), "cuda": tuple(_cuda())}
"""By type of device, CPUs with AMX apart; 8 heads of 64, CPUs with two cores."""


class Readings:
    """Rows of a bench, looked up by case and contender; several of one are merged."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows: dict[tuple[object, ...], dict[str, Any]] = {}
        for row in rows:
            case = tuple(row[name] for name in ("level", "length", "causal", "dtype", "batch"))
            for encoding in (row["encoding"], None):
                merged = self._rows.setdefault((*case, encoding, row["contender"]), {})
                merged |= {k: v for k, v in row.items() if merged.get(k) in (None, "")}

    def find(self, limit: Limit, contender: str = "posenc", *, any_encoding: bool = False) -> Row:
        """The row of a contender in the limit's case; empty if there is none."""
        case = (limit.level, limit.length, limit.causal, limit.dtype, limit.batch)
        encoding = None if any_encoding else limit.encoding
        return self._rows.get((*case, encoding, contender), {})

    def value(self, limit: Limit) -> float | None:
        """The value of the limited quantity; None where it was not measured."""
        mine = self.find(limit)
        match limit.quantity:
            case "forward" | "both":
                return mine.get(f"{limit.quantity}_ratio")
            case "of rope":
                return mine.get("forward_ratio")
            case "fits":
                return None if mine.get("both_memory") is None else 1.0
            case "of transformers":
                theirs = self.find(limit, "transformers")
                return _combined(mine.get("forward_ratio"), theirs.get("forward_ratio"), "/")
            case "beats flex":
                flex = self.find(limit, "FlexAttention")
                return _combined(flex.get("both_seconds"), mine.get("both_seconds"), "/")
            case _:
                name = limit.quantity.replace(" ", "_")
                plain = self.find(limit, PLAIN, any_encoding=True)
                return _combined(mine.get(name), plain.get(name), "-")


def _combined(first: float | None, second: float | None, sign: str) -> float | None:
    if first is None or second is None:
        return None
    return first / second if sign == "/" else float(first - second)
