"""Everything that decides what a bench measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import torch

from posenc.arguments import EXACT, Count, Interval, Width, check_fields
from posenc.attention import BACKENDS
from posenc.bench.case import Case, past_only
from posenc.bench.contenders import VARIANTS
from posenc.bench.limits import CPU, CUDA, Limit
from posenc.codec import to_plain
from posenc.errors import ArgumentError, UnknownNameError
from posenc.training.machine import available_memory, cores

__all__ = ["DTYPES", "Settings"]

DTYPES = ("float32", "bfloat16", "float16", "float64")

STANDARD = (8, 64)
"""Heads, and their width, that limits are for."""

TENSORS = 8
"""Query, key, value and output, and the gradient of each."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One bench. With neither encodings nor lengths it is all that the limits ask for, and more.

    Args:
        encodings: as ``parse_name`` reads them; None: those that there are limits for.
        lengths: tokens; None: those that there are limits for, and some more for the chart.
        backends: of posenc; ``"auto"`` is the one that limits are for.
        causal: queries see the past only. None: both ways, and past only at the middle length.
        heads, head_dim: of q, k and v.
        rounds: of timing up to 2048 tokens; fewer of longer calls, and of what is slow or beside
            the limits.
        threads: of the CPU; all cores by default.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        dtype: one of ``DTYPES``; float32 on the CPU and bfloat16 on CUDA by default.
        quick: posenc and plain SDPA only, three rounds, nothing longer than 4096 tokens on the
            CPU.

    Raises:
        ArgumentError: on a value out of its domain.
        UnknownNameError: on an encoding, option or backend that does not exist.
    """

    encodings: Sequence[str] | None = None
    lengths: Sequence[Annotated[int, Interval(2, EXACT)]] | None = None
    backends: Sequence[str] = ("auto",)
    causal: bool | None = None
    heads: Count = 8
    head_dim: Width = 64
    rounds: Count | None = None
    threads: Count | None = None
    device: str = "cpu"
    dtype: str | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("encodings", "lengths", "backends"):
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
        defaults = {"rounds": 3 if self.quick else 7, "threads": cores()}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        check_fields(self)
        self._check_device()
        self._check_memory()
        if self.dtype is None:
            object.__setattr__(self, "dtype", "bfloat16" if self.on_cuda else "float32")
        if self.dtype not in DTYPES:
            raise UnknownNameError.of("dtype", str(self.dtype), DTYPES)

    def _check_device(self) -> None:
        try:
            device = torch.device(self.device)
        except RuntimeError:
            _refuse("device", "cpu, cuda or cuda:N", self.device, "Choose one.")
        if device.type not in ("cpu", "cuda"):
            _refuse("device", "cpu, cuda or cuda:N", self.device, "Choose one.")
        present = torch.cuda.device_count() if device.type == "cuda" else 1
        if (device.index or 0) >= present:
            _refuse("device", "one that this machine has", self.device, "Use cpu.")

    def _check_memory(self) -> None:
        """Refuse lengths of which not even the inputs and their gradients fit."""
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
        """Whether nothing was chosen: all limits are to be measured."""
        return self.encodings is None and self.lengths is None

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Those that hold for these sizes and dtype."""
        usual = "bfloat16" if self.on_cuda else "float32"
        if (self.heads, self.head_dim) != STANDARD or self.dtype != usual:
            return ()
        return CUDA if self.on_cuda else CPU

    @property
    def counts(self) -> tuple[int, int]:
        """Rounds and threads, whether given or not."""
        assert self.rounds is not None  # __post_init__ has filled both in
        assert self.threads is not None
        return self.rounds, self.threads

    def case(self, encoding: str, length: int, *, causal: bool = False) -> Case:
        """A case of these sizes."""
        return Case(
            encoding=encoding,
            length=length,
            causal=causal,
            heads=self.heads,
            head_dim=self.head_dim,
            device=self.device,
            dtype=str(self.dtype),
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return to_plain(self)


def _refuse(name: str, expected: str, got: object, remedy: str) -> NoReturn:
    raise ArgumentError(name, expected=expected, got=got, remedy=remedy)
