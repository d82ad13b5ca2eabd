"""The kernels: a prebuilt variant, or built by ``python -m posenc.attention.backends.native``.

What is built lies in the user's cache folder under a name that follows from the sources, the
processor and the compiler's flags, with its SHA-256 beside it. Loading runs code of it, so only a
file that this user wrote, and wrote whole, is loaded.
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
from posenc.attention.backends.native.variants import (
    SOURCES,
    TERMS,
    choose,
    file_of,
    processor,
    sources_hash,
)
from posenc.attention.user_cache import (
    cache_folder,
    open_file,
    opened_folder,
    read_file,
    write_file,
)
from posenc.errors import BackendRefusal

COMMAND = "python -m posenc.attention.backends.native"

FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wno-psabi", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    f"-DPOSENC_TERMS={TERMS}",
)

LINK = ["-shared", "-pthread"]
if sys.platform == "linux":  # templates of the standard library would be exported, too
    LINK.append(f"-Wl,--version-script={SOURCES / 'exports.map'}")

OBJECTS = {"float32.o": (), "float64.o": ("-DPOSENC_DOUBLE",)}


def compile_flags() -> list[str]:
    """Flags of every compiler and processor."""
    return [*FLAGS, f'-DPOSENC_SOURCES="{sources_hash()}"']


@lru_cache
def path() -> Path:
    """Path of the shared object built from these sources for this machine; it may not exist.

    Raises:
        OSError: where there is no folder for it.
    """
    folder = cache_folder("kernels")
    key = hashlib.sha256()
    for word in (*compile_flags(), *_extra_flags(), sys.platform, platform.machine(), *processor()):
        key.update(word.encode() + b"\0")
    return folder / f"{key.hexdigest()[:32]}.so"


def _extra_flags() -> list[str]:
    """Flags for sanitizers and the like, from ``POSENC_KERNEL_FLAGS``."""
    return os.environ.get("POSENC_KERNEL_FLAGS", "").split()


def missing() -> str | None:
    """Reason against using the kernels, as the end of "because …"; None if they can be used."""
    choice = choose()
    if choice.name == "none":
        return choice.reason
    try:
        library()
    except FileNotFoundError:
        return f"its kernels are not built ({choice.reason}); to build them: {COMMAND}"
    except OSError as error:
        anew = COMMAND if choice.name == "build" else f"POSENC_KERNELS=build {COMMAND}"
        return f"its kernels cannot be loaded ({error}); to build them anew: {anew}"
    return None


def description() -> str:
    """The kernels that are used and the reason for these, or why none are."""
    reason = missing()
    if reason is not None:
        return f"none, because {reason}"
    choice = choose()
    name = "built on this machine" if choice.name == "build" else f"{choice.name}, prebuilt"
    return f"{name} ({choice.reason})" if choice.reason else name


@lru_cache
def slow_mkl() -> bool:
    """True where PyTorch's products are MKL's on a processor of AMD with AVX-512.

    MKL leaves those vectors unused there, and takes about twice the time of the kernels, which are
    then faster than PyTorch's fused attention without any terms too. Where AVX2 is the widest
    (measured: EPYC of family 25), MKL is not slow: the kernels took 1.2 times its time.
    """
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and bool(torch.backends.mkl.is_available()) and "AMD" in "".join(processor())  # type: ignore[no-untyped-call]


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
    name = choose().name
    file = path() if name == "build" else file_of(name)
    loaded = _LOADED.get(file)
    if loaded is None:
        state = _state(file)
        if state is None:
            raise FileNotFoundError(file)
        others = (_checksum(file), *file.parents[:3]) if name == "build" else ()
        outcome = (_load_built if others else _load)(file, (state, *map(_state, others)))
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
    """A library that came with the package, or why it cannot be loaded; tried once a state."""
    try:
        return Library(file)
    except OSError as error:
        return str(error)


@lru_cache(maxsize=1)
def _load_built(file: Path, states: tuple[object, ...]) -> Library | str:
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
    file = path() if choose().name == "build" else file_of(choose().name)
    if choose().name != "build" or missing() is None:
        return file
    compiler = _compiler()
    with opened_folder(file.parent, create=True) as folder, _locked(file.parent, folder):
        if missing() is not None:
            _compile(compiler, file, folder, quiet=quiet)
    return file


@contextmanager
def _locked(path: Path, folder: int) -> Iterator[None]:
    """File lock held by one process at a time; the system releases it if the process dies."""
    import fcntl

    handle = open_file(path / "lock", folder, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _compiler() -> str:
    """``$CXX``, or ``g++``, or ``clang++``: GCC 11, clang 16 or newer."""
    remedy = "Install one (Debian, Ubuntu: apt-get install g++), or set CXX to it."
    expected = "GCC 11, clang 16 or newer"
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if sys.platform == "win32" or compiler is None:
        got = f"no {' or '.join(names)}"
        raise BackendRefusal("compiler", expected=expected, got=got, remedy=remedy)
    macros = subprocess.run(
        [compiler, "-dM", "-E", "-x", "c++", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")
    values = {line.split(" ")[1]: line.split(" ", 2)[2] for line in macros if line.count(" ") > 1}
    name, oldest = ("clang_major", 16) if "__clang__" in values else ("GNUC", 11)
    version = int(values.get(f"__{name}__", 0))
    if version < oldest:
        got = f"{compiler}, which is version {version} of {name}"
        raise BackendRefusal("compiler", expected=expected, got=got, remedy=remedy)
    return compiler


def _compile(compiler: str, file: Path, folder: int, *, quiet: bool) -> None:
    began = time.monotonic()
    if not quiet:
        _say(f"Building posenc's CPU kernels into {file.parent} (half a minute, once) …")
    with tempfile.TemporaryDirectory() as work:
        built = Path(work) / "kernels.so"
        extra = _extra_flags()  # of linking, too; after the processor, which they may change
        compile_kernels([compiler, *extra], ["-march=native", *extra], built)
        content = built.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    write_file(_checksum(file), folder, digest.encode())
    write_file(file, folder, content)
    if not quiet:
        _say(f"Built them in {time.monotonic() - began:.0f} s.")


def compile_kernels(compiler: list[str], flags: list[str], to: Path) -> None:
    """Compile the sources into a shared object at ``to``, with objects beside it.

    Args:
        compiler: its command, with what it needs for compiling and for linking.
        flags: for compiling alone.
        to: the shared object.

    Raises:
        BackendRefusal: where the compiler fails.
    """
    source = str(SOURCES / "kernels.cpp")
    objects = [str(to.with_name(f"{to.stem}-{name}")) for name in OBJECTS]
    commands = [
        [*compiler, *compile_flags(), *flags, *more, "-c", source, "-o", target]
        for target, more in zip(objects, OBJECTS.values(), strict=True)
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(_run, commands))
    _run([*compiler, *LINK, *objects, "-o", str(to)])


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
