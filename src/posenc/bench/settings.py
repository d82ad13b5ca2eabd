"""Settings of a bench."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, get_args

import torch

from posenc.arguments import EXACT, Count, Interval, Width, check_fields
from posenc.attention import BACKENDS
from posenc.bench.case import Case, past_only
from posenc.bench.contenders import VARIANTS
from posenc.bench.limits import CPU, CUDA, Limit
from posenc.codec import to_plain
from posenc.errors import ArgumentError, UnknownNameError
from posenc.training.machine import available_memory

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
DTYPES = get_args(Dtype)

Part = Literal["calls", "rows", "layers", "decoding", "memory"]
PARTS: tuple[Part, ...] = get_args(Part)

STANDARD = (8, 64)
"""Heads and their width in limits."""

TENSORS = 8
"""Query, key, value and output, and their gradients."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a bench.

    Args:
        what: calls of attention; ``"rows"``: many short sequences, 16 × 12 heads × 128; whole
            layers, ``"decoding"`` with a cache; ``"memory"`` of long calls. By default calls and
            layers; calls alone if quick; all if full, and on CUDA memory too.
        encodings: as read by ``parse_name``; by default those with limits.
        lengths: tokens; by default some with limits. Where ``what`` is not given, of calls and
            layers alone.
        backends: of posenc; limits are for ``"auto"``.
        causal: with a causal mask; None: both ways at the middle length, at all if full, else
            without.
        heads, head_dim: of q, k and v.
        rounds: of timing up to 2048 tokens; longer and slow calls have fewer.
        threads: of the CPU: those that the process has, which ``bench`` does not change.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        dtypes: float32 on the CPU and bfloat16 on CUDA by default; both if full.
        quick: posenc and plain SDPA only, three rounds, the middle length unless full.
        full: every case with a limit.

    Raises:
        ArgumentError: for a value outside its domain.
        UnknownNameError: for an unknown encoding, option, backend or dtype.
    """

    what: Sequence[Part] | None = None
    encodings: Sequence[str] | None = None
    lengths: Sequence[Annotated[int, Interval(2, EXACT)]] | None = None
    backends: Sequence[str] = ("auto",)
    causal: bool | None = None
    heads: Count = 8
    head_dim: Width = 64
    rounds: Count | None = None
    threads: Count | None = None
    device: str = "cpu"
    dtypes: Sequence[Dtype] | None = None
    quick: bool = False
    full: bool = False

    def __post_init__(self) -> None:
        for name in ("what", "encodings", "lengths", "backends", "dtypes"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, tuple(dict.fromkeys(given)))
                if not given:
                    _refuse(name, "at least one", "none", "Leave it out for the usual ones.")
        for name in self.encodings or ():
            if past_only(name) and self.causal is False:
                _refuse("causal", f"True, which {name} needs", False, "Leave it open.")
        for name in self.backends:
            known = ["auto", *BACKENDS, *VARIANTS]
            if name not in known:
                raise UnknownNameError.of("backend", name, known)
        defaults = {"rounds": 3 if self.quick else 7, "threads": torch.get_num_threads()}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        check_fields(self)
        self._check_device()
        self._check_memory()
        if self.dtypes is None:
            dtypes = ("bfloat16",) if self.on_cuda else ("float32", "bfloat16")[: 1 + self.full]
            object.__setattr__(self, "dtypes", dtypes)

    def _check_device(self) -> None:
        if not re.fullmatch(r"(cpu|cuda)(:\d+)?", self.device):
            _refuse("device", "cpu, cuda or cuda:N", self.device, "Choose one.")
        device = torch.device(self.device)
        present = torch.cuda.device_count() if device.type == "cuda" else 1
        if (device.index or 0) >= present:
            _refuse("device", "one that this machine has", self.device, "Use cpu.")

    def _check_memory(self) -> None:
        """Require that inputs and their gradients fit into memory."""
        available = available_memory(torch.device(self.device))
        if available is None or not self.lengths:
            return
        most = available // (TENSORS * self.heads * self.head_dim * 4)
        if max(self.lengths) > most:
            _refuse(
                "lengths",
                f"at most {most:,} tokens, for which there is memory",
                f"{max(self.lengths):,}",
                "Leave the longest out, or take fewer heads.",
            )

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def usual(self) -> bool:
        """True if neither encodings nor lengths were chosen."""
        return self.encodings is None and self.lengths is None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts to be measured."""
        if self.what is not None:
            return tuple(self.what)
        if self.full:
            return PARTS
        if self.quick:
            return ("calls",)
        return ("calls", "layers", "memory") if self.on_cuda and self.usual else ("calls", "layers")

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Limits for these sizes and dtypes."""
        if (self.heads, self.head_dim) != STANDARD:
            return ()
        return tuple(x for x in (CUDA if self.on_cuda else CPU) if x.dtype in (self.dtypes or ()))

    @property
    def counts(self) -> tuple[int, int]:
        """Rounds and threads."""
        assert self.rounds is not None  # set in __post_init__
        assert self.threads is not None
        return self.rounds, self.threads

    def cases(self, encoding: str, length: int, *, causal: bool = False) -> list[Case]:
        """A case of these sizes for each dtype."""
        return [
            Case(
                encoding=encoding,
                length=length,
                causal=causal,
                heads=self.heads,
                head_dim=self.head_dim,
                device=self.device,
                dtype=dtype,
            )
            for dtype in self.dtypes or ()
        ]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return to_plain(self)


def _refuse(name: str, expected: str, got: object, remedy: str) -> NoReturn:
    raise ArgumentError(name, expected=expected, got=got, remedy=remedy)
