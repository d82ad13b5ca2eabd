"""This machine: cores, memory, names, peak memory of work, and estimates of a model's."""

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
from torch import nn

from posenc import __version__
from posenc.attention import explain
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.models import Decoder
from posenc.models.stack import StackConfig

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


def stack_bytes(
    model: nn.Module,
    config: StackConfig,
    *,
    layers: int,
    vocabulary: int,
    rows: int,
    length: int,
    training: bool,
    materialised: bool = True,
) -> int:
    """Estimated bytes of a forward pass, or of a training step: measured ones to about a third.

    Args:
        model: the whole model, for its parameters.
        config: shape of its blocks.
        layers: number of blocks; one with cross-attention counts as two.
        vocabulary: logits per position.
        rows, length: shape of the batch.
        training: include gradients and the optimiser's two moments.
        materialised: attention writes its weights of size length² to memory.
    """
    saved_layers = layers if training else 1
    per_token = saved_layers * (12 * config.dim + 6 * config.feed_forward_width) + 4 * vocabulary
    floats = rows * length * per_token
    if materialised:
        floats += saved_layers * 5 * rows * config.heads * length**2
    if training:
        floats = 7 * floats // 5 + 4 * sum(parameter.numel() for parameter in model.parameters())
    return 4 * floats


def decoder_bytes(model: Decoder, rows: int, length: int, *, training: bool) -> int:
    """``stack_bytes`` of a decoder, by the backends that serve its layers."""
    config = model.config
    return stack_bytes(
        model,
        config,
        layers=config.layers,
        vocabulary=config.vocabulary,
        rows=rows,
        length=length,
        training=training,
        materialised=any(_materialises(model, layer, training) for layer in range(config.layers)),
    )


def _materialises(model: Decoder, layer: int, training: bool) -> bool:
    config = model.config
    head_dim = config.head_dim or config.dim // config.heads
    q = torch.zeros(1, config.heads, 2, head_dim, device=model.embedding.weight.device)
    window = config.window[layer] if isinstance(config.window, Sequence) else config.window
    grid = Grid.of(Layout.sequence(2, device=q.device), causal=True, window=window)
    with torch.set_grad_enabled(training):
        return explain(q, q, q, grid, model.encodings[layer]).backend == "reference"


def gigabytes(count: int) -> str:
    """Bytes as text, in GB."""
    return f"{count / 1e9:.1f} GB"
