"""Variants of the kernels that came with the package, and the one that serves this processor.

A wheel of posenc for one platform has them compiled in ``prebuilt``, with the hash of their sources
in their names: in a checkout whose sources have changed since, none is found.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from posenc.attention.problem.terms import AXES

SOURCES = Path(__file__).parent / "csrc"

PREBUILT = Path(__file__).parent / "prebuilt"

TERMS = ",".join(AXES)
"""The operands that the record of a problem declares."""

_V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AMX = (*_V4, "avx512_bf16", "amx_tile", "amx_bf16")

NEEDS = {"amx": _AMX, "v4": _V4, "v3": _V3, "neon": ("asimd",)}
"""Instruction sets of each variant by Linux' names, best first."""

CHOICES = (*NEEDS, "build", "none")
"""Values of ``POSENC_KERNELS``."""


SWITCHED_OFF = "POSENC_KERNELS is 'none'"


class VariantChoice(NamedTuple):
    """One of ``CHOICES``, and the reason for it."""

    name: str
    reason: str


@lru_cache
def sources_hash() -> str:
    """The hash of the sources and of the layout that Python and they share."""
    key = hashlib.sha256(TERMS.encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    return key.hexdigest()[:16]


def file_of(name: str) -> Path:
    """Path of a prebuilt variant of these sources; it may not exist."""
    return PREBUILT / f"{name}-{sources_hash()}.so"


@lru_cache
def choose() -> VariantChoice:
    """The variant that ``POSENC_KERNELS`` names, or the best that this machine supports."""
    asked = os.environ.get("POSENC_KERNELS", "")
    if asked == "none":
        return VariantChoice("none", SWITCHED_OFF)
    if asked == "build":
        return VariantChoice("build", "POSENC_KERNELS is 'build'")
    if os.environ.get("POSENC_KERNEL_FLAGS"):
        return VariantChoice("build", "POSENC_KERNEL_FLAGS is set")
    if asked:
        return _asked(asked)
    refused: list[str] = []
    for name in NEEDS:
        if file_of(name).exists():
            reason = unsupported(name)
            if reason is None:
                return VariantChoice(name, "; ".join(refused))
            refused.append(f"{name} {reason}")
    return VariantChoice("build", "; ".join(refused) or _absence())


def _asked(name: str) -> VariantChoice:
    value = f"POSENC_KERNELS is {name!r}"
    if name not in NEEDS:
        return VariantChoice("none", f"{value}, not one of {', '.join(CHOICES)}")
    if not file_of(name).exists():
        return VariantChoice("none", f"{value}, which did not come with posenc")
    reason = unsupported(name)
    return (
        VariantChoice("none", f"{value}, which {reason}") if reason else VariantChoice(name, value)
    )


def _absence() -> str:
    if PREBUILT.is_dir() and any(PREBUILT.iterdir()):
        return "those that came with posenc are of other sources or another platform"
    return "none came with this installation"


def unsupported(name: str) -> str | None:
    """Reason against a variant on this machine; None if it can run."""
    lacking = sorted(set(NEEDS[name]) - instruction_sets())
    if lacking:
        return f"needs {', '.join(lacking)}, which this processor or system lacks"
    if name == "amx" and not _tiles_permitted():
        return "needs tile registers, which this system does not give"
    return None


@lru_cache
def instruction_sets() -> frozenset[str]:
    """Instruction sets that processor and system support, by Linux' names."""
    if platform.machine() in ("aarch64", "arm64"):
        return frozenset({"asimd"})  # part of the architecture
    return frozenset(
        word
        for line in processor()
        if line.startswith(("flags", "Features"))
        for word in line.partition(":")[2].split()
    )


@lru_cache
def processor() -> tuple[str, ...]:
    """The lines of ``/proc/cpuinfo`` that tell one kind of processor from another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return (platform.processor(),)
    wanted = ("model name", "flags", "Features", "CPU part")
    return tuple(sorted({line for line in lines if line.startswith(wanted)}))


def _tiles_permitted() -> bool:
    """True where Linux lets processes use AMX' tile registers, by arch_prctl; asks for nothing."""
    arch_prctl, supported, tile_data = 158, 0x1021, 1 << 18  # ARCH_GET_XCOMP_SUPP
    features = ctypes.c_uint64()
    failed = ctypes.CDLL(None).syscall(arch_prctl, supported, ctypes.byref(features))
    return not failed and bool(features.value & tile_data)
