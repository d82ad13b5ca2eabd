"""Building the kernels, once for each machine: ``python -m posenc.attention.backends.native``.

The shared object lies in the user's cache folder under a name that follows from the sources, the
processor, PyTorch's version and the compiler's flags, with its SHA-256 beside it. Loading runs code
of it, so only a file that this user wrote, and wrote whole, is loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

from posenc.attention.backends.native.library import Library
from posenc.attention.problem.terms import AXES
from posenc.attention.user_cache import (
    cache_folder,
    open_file,
    opened_folder,
    read_file,
    write_file,
)
from posenc.errors import BackendRefusal

COMMAND = "python -m posenc.attention.backends.native"

SOURCES = Path(__file__).parent / "csrc"

FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-Wno-psabi"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    f"-DPOSENC_TERMS={','.join(AXES)}",  # the operands that the record of a problem declares
)

OBJECTS = {"float32.o": (), "float64.o": ("-DPOSENC_DOUBLE",)}


@lru_cache
def path() -> Path:
    """The shared object of these sources on this machine, built or not.

    Raises:
        OSError: where there is no folder for it.
    """
    folder = cache_folder("kernels")
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
    return folder / f"{key.hexdigest()[:32]}.so"


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
        return f"its kernels cannot be loaded ({error}); to build them anew: {COMMAND}"
    return None


@lru_cache
def slow_mkl() -> bool:
    """True where PyTorch's products are MKL's on a processor of AMD.

    There (measured: EPYC with AVX-512) they take about twice the time of the kernels', which are
    then faster than PyTorch's fused attention without any terms too.
    """
    return bool(torch.backends.mkl.is_available()) and "AMD" in _cpu()  # type: ignore[no-untyped-call]


# As torch.compiler.assume_constant_result does, which would load all of the compiler.
for _function in (missing, slow_mkl):
    _function.__dict__["_dynamo_marked_constant"] = True


_LOADED: dict[Path, Library] = {}


def library() -> Library:
    """The kernels, loaded on first use.

    Raises:
        FileNotFoundError: where they have not been built.
        OSError: where they cannot be loaded.
    """
    file = path()
    loaded = _LOADED.get(file)
    if loaded is None:
        state = _state(file)
        if state is None:
            raise FileNotFoundError(file)
        others = (_checksum(file), *file.parents[:2])
        outcome = _load(file, (state, *map(_state, others)))
        if isinstance(outcome, str):
            raise OSError(outcome)
        loaded = _LOADED[file] = outcome
    return loaded


def _checksum(file: Path) -> Path:
    """The file beside a shared object that holds its SHA-256."""
    return file.with_suffix(".sha256")


def _state(file: Path) -> tuple[int, int] | None:
    """Inode and time of the last change of a file, its owner or mode; None for no file."""
    try:
        status = file.lstat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_ctime_ns


@lru_cache(maxsize=1)
def _load(file: Path, states: tuple[object, ...]) -> Library | str:
    """The library in a file, or why it cannot be loaded; tried once in each of its ``states``."""
    try:
        with opened_folder(file.parent) as folder:
            expected = read_file(_checksum(file), folder)
            handle = open_file(file, folder)
        with os.fdopen(handle, "rb", closefd=False) as opened:
            digest = hashlib.sha256(opened.read()).hexdigest()
        if digest.encode() != expected:
            os.close(handle)
            return f"{file} is damaged: its SHA-256 is not the one in {_checksum(file).name}"
        # What was checked, whatever its path leads to by now. The descriptor stays open: glibc
        # knows libraries by their paths, so its number must not come to mean another file.
        checked = Path(f"/proc/self/fd/{handle}")
        return Library(checked if checked.exists() else file)
    except OSError as error:
        return re.sub(r"/proc/self/fd/\d+", str(file), str(error))


def build(*, quiet: bool = False) -> Path:
    """Build the kernels unless that has been done; two processes at once build them once.

    Raises:
        BackendRefusal: where there is no compiler, or it fails.
    """
    file = path()
    if missing() is None:
        return file
    compiler = _compiler()
    with opened_folder(file.parent, create=True) as folder, _locked(file.parent, folder):
        if missing() is not None:
            _compile(compiler, file, folder, quiet=quiet)
    return file


@contextmanager
def _locked(path: Path, folder: int) -> Iterator[None]:
    """Held by one process at a time, and given back by the system if it dies."""
    import fcntl

    handle = open_file(path / "lock", folder, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


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


def _compile(compiler: str, file: Path, folder: int, *, quiet: bool) -> None:
    began = time.monotonic()
    if not quiet:
        _say(f"Building posenc's CPU kernels into {file.parent} (half a minute, once) …")
    with tempfile.TemporaryDirectory() as work:
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
        content = built.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    write_file(_checksum(file), folder, digest.encode())
    write_file(file, folder, content)
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
            remedy="Without them, attention on a CPU runs by the backend 'blockwise'.",
        )
