"""Jobs of a bench: cases, each with its contenders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from benchmarks.attention.contenders import Contender, Eager, Flex, Plain, Posenc, WrittenOut
from benchmarks.attention.decoding import LlamaDecoder, PosencDecoder
from benchmarks.attention.layers import LAYERS, PlainLayer, PosencLayer, Transformers, XTransformers
from benchmarks.attention.limits import CONTEXTS, DECODED, LIMITS, LONG, SHORT_ROWS, Limit

from posenc.lab.bench import METHODS
from posenc.lab.bench.passes import Case, axes_of, parse_name, past_only
from posenc.lab.bench.run import MIDDLE

Part = Literal["calls", "rows", "layers", "decoding", "memory"]
PARTS: tuple[Part, ...] = get_args(Part)

FURTHER = {"cpu": (512,), "cuda": (2048, 32768)}
"""Further lengths beside ``MIDDLE``."""

FULL = {"cpu": (512, 1024, 4096), "cuda": (2048, 32768)}
"""The same of a full bench."""

LONG_ROUNDS = (3, 1)
"""Most rounds of calls on the CPU from ``LONG`` tokens on, which have no warm-up."""

ROTATED = {"nope": ("triton",), "rope": ("triton", "triton-unfused")}
"""Further backends on CUDA at the middle length."""

FEW = 3
"""Rounds of longer and secondary calls."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One case and its contenders.

    Args:
        case: the call.
        contenders: in timed jobs the reference first.
        rounds: of timing forward, and forward and backward; (0, 0) for none.
        others: maximum rounds of contenders other than the reference and posenc.
        warm: call each before, and compare it with float64.
        memory: measure peaks.
    """

    case: Case
    contenders: tuple[Contender, ...]
    rounds: tuple[int, int] = (0, 0)
    others: int = 1
    warm: bool = False
    memory: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of a bench.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        parts: calls of attention; many short rows; whole layers; generation with a cache; memory
            of long calls.
        encodings: by default those with limits.
        lengths: by default some with limits, of calls and layers.
        causal: with a causal mask; None: both ways at the middle length, or everywhere if full.
        dtypes: float32 on the CPU, bfloat16 on CUDA, both if full.
        backends: of posenc; limits are for ``"auto"``.
        rounds: of timing up to 2048 tokens.
        full: every case with a limit.
        alone: posenc and plain SDPA only, without memory of short calls.
    """

    device: str = "cpu"
    parts: Sequence[Part] | None = None
    encodings: Sequence[str] | None = None
    lengths: Sequence[int] | None = None
    causal: bool | None = None
    dtypes: Sequence[str] | None = None
    backends: Sequence[str] = ("auto",)
    rounds: int = 7
    full: bool = False
    alone: bool = False

    @property
    def kind(self) -> str:
        """The type of device."""
        return torch.device(self.device).type

    @property
    def on_cuda(self) -> bool:
        return self.kind == "cuda"

    def limits(self) -> list[Limit]:
        """Limits for the device, dtypes and encodings."""
        return [
            limit
            for limit in LIMITS[self.kind]
            if limit.dtype in self._dtypes()
            and (self.encodings is None or limit.encoding in self.encodings)
        ]

    def jobs(self) -> list[Job]:
        """All jobs, part by part."""
        usual: tuple[Part, ...] = ("calls", "layers", "memory")[: 3 if self.on_cuda else 2]
        parts = self.parts or (PARTS if self.full else usual)
        makers = {
            "calls": self._calls,
            "rows": self._rows,
            "layers": self._layers,
            "decoding": self._decoding,
            "memory": self._memory,
        }
        return [job for part in PARTS if part in parts for job in makers[part]()]

    def _dtypes(self) -> Sequence[str]:
        return self.dtypes or (
            ("bfloat16",) if self.on_cuda else ("float32", "bfloat16")[: 1 + self.full]
        )

    def _cases(self, encoding: str, length: int, *, causal: bool = False) -> list[Case]:
        return [
            Case(encoding=encoding, length=length, causal=causal, device=self.device, dtype=dtype)
            for dtype in self._dtypes()
        ]

    def _calls(self) -> Iterator[Job]:
        middle = MIDDLE[self.kind]
        lengths = self.lengths or (*(FULL if self.full else FURTHER)[self.kind], middle)
        points = {
            (length, causal, name)
            for name in self.encodings or METHODS
            for length in lengths
            for causal in self._masks(name, length)
        }
        if not self.lengths and (self.full or self.on_cuda):
            points |= {
                (limit.length, limit.causal, limit.encoding)
                for limit in self.limits()
                if limit.level == "call" and limit.batch == 1 and not limit.about_memory
            }
        for length, causal, name in sorted(points):
            for case in self._cases(name, length, causal=causal):
                yield self._timed(case)

    def _masks(self, name: str, length: int) -> tuple[bool, ...]:
        """Causal or not, or both; images have no order."""
        if past_only(name):
            return (True,)
        if self.causal is not None:
            return (self.causal,)
        both = self.full or length == MIDDLE[self.kind]
        return (False, True) if both and axes_of(parse_name(name)[0]) == 1 else (False,)

    def _timed(self, case: Case) -> Job:
        middle, length, rounds = MIDDLE[self.kind], case.length, self.rounds
        long = length >= LONG and not self.on_cuda
        secondary = case.causal and self.causal is None and not past_only(case.encoding)
        contenders: list[Contender] = [Plain(), *self._ours()]
        wanted = self.on_cuda or self.lengths is not None
        if not (self.alone or long or secondary) and (length <= middle or wanted):
            contenders += [Eager(), WrittenOut()]
            contenders += [Flex()] if length == middle or wanted else []
        if self.on_cuda and not self.alone and length == middle:
            contenders += [Posenc(backend=name) for name in ROTATED.get(case.encoding, ())]
        if long:
            times = (min(rounds, LONG_ROUNDS[0]), LONG_ROUNDS[1])
        elif self.on_cuda:
            times = (rounds, rounds)
        else:
            few = min(rounds, FEW)
            least = secondary and not self.full
            times = (few if least else max(few, min(rounds, rounds * 2048 // length)),) * 2
        return Job(
            case=case,
            contenders=tuple(contenders),
            rounds=times,
            others=rounds if self.on_cuda else max(1, rounds // 5),
            warm=not long,
            memory=not (long or secondary or self.alone),
        )

    def _rows(self) -> Iterator[Job]:
        """16 × 12 heads × 128 tokens."""
        for name in self.encodings or [row[1] for row in SHORT_ROWS]:
            for case in self._cases(name, 128, causal=past_only(name)):
                yield Job(
                    case=replace(case, batch=16, heads=12),
                    contenders=(Plain(), *self._ours(), WrittenOut()),
                    rounds=(self.rounds, self.rounds),
                    others=min(self.rounds, FEW),
                    warm=True,
                )

    def _layers(self) -> Iterator[Job]:
        rounds = min(self.rounds, FEW)
        for name in LAYERS if self.encodings is None else self.encodings:
            for length in self.lengths or (MIDDLE[self.kind],):
                if name not in LAYERS or length >= LONG or self.causal:
                    continue
                for case in self._cases(name, length):
                    yield Job(
                        case=case,
                        contenders=(PlainLayer(), PosencLayer(), XTransformers(), Transformers()),
                        rounds=(rounds, rounds),
                        warm=True,
                        memory=True,
                    )

    def _decoding(self) -> Iterator[Job]:
        rounds = min(self.rounds, FEW)
        for length in CONTEXTS:
            for name in self.encodings or DECODED:
                (case, *_) = self._cases(name, length, causal=True)
                yield Job(
                    case=case,
                    contenders=(PosencDecoder("rope"), PosencDecoder(), LlamaDecoder()),
                    rounds=(rounds, rounds),
                    others=rounds,
                    warm=True,
                )

    def _memory(self) -> Iterator[Job]:
        """Memory alone; plain SDPA with the first of a mask and dtype."""
        points = [(name, LONG, past_only(name)) for name in self.encodings or METHODS]
        if self.on_cuda:
            fits = [limit for limit in self.limits() if limit.quantity == "fits"]
            points = [(limit.encoding, limit.length, False) for limit in fits]
        seen = set()
        for name, length, causal in points:
            for case in self._cases(name, length, causal=causal):
                first = replace(case, encoding="") not in seen
                seen.add(replace(case, encoding=""))
                contenders = (*([Plain()] if first else []), *self._ours())
                yield Job(case=case, contenders=contenders, memory=True)

    def _ours(self) -> list[Contender]:
        return [Posenc(backend=backend) for backend in self.backends]
