"""Cases and contenders of a bench."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from posenc.bench.case import Case, masks, past_only
from posenc.bench.contenders import Contender, Eager, Flex, Plain, Posenc, WrittenOut
from posenc.bench.decoding import DECODED, LlamaDecoder, PosencDecoder
from posenc.bench.layers import LAYERS, PlainLayer, PosencLayer, Transformers, XTransformers
from posenc.bench.limits import METHODS, SHORT_ROWS
from posenc.bench.settings import Part, Settings

MIDDLE = {"cpu": 2048, "cuda": 8192}
"""Length at which everything is measured."""

USUAL = {"cpu": (512,), "cuda": (2048, 32768)}
"""Further lengths."""

FULL = {"cpu": (512, 1024, 4096), "cuda": (2048, 32768)}
"""Further lengths of a full bench."""

ROWS = (16, 12, 128)
"""Batch, heads and length of many short sequences."""

CONTEXT = (256, 1024, 4096)
"""Tokens in the cache at first."""

LONG = 16384
"""Length from which on calls on the CPU have fewer rounds and no warm-up."""

LONG_ROUNDS = (3, 1)

ROTATED = {"nope": ("triton",), "rope": ("triton", "triton-unfused")}
"""Further backends on CUDA at the middle length."""

FEW = 3
"""Rounds without a limit, and the least number with one."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One case and its contenders.

    Args:
        case: the call.
        contenders: in timed jobs the reference first.
        rounds: of timing forward, and forward and backward; (0, 0) for none.
        others: maximum rounds of contenders other than the reference and posenc.
        warm: call each once before, and compare it with float64.
        memory: measure peaks.
    """

    case: Case
    contenders: tuple[Contender, ...]
    rounds: tuple[int, int] = (0, 0)
    others: int = 1
    warm: bool = False
    memory: bool = False

    @property
    def timed(self) -> bool:
        return self.rounds[0] > 0

    @property
    def work(self) -> float:
        """Cost relative to other jobs, roughly."""
        passes = self.rounds[0] + 3 * self.rounds[1] + 4 * (self.warm + self.memory)
        size = self.case.batch * self.case.length**2 / (2 if self.case.causal else 1)
        return passes * max(size, 2.0**20) * len(self.contenders)


def plan(settings: Settings) -> list[Job]:
    """All jobs: calls, short ones first, short rows, layers, tokens, and memory."""
    parts = {
        "calls": _calls,
        "rows": _rows,
        "layers": _layers,
        "decoding": _decoding,
        "memory": _memory,
    }
    return [job for name, jobs in parts.items() if name in settings.parts for job in jobs(settings)]


def _calls(settings: Settings) -> list[Job]:
    """Jobs of single calls."""
    middle, further = _middle(settings), (FULL if settings.full else USUAL)[_kind(settings)]
    alone = settings.encodings is not None or (settings.quick and not settings.full)
    usual = (middle,) if alone else (*further, middle)
    names = settings.encodings or METHODS
    points = {
        (name, length, causal)
        for name in names
        for length in settings.lengths or usual
        for causal in _masks(settings, name, length)
    }
    if settings.usual and (settings.full or settings.on_cuda):
        for limit in settings.limits:
            if limit.level == "call" and limit.batch == 1 and not limit.about_memory:
                points |= {
                    (name, n, limit.causal) for name in limit.encodings for n in limit.lengths
                }
    return [_timed(settings, case) for case in _cases(settings, points)]


def _masks(settings: Settings, name: str, length: int) -> tuple[bool, ...]:
    """Causal or not, or both."""
    if past_only(name):
        return (True,)
    if settings.causal is not None:
        return (settings.causal,)
    also = settings.usual and not settings.quick and length == _middle(settings)
    return masks(name) if settings.full or also else (False,)


def _timed(settings: Settings, case: Case) -> Job:
    middle, rounds = _middle(settings), settings.counts[0]
    length = case.length
    long = length >= LONG and not settings.on_cuda
    secondary = case.causal and settings.causal is None and not past_only(case.encoding)
    alone = settings.quick or long or secondary
    contenders: list[Contender] = [Plain(), *_ours(settings)]
    if not alone and (length <= middle or settings.lengths or settings.on_cuda):
        contenders += [Eager(), WrittenOut()]
        if length == middle or settings.lengths or settings.on_cuda:
            contenders.append(Flex())
    if settings.on_cuda and settings.usual and not settings.quick and length == middle:
        rotated = ROTATED.get(case.encoding, ())
        contenders += [Posenc(backend=name) for name in rotated if name not in settings.backends]
    if settings.on_cuda:
        timed = (rounds, rounds)
    elif long:
        timed = (min(rounds, LONG_ROUNDS[0]), LONG_ROUNDS[1])
    else:
        few = min(rounds, FEW)
        least = secondary and not settings.full
        timed = (few if least else max(few, min(rounds, rounds * 2048 // length)),) * 2
    return Job(
        case=case,
        contenders=tuple(contenders),
        rounds=timed,
        others=rounds if settings.on_cuda else max(1, rounds // 5),
        warm=not long,
        memory=not long and not secondary and not settings.quick,
    )


def _rows(settings: Settings) -> list[Job]:
    """Jobs of many short sequences."""
    rounds = settings.counts[0]
    return [
        Job(
            case=replace(case, batch=ROWS[0], heads=ROWS[1]),
            contenders=(Plain(), *_ours(settings), WrittenOut()),
            rounds=(rounds, rounds),
            others=min(rounds, FEW),
            warm=True,
        )
        for name in settings.encodings or [name for row in SHORT_ROWS for name in row[1]]
        for length in _chosen(settings, "rows") or ROWS[2:]
        for case in settings.cases(name, length, causal=past_only(name))
    ]


def _layers(settings: Settings) -> list[Job]:
    """Jobs of whole layers."""
    names = LAYERS if settings.encodings is None else settings.encodings
    rounds = settings.counts[0]
    return [
        Job(
            case=case,
            contenders=(PlainLayer(), PosencLayer(), XTransformers(), Transformers()),
            rounds=(min(rounds, FEW),) * 2,
            others=max(1, rounds // 5),
            warm=True,
            memory=True,
        )
        for name in names
        if name in LAYERS
        for length in settings.lengths or (_middle(settings),)
        for case in settings.cases(name, length)
        if length < LONG and not settings.causal
    ]


def _decoding(settings: Settings) -> list[Job]:
    """Jobs of generation with a cache."""
    rounds = min(settings.counts[0], FEW)
    return [
        Job(
            case=case,
            contenders=(PosencDecoder("rope"), PosencDecoder(), LlamaDecoder()),
            rounds=(rounds, rounds),
            others=rounds,
            warm=True,
        )
        for length in _chosen(settings, "decoding") or CONTEXT
        for name in settings.encodings or DECODED
        for case in settings.cases(name, length, causal=True)[:1]
    ]


def _memory(settings: Settings) -> list[Job]:
    """Jobs of memory alone, plain SDPA with the first of a length, mask and dtype."""
    lengths = _chosen(settings, "memory")
    points = {
        (name, length, past_only(name))
        for name in settings.encodings or METHODS
        for length in lengths or (LONG,)
    }
    if settings.on_cuda and not lengths:
        fits = [limit for limit in settings.limits if limit.quantity == "fits"]
        points = {
            (name, n, False) for limit in fits for name in limit.encodings for n in limit.lengths
        }
    seen, jobs = set(), []
    for case in _cases(settings, points):
        first = replace(case, encoding="") not in seen
        seen.add(replace(case, encoding=""))
        contenders = (*([Plain()] if first else []), *_ours(settings))
        jobs.append(Job(case=case, contenders=contenders, memory=True))
    return jobs


def _chosen(settings: Settings, part: Part) -> Sequence[int] | None:
    """Lengths that were asked for by someone who asked for this part."""
    return settings.lengths if part in (settings.what or ()) else None


def _ours(settings: Settings) -> list[Contender]:
    return [Posenc(backend=backend) for backend in settings.backends]


def _kind(settings: Settings) -> str:
    return "cuda" if settings.on_cuda else "cpu"


def _middle(settings: Settings) -> int:
    return MIDDLE[_kind(settings)]


def _cases(settings: Settings, points: Iterable[tuple[str, int, bool]]) -> list[Case]:
    """By dtype, length, causality, then the order of ``METHODS``."""
    ranks = {name: rank for rank, name in enumerate(METHODS)}
    order = sorted(points, key=lambda p: (p[1], p[2], ranks.get(p[0], len(ranks)), p[0]))
    cases = [settings.cases(name, length, causal=causal) for name, length, causal in order]
    return [case for of_dtype in zip(*cases, strict=True) for case in of_dtype]
