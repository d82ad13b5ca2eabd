"""Cases and contenders of a bench."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from posenc.bench.case import Case, past_only
from posenc.bench.contenders import Contender, Eager, Flex, Plain, Posenc, WrittenOut
from posenc.bench.layers import LAYERS, PlainLayer, PosencLayer, Transformers, XTransformers
from posenc.bench.limits import ALL
from posenc.bench.settings import Settings

__all__ = ["Job", "plan"]

MIDDLE = {"cpu": 2048, "cuda": 8192}
"""The length at which everything is measured."""

EXTRA = {"cpu": (512, 1024), "cuda": (2048, 32768)}
"""More lengths, for the chart."""

QUICK = 4096
"""The longest length of a quick bench on the CPU."""

LONG = 16384
"""Tokens from which on a call on the CPU takes many seconds: fewer rounds, and none to warm up."""

LONG_ROUNDS = (3, 1)

ROTATED = {"nope": ("triton",), "rope": ("triton", "triton-unfused")}
"""On CUDA, by our own kernels as well: no position, and a rotation within them or before."""

FEW = 3
"""Rounds of what no limit hangs on, and the least of what one does."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One case and who takes part.

    Args:
        case: what is computed.
        contenders: by whom; in timed jobs the first is the one the others are measured against.
        rounds: of timing forward, and forward and backward; (0, 0) for none.
        others: rounds, at most, of those that are neither the base nor posenc's.
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
        """Rough cost relative to other jobs."""
        passes = self.rounds[0] + 3 * self.rounds[1] + 4 * (self.warm + self.memory)
        size = self.case.length**2 / (2 if self.case.causal else 1)
        return passes * size * len(self.contenders)


def plan(settings: Settings) -> list[Job]:
    """All jobs, short ones first."""
    if settings.usual:
        timed, memory = _asked_for(settings)
    else:
        lengths = settings.lengths or (_middle(settings),)
        timed = {
            (name, length, _causal(settings, name))
            for name in settings.encodings or ALL
            for length in lengths
        }
        memory = set()
    jobs = [_timed(settings, *point) for point in _in_order(timed)]
    jobs += _layers(settings)
    seen = set()
    for name, length, causal in _in_order(memory - timed):
        first = (length, causal) not in seen
        seen.add((length, causal))
        contenders = (*([Plain()] if first else []), *_ours(settings))
        case = settings.case(name, length, causal=causal)
        jobs.append(Job(case=case, contenders=contenders, memory=True))
    return jobs


Point = tuple[str, int, bool]


def _asked_for(settings: Settings) -> tuple[set[Point], set[Point]]:
    """Jobs timed and measured for the limits, and extras."""
    timed: set[Point] = set()
    memory: set[Point] = set()
    for limit in settings.limits:
        about = memory if limit.about_memory or limit.quantity == "fits" else timed
        about |= {(name, n, limit.causal) for name in limit.encodings for n in limit.lengths}
    middle = _middle(settings)
    if settings.quick:
        timed |= {(name, middle, _causal(settings, name)) for name in ALL}
        longest = middle if settings.on_cuda else QUICK
        return {p for p in timed if p[1] <= longest}, {p for p in memory if p[1] <= longest}
    for length in (*EXTRA[_kind(settings)], middle):
        timed |= {(name, length, _causal(settings, name)) for name in ALL}
    if settings.causal is None:
        timed |= {(name, middle, True) for name in ALL}
    return timed, memory


def _timed(settings: Settings, name: str, length: int, causal: bool) -> Job:
    case = settings.case(name, length, causal=causal)
    middle, rounds = _middle(settings), settings.counts[0]
    long = length >= LONG and not settings.on_cuda
    secondary = causal and settings.causal is None and not past_only(name)
    alone = settings.quick or long or secondary
    contenders: list[Contender] = [Plain(), *_ours(settings)]
    if not alone and (length <= middle or settings.lengths or settings.on_cuda):
        contenders += [Eager(), WrittenOut()]
        if length == middle or settings.lengths or settings.on_cuda:
            contenders.append(Flex())
    if settings.on_cuda and settings.usual and not settings.quick and length == middle:
        kernels = (each for each in ROTATED.get(name, ()) if each not in settings.backends)
        contenders += [Posenc(backend=each) for each in kernels]
    if settings.on_cuda:
        each = (rounds, rounds)
    elif long:
        each = (min(rounds, LONG_ROUNDS[0]), LONG_ROUNDS[1])
    else:
        few = min(rounds, FEW)
        each = (few if secondary else max(few, min(rounds, rounds * 2048 // length)),) * 2
    return Job(
        case=case,
        contenders=tuple(contenders),
        rounds=each,
        others=rounds if settings.on_cuda else max(1, rounds // 5),
        warm=not long,
        memory=not long and (not settings.quick or length == middle),
    )


def _layers(settings: Settings) -> list[Job]:
    """Whole layers, beside those of other libraries."""
    if settings.quick:
        return []
    names = LAYERS if settings.encodings is None else settings.encodings
    rounds = settings.counts[0]
    return [
        Job(
            case=settings.case(name, length, causal=False),
            contenders=(PlainLayer(), PosencLayer(), XTransformers(), Transformers()),
            rounds=(min(rounds, FEW),) * 2,
            others=max(1, rounds // 5),
            warm=True,
            memory=True,
        )
        for name in names
        if name in LAYERS
        for length in settings.lengths or (_middle(settings),)
        if length < LONG and not settings.causal
    ]


def _ours(settings: Settings) -> list[Contender]:
    return [Posenc(backend=backend) for backend in settings.backends]


def _causal(settings: Settings, name: str) -> bool:
    """As asked; where nothing is asked, both ways unless the encoding knows the past only."""
    return past_only(name) if settings.causal is None else settings.causal


def _kind(settings: Settings) -> str:
    return "cuda" if settings.on_cuda else "cpu"


def _middle(settings: Settings) -> int:
    return MIDDLE[_kind(settings)]


def _in_order(points: Iterable[Point]) -> list[Point]:
    """By length, then by causality, then as the encodings are listed."""
    ranks = {name: rank for rank, name in enumerate(ALL)}
    return sorted(points, key=lambda p: (p[1], p[2], ranks.get(p[0], len(ranks)), p[0]))
