"""Cores, memory and names of this machine, and peak memory of a piece of work."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from posenc import __version__
from posenc.errors import ArgumentError

STATUS = Path("/proc/self/status")


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(device: torch.device) -> int | None:
    """Bytes that could be allocated on a device now; None where that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    limits = [limit for limit in (_free_system(), _free_group()) if limit is not None]
    return min(limits, default=None)


def require_device(name: str, kinds: Sequence[str] = ("cpu", "cuda", "mps")) -> None:
    """Raise ArgumentError unless ``name`` is a device of one of these kinds in this machine."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    present = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if device.type not in kinds:
        *others, last = (*kinds, "cuda:N")
        expected, remedy = f"{', '.join(others)} or {last}", "Choose one."
    elif (device.index or 0) >= present[device.type]:
        expected, remedy = "one that this machine has", "Use cpu."
    else:
        return
    raise ArgumentError("device", expected=expected, got=name, remedy=remedy)


def describe_device(device: torch.device) -> str:
    """A device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({_processor()}, {cores()} cores)"


def versions() -> dict[str, str]:
    """Versions of python, torch, posenc and the platform, as reports name them."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "posenc": __version__,
        "platform": platform_name(),
    }


def platform_name() -> str:
    """The operating system in words."""
    return platform.platform(aliased=True, terse=True)


class PeakMemory:
    """Peak memory since its creation, beyond the memory used then.

    On CUDA by the allocator; on the CPU by the growth of the process, after memory freed before
    is returned to the system where the C library can do that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        _return_freed()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        self._before = _memory_in(STATUS, "VmRSS") or _peak_resident()

    def used(self) -> int:
        """Bytes at the highest point so far."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = _peak_resident()
        return max(0, peak - self._before)


def _free_system() -> int | None:
    available = _memory_in(Path("/proc/meminfo"), "MemAvailable")
    if available is not None:
        return available
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _free_group() -> int | None:
    """Free memory within a container's limit."""
    folder = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return int((folder / limit).read_text()) - int((folder / used).read_text())
        except (OSError, ValueError):
            continue
    return None


def _peak_resident() -> int:
    highest = _memory_in(STATUS, "VmHWM")
    if highest is not None:
        return highest
    if sys.platform == "win32":
        return 0
    import resource  # a module of Unix alone

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _return_freed() -> None:
    """Ask glibc to give freed memory back, so that the next peak is not hidden below it."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _processor() -> str:
    name = _lines(Path("/proc/cpuinfo")).get("model name")
    return name or platform.processor() or platform.machine()


def _memory_in(path: Path, key: str) -> int | None:
    """Bytes that a file of the kernel says; None where it does not."""
    lines = _lines(path)
    return int(lines[key].split()[0]) * 1024 if key in lines else None


def _lines(path: Path) -> dict[str, str]:
    """A file of ``key: value`` lines; empty where there is no such file."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
