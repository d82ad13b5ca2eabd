"""Building the kernels, once for each machine: ``python -m posenc.attention.backends.native``.

The shared object lies in the user's cache folder under a name that follows from the sources, the
processor, PyTorch's version and the compiler's flags.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch

from posenc.attention.backends.native.library import Library
from posenc.errors import BackendRefusal

COMMAND = "python -m posenc.attention.backends.native"

SOURCES = Path(__file__).parent / "csrc"

FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-Wno-psabi"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)

OBJECTS = {"float32.o": (), "float64.o": ("-DPOSENC_DOUBLE",)}


def folder() -> Path:
    """The folder that built kernels are kept in."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "posenc" / "kernels"


@lru_cache
def path() -> Path:
    """The shared object of these sources on this machine, built or not."""
    key = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    for word in (
        *FLAGS,
        *_extra_flags(),
        torch.__version__,
        sys.platform,
        platform.machine(),
        _cpu(),
    ):
        key.update(word.encode() + b"\0")
    return folder() / f"{key.hexdigest()[:32]}.so"


def _extra_flags() -> list[str]:
    """Flags for sanitizers and the like, from ``POSENC_KERNEL_FLAGS``."""
    return os.environ.get("POSENC_KERNEL_FLAGS", "").split()


def _cpu() -> str:
    """The processor's name and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "".join(sorted({line for line in lines if line.startswith(wanted)}))


def missing() -> str | None:
    """Reason against using the kernels, as the end of "because …"; None if they can be used."""
    try:
        library()
    except FileNotFoundError:
        return f"its kernels are not built on this machine; to build them: {COMMAND}"
    except OSError as error:
        return f"its kernels cannot be loaded ({error})"
    return None


@lru_cache
def outpaces_sdpa() -> bool:
    """True where the kernels are faster than PyTorch's fused attention without any terms too.

    The products of PyTorch's are MKL's, which on AMD's processors (measured: EPYC with AVX-512)
    take about twice the time of the kernels'.
    """
    return bool(torch.backends.mkl.is_available()) and "AMD" in _cpu()  # type: ignore[no-untyped-call]


# As torch.compiler.assume_constant_result does, which would load all of the compiler.
for _function in (missing, outpaces_sdpa):
    _function.__dict__["_dynamo_marked_constant"] = True


def library() -> Library:
    """The kernels, loaded on first use.

    Raises:
        FileNotFoundError: where they have not been built.
        OSError: where they cannot be loaded.
    """
    return _loaded(path())


@lru_cache
def _loaded(file: Path) -> Library:
    if not file.exists():
        raise FileNotFoundError(file)
    return Library(file)


def build(*, quiet: bool = False) -> Path:
    """Build the kernels unless that has been done; two processes at once build them once.

    Raises:
        BackendRefusal: where there is no compiler, or it fails.
    """
    file = path()
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with _Lock(file.parent / "lock"):
        if not file.exists():
            _compile(_compiler(), file, quiet=quiet)
    return file


class _Lock:
    """Held by one process at a time, and given back by the system if it dies."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w")

    def __enter__(self) -> None:
        import fcntl

        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _compiler() -> str:
    """GCC 12 or newer: ``$CXX``, or ``g++``."""
    remedy = "Install GCC 12 or newer (Debian, Ubuntu: apt-get install g++), or set CXX to it."
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if sys.platform == "win32" or found is None:
        raise BackendRefusal("compiler", expected="a C++ compiler", got=f"no {name}", remedy=remedy)
    macros = subprocess.run(
        [found, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, check=False
    ).stdout.split("\n")
    values = {line.split(" ")[1]: line.split(" ", 2)[2] for line in macros if line.count(" ") > 1}
    if "__clang__" in values or int(values.get("__GNUC__", 0)) < 12:
        got = f"{found}, which is another"
        raise BackendRefusal("compiler", expected="GCC 12 or newer", got=got, remedy=remedy)
    return found


def _compile(compiler: str, file: Path, *, quiet: bool) -> None:
    began = time.monotonic()
    if not quiet:
        _say(f"Building posenc's CPU kernels into {file.parent} (half a minute, once) …")
    with tempfile.TemporaryDirectory(dir=file.parent) as work:
        flags, source = [*FLAGS, *_extra_flags()], str(SOURCES / "kernels.cpp")
        commands = [
            [compiler, *flags, *more, "-c", source, "-o", str(Path(work) / name)]
            for name, more in OBJECTS.items()
        ]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_run, commands))
        built = Path(work) / "kernels.so"
        objects = [str(Path(work) / name) for name in OBJECTS]
        # PyTorch's own OpenMP, so that there is one pool of threads.
        openmp = sorted(Path(torch.__file__).parent.glob("lib/libgomp*"))
        link = [str(openmp[0])] if openmp else ["-fopenmp"]
        _run([compiler, "-shared", *_extra_flags(), *objects, *link, "-o", str(built)])
        built.replace(file)
    if not quiet:
        _say(f"Built them in {time.monotonic() - began:.0f} s.")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendRefusal(
            "kernels",
            expected=f"{command[0]} to compile them",
            got=done.stderr.strip()[-2000:] or f"exit status {done.returncode}",
            remedy="Without them, attention on a CPU runs by the backend 'tiled'.",
        )
