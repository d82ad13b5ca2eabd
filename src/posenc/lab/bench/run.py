"""``bench``: settings, readings and report."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import torch

from posenc import __version__
from posenc.arguments import check_fields
from posenc.attention import BACKENDS
from posenc.attention.backends.native.build import description
from posenc.errors import ArgumentError, BackendRefusal, UnknownNameError
from posenc.lab.bench import BenchOptions
from posenc.lab.bench.passes import Case, Pass, Times, attending, past_only, plain, timed
from posenc.lab.codec import to_plain
from posenc.lab.reporting.numbers import Bounds, Estimate
from posenc.lab.training.machine import (
    available_memory,
    cores,
    describe_device,
    platform_name,
    require_device,
)

MIDDLE = {"cpu": 2048, "cuda": 8192}
"""Length timed by default."""

PLAIN = "plain SDPA"

PACKAGES = ("torch", "triton", "transformers", "x-transformers")

TENSORS = 8
"""Query, key, value and output, and their gradients."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings(BenchOptions):
    """Settings of a bench.

    Args:
        encodings: as read by ``parse_name``; ``METHODS`` by default.
        lengths: tokens; 2048 on the CPU and 8192 on CUDA by default.
        backends: of posenc.
        causal: with a causal mask; None: only for encodings that need one.
        heads, head_dim: of q, k and v.
        rounds: of timing.
        threads: of the CPU: those that the process has, which ``bench`` does not change.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        dtypes: float32 on the CPU and bfloat16 on CUDA by default.

    Raises:
        ArgumentError: for a value outside its domain.
        UnknownNameError: for an unknown encoding, option, backend or dtype.
    """

    causal: bool | None = None

    def __post_init__(self) -> None:
        require_device(self.device, kinds=("cpu", "cuda"))
        kind = torch.device(self.device).type
        defaults: dict[str, Any] = {
            "lengths": (MIDDLE[kind],),
            "threads": torch.get_num_threads(),
            "dtypes": ("bfloat16" if kind == "cuda" else "float32",),
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("encodings", "lengths", "backends", "dtypes"):
            if not getattr(self, name):
                _refuse(name, "at least one", "none", "Leave it out for the usual ones.")
        check_fields(self)
        for name in self.encodings:
            if past_only(name) and self.causal is False:
                _refuse("causal", f"True, which {name} needs", False, "Leave it open.")
        for name in self.backends:
            if name not in (known := ["auto", *BACKENDS]):
                raise UnknownNameError.of("backend", name, known)
        self._check_memory()

    def _check_memory(self) -> None:
        """Require that inputs and their gradients fit into memory."""
        available = available_memory(torch.device(self.device))
        most = (available or 2**63) // (TENSORS * self.heads * self.head_dim * 4)
        if (longest := max(self.lengths or ())) > most:
            _refuse(
                "lengths",
                f"at most {most:,} tokens, for which there is memory",
                f"{longest:,}",
                "Leave the longest out, or take fewer heads.",
            )

    def cases(self) -> list[Case]:
        """The cases, by dtype and length."""
        return [
            Case(
                encoding=encoding,
                length=length,
                causal=past_only(encoding) if self.causal is None else self.causal,
                heads=self.heads,
                head_dim=self.head_dim,
                device=self.device,
                dtype=dtype,
            )
            for dtype in dict.fromkeys(self.dtypes or ())
            for length in sorted({*(self.lengths or ())})
            for encoding in dict.fromkeys(self.encodings)
        ]


@dataclass(frozen=True, kw_only=True)
class BenchReading:
    """One pass in one case; without times if it was refused.

    Args:
        encoding, length, causal, dtype: of the case.
        contender: ``PLAIN``, ``"posenc"``, or that and a backend.
        times: of the pass.
        served_by: the backend that posenc chose.
        refusal: the reason why there are none.
    """

    encoding: str
    length: int
    causal: bool
    dtype: str
    contender: str
    times: Times
    served_by: str = ""
    refusal: str = ""

    def ratio(self, *, both: bool) -> Estimate | None:
        """Time relative to the reference, forward alone or forward and backward."""
        times = self.times
        mean = times.both_ratio if both else times.forward_ratio
        spread = times.both_spread if both else times.forward_spread
        return None if mean is None else Estimate(mean, spread, times.rounds[both], Bounds(0.0))

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values, those of ``times`` among them."""
        values = to_plain(self)
        times: dict[str, Any] = values.pop("times")
        return values | times


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Results of a bench.

    Args:
        settings: of the bench.
        about: date, device, machine and versions.
        seconds: duration.
        readings: all measurements.
    """

    settings: BenchSettings
    about: Mapping[str, Any]
    seconds: float
    readings: tuple[BenchReading, ...]

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return {
            **self.about,
            "seconds": round(self.seconds, 1),
            "settings": to_plain(self.settings),
            "readings": [reading.to_json() for reading in self.readings],
        }


def bench(
    settings: BenchSettings, *, progress: Callable[[str, float], None] = lambda title, share: None
) -> BenchReport:
    """Time what the settings ask for.

    Args:
        settings: of the bench.
        progress: called before every case with its description and the share that is done.

    Raises:
        ArgumentError: if this process has another number of threads than the settings ask for.
    """
    start = time.perf_counter()
    require_threads(settings.threads)
    readings: list[BenchReading] = []
    cases = settings.cases()
    for number, case in enumerate(cases):
        progress(str(case), number / len(cases))
        readings += _measure(case, settings)
    seconds = time.perf_counter() - start
    return BenchReport(
        settings=settings, about=about(settings.device), seconds=seconds, readings=tuple(readings)
    )


def _measure(case: Case, settings: BenchSettings) -> list[BenchReading]:
    """Readings of plain SDPA and of each backend."""
    call = case.build()
    passes: dict[str, Pass] = {PLAIN: plain(call)}
    refusals: dict[str, str] = {PLAIN: ""}
    for backend in dict.fromkeys(settings.backends):
        name = contender_name(backend)
        refusals[name] = ""
        try:
            passes[name] = attending(call, backend)
        except BackendRefusal as error:
            refusals[name] = error.got
    for one in passes.values():
        one.both()  # compiles, and allocates what is kept
    rounds = dict.fromkeys(passes, (settings.rounds, settings.rounds))
    times = timed(passes, rounds, device=case.device, length=case.length)
    return [
        BenchReading(
            encoding=case.encoding,
            length=case.length,
            causal=case.causal,
            dtype=case.dtype,
            contender=name,
            served_by=passes[name].served_by if name in passes else "",
            times=times.get(name, Times()),
            refusal=refusal,
        )
        for name, refusal in refusals.items()
    ]


def contender_name(backend: str) -> str:
    """The name of posenc with a backend in readings."""
    return "posenc" if backend == "auto" else f"posenc {backend}"


def about(device: str) -> dict[str, Any]:
    """Date in UTC, device, machine and versions of packages, as plain JSON values."""
    versions = {"python": platform.python_version(), "posenc": __version__}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": describe_device(torch.device(device)),
        "machine": {
            "system": platform_name(),
            "cores": cores(),
            "threads": torch.get_num_threads(),
            "kernels": description(),
        },
        # The metadata of the package index's builds leave out which build it is (+cu130).
        "versions": versions | {"torch": torch.__version__},
    }


def require_threads(threads: int | None) -> None:
    """Raise ArgumentError if this process has another number of threads."""
    if threads != torch.get_num_threads():
        raise ArgumentError(
            "threads",
            expected=f"{torch.get_num_threads()}, the number of threads of this process",
            got=threads,
            remedy=f"Leave it out, or call torch.set_num_threads({threads}) before.",
        )


def _refuse(name: str, expected: str, got: object, remedy: str) -> NoReturn:
    raise ArgumentError(name, expected=expected, got=got, remedy=remedy)
