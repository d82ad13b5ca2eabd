"""Cases and contenders of a bench."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from posenc.bench.case import Case, past_only
from posenc.bench.contenders import Contender, Eager, Flex, Plain, Posenc, WrittenOut
from posenc.bench.layers import LAYERS, PlainLayer, PosencLayer, Transformers, XTransformers
from posenc.bench.limits import ALL
from posenc.bench.settings import Settings

MIDDLE = {"cpu": 2048, "cuda": 8192}
"""Length at which everything is measured."""

EXTRA = {"cpu": (512, 1024), "cuda": (2048, 32768)}
"""Further lengths, for the chart."""

QUICK = 4096
"""Longest length of a quick bench on the CPU."""

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
    """Points timed and measured for the limits and the chart."""
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
        backends = [name for name in ROTATED.get(name, ()) if name not in settings.backends]
        contenders += [Posenc(backend=backend) for backend in backends]
    if settings.on_cuda:
        timed = (rounds, rounds)
    elif long:
        timed = (min(rounds, LONG_ROUNDS[0]), LONG_ROUNDS[1])
    else:
        few = min(rounds, FEW)
        timed = (few if secondary else max(few, min(rounds, rounds * 2048 // length)),) * 2
    return Job(
        case=case,
        contenders=tuple(contenders),
        rounds=timed,
        others=rounds if settings.on_cuda else max(1, rounds // 5),
        warm=not long,
        memory=not long and (not settings.quick or length == middle),
    )


def _layers(settings: Settings) -> list[Job]:
    """Jobs of whole layers."""
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
    """As set; by default only if the encoding requires it."""
    return past_only(name) if settings.causal is None else settings.causal


def _kind(settings: Settings) -> str:
    return "cuda" if settings.on_cuda else "cpu"


def _middle(settings: Settings) -> int:
    return MIDDLE[_kind(settings)]


def _in_order(points: Iterable[Point]) -> list[Point]:
    """By length, then causality, then the order of ``ALL``."""
    ranks = {name: rank for rank, name in enumerate(ALL)}
    return sorted(points, key=lambda p: (p[1], p[2], ranks.get(p[0], len(ranks)), p[0]))
