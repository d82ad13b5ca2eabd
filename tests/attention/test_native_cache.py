"""The folder of compiled kernels: what is damaged or another user's is not loaded, and told."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch

import posenc
from posenc import Grid, Layout
from posenc.attention.backends.native import Native, variants
from posenc.attention.backends.native import __main__ as command
from posenc.attention.backends.native import build as building
from posenc.attention.backends.native.library import KERNELS
from posenc.errors import BackendRefusal
from tests.support.processes import forking

NAMES = [f"posenc_{name}_{kind}" for name in KERNELS for kind in ("float32", "float64")]
FUNCTIONS = [f"long {name}(void *x) {{ return 0; }}" for name in NAMES]
HASH = f'const char *posenc_sources(void) {{ return "{variants.sources_hash()}"; }}'
MARK = (
    '#include <stdio.h>\n__attribute__((constructor)) void m(void) {{ fclose(fopen("{}", "w")); }}'
)
OTHER_USER = 65534

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")


def _compiled(file: Path, *lines: str) -> Path:
    file.with_suffix(".c").write_text("\n".join(lines))
    subprocess.run(["gcc", "-shared", "-fPIC", file.with_suffix(".c"), "-o", file], check=True)
    return file


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the kernels' symbols, which do nothing."""
    return _compiled(tmp_path_factory.mktemp("small") / "small.so", HASH, *FUNCTIONS)


def _compiler(folder: Path, built: Path) -> Path:
    """A compiler that counts its calls and makes copies of ``built``."""
    compiler = folder / "g++"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-dM*) echo "#define __GNUC__ 12"; exit;; esac\n'
        f"echo call >> {folder}/calls\n"
        'while [ "$1" != -o ]; do shift; done\n'
        f'sleep 0.05; cp {built} "$2"\n'
    )
    compiler.chmod(0o755)
    return compiler


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Path) -> Iterator[Path]:
    """A cache folder of its own and a compiler that makes small kernels at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(_compiler(tmp_path, small)))
    monkeypatch.setenv("POSENC_KERNELS", "build")
    building.path.cache_clear()
    building.choose.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    building.choose.cache_clear()
    building.path.cache_clear()
    building.path()  # that of other tests, whose cache folders may be others yet


@pytest.fixture
def kernels(home: Path) -> Path:
    """Kernels that were built."""
    return building.build(quiet=True)


def _belong_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, OTHER_USER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)


def _explained() -> str:
    """Why not native, for an attention that another backend computes."""
    q = torch.randn(1, 2, 20, 8)
    call = q, q, q, Grid.of(Layout.sequence(20)), posenc.create("t5", heads=2)
    assert posenc.attend(*call).shape == q.shape
    (line,) = [line for line in str(posenc.explain(*call)).splitlines() if "Not native" in line]
    return line


def _linked(path: Path) -> None:
    moved = path.rename(path.with_name(f"{path.name}-elsewhere"))
    path.symlink_to(moved)


def _rewritten(file: Path, content: bytes) -> None:
    """As another file: this process may have mapped the old one."""
    file.unlink()
    file.write_bytes(content)


def _truncated(file: Path) -> None:
    content = file.read_bytes()
    _rewritten(file, content[: len(content) // 2])


def _altered(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    _rewritten(file, content)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _sum(file: Path) -> Path:
    return file.with_suffix(".sha256")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_truncated, "is damaged"),
    "altered": (_altered, "is damaged"),
    "empty": (lambda file: _rewritten(file, b""), "is damaged"),
    "of another user": (lambda file: os.chown(file, OTHER_USER, -1), "another user"),
    "checksum of another user": (lambda file: os.chown(_sum(file), OTHER_USER, -1), "another user"),
    "writable by all": (lambda file: file.chmod(0o606), "other users may write"),
    "writable by the group": (lambda file: file.chmod(0o660), "other users may write"),
    "in a folder open to all": (lambda file: file.parent.chmod(0o777), "other users may write"),
    "below one open to all": (lambda f: f.parents[1].chmod(0o777), "other users may write"),
    "a link": (_linked, "is a link"),
    "a pipe": (_pipe, "not a regular file"),
    "without a checksum": (lambda file: _sum(file).unlink(), "No such file"),
    "checksum a link": (lambda file: _linked(_sum(file)), "is a link"),
    "checksum of another": (lambda file: _sum(file).write_text("0" * 64), "is damaged"),
    "checksum no text": (lambda file: _sum(file).write_bytes(b"\xff" * 64), "is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_or_not_ours_is_told_and_built_anew(
    kernels: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "another user" in kind and os.geteuid():
        pytest.skip("only root gives files away")
    assert building.missing() is None
    monkeypatch.setattr(building, "_LOADED", {})
    damage, words = DAMAGE[kind]
    damage(kernels)
    reason = building.missing()
    assert reason is not None
    assert words in reason
    assert building.COMMAND in reason
    assert words in _explained()
    building.build(quiet=True)
    assert building.missing() is None
    assert not kernels.is_symlink()


def test_kernels_in_a_cache_that_all_may_write_are_not_loaded(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, any user could put another folder in the place of the one that was checked."""
    cache = kernels.parents[2]
    assert building.missing() is None
    monkeypatch.setattr(building, "_LOADED", {})
    cache.chmod(0o777)
    reason = building.missing()
    assert reason is not None
    assert f"other users may write {cache};" in reason
    with pytest.raises(OSError, match="other users may write"):
        building.build(quiet=True)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o777  # it is not posenc's to close
    cache.chmod(0o1777)  # as /tmp, where each removes and renames what is their own
    assert building.missing() is None


@pytest.mark.parametrize("level", [0, 1])
def test_folders_of_others_and_links_are_not_entered(
    kernels: Path, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kernels.parents[level]
    for spoil, words in (
        (_linked, "is a link"),
        (lambda path: _belong_to_another(path, monkeypatch), "another user"),
    ):
        monkeypatch.setattr(building, "_LOADED", {})
        spoil(folder)
        reason = building.missing()
        assert reason is not None
        assert words in reason
        assert "XDG_CACHE_HOME" in reason
        with pytest.raises(OSError, match=words):
            building.build(quiet=True)
        if folder.is_symlink():
            target = folder.readlink()
            folder.unlink()
            target.rename(folder)


def test_nothing_of_a_file_runs_before_it_is_checked(kernels: Path, tmp_path: Path) -> None:
    """Its constructor would; and a system that maps half a file kills the process."""
    mark = tmp_path / "ran"
    other = _compiled(tmp_path / "other.so", MARK.format(mark), HASH, *FUNCTIONS)
    content = other.read_bytes()
    script = (
        "from posenc.attention.backends.native.build import missing, path\n"
        "import sys\n"
        "whole = bytes.fromhex(sys.stdin.read())\n"
        "for content in (whole[: len(whole) // 3], whole):\n"
        "    path().write_bytes(content)\n"
        "    print(missing())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=content.hex(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is damaged") == 2
    assert not mark.exists()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([HASH, *FUNCTIONS[1:]], "posenc_forward_float32"),
        (FUNCTIONS, "posenc_sources"),
        (
            ['const char *posenc_sources(void) { return "other"; }', *FUNCTIONS],
            "built of other sources",
        ),
        (["void nothing_has_this(void); void f(void) { nothing_has_this(); }"], "nothing_has_this"),
    ],
)
def test_whole_libraries_that_do_not_fit_are_told(
    home: Path, lines: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = _compiled(home / "other.so", *lines)
    with monkeypatch.context() as context:
        context.setenv("CXX", str(_compiler(home, other)))
        context.setenv("LD_BIND_NOW", "1")
        file = building.build(quiet=True)
    reason = building.missing()
    assert reason is not None
    assert words in reason
    assert "/proc/" not in reason
    _compiler(home, home / "none.so")
    with pytest.raises(BackendRefusal, match="to compile them"):
        building.build(quiet=True)
    assert building.missing() == reason
    assert [each.name for each in file.parent.iterdir() if each.name.startswith(".")] == []


def test_files_that_are_no_library_are_told(home: Path) -> None:
    text = home / "text.so"
    text.write_text("not a library")
    _compiler(home, text)
    file = building.build(quiet=True)
    reason = Native().unavailable(torch.device("cpu"))
    assert reason is not None
    assert "cannot be loaded" in reason.reason
    assert str(file) in reason.reason


def test_damage_is_looked_for_once(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the file is another: attention that falls back does not read it in each call."""
    monkeypatch.setattr(building, "_LOADED", {})
    _altered(kernels)
    first = building.missing()
    with monkeypatch.context() as context:
        context.setattr(building, "opened_folder", None)
        assert building.missing() == first


def test_a_relative_cache_folder_is_ignored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home / "own"))
    for value in ("cache", "./cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        building.path.cache_clear()
        assert building.path().is_relative_to(home / "own" / ".cache" / "posenc")


@pytest.mark.parametrize("home_folder", [None, "relative", os.devnull])
def test_without_a_home_folder_it_is_told(
    home: Path,
    home_folder: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import pwd

    def unknown(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    if home_folder is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home_folder)
    words = "Not a directory" if home_folder == os.devnull else "no home folder"
    assert words in _explained()
    assert command.main([]) == 0
    assert command.main(["--require"]) == 1
    assert "cannot be used" in capsys.readouterr().out


def test_locks_are_no_links(kernels: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("kept")
    lock = kernels.with_name("lock")
    lock.unlink()
    for target in (text, tmp_path / "new"):
        lock.symlink_to(target)
        kernels.unlink(missing_ok=True)
        with pytest.raises(OSError, match="lock is a link"):
            building.build(quiet=True)
        lock.unlink()
    assert text.read_text() == "kept"
    assert not (tmp_path / "new").exists()
    os.link(text, lock)
    building.build(quiet=True)
    assert text.read_text() == "kept"


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_folders_and_files_are_closed_whatever_the_umask(home: Path, umask: int) -> None:
    (home / "cache" / "posenc").mkdir(parents=True)
    (home / "cache" / "posenc").chmod(0o777)
    before = os.umask(umask)
    try:
        file = building.build(quiet=True)
    finally:
        os.umask(before)
    for folder in (file.parent, file.parents[1]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for made in file.parent.iterdir():
        assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert building.missing() is None


def test_without_a_compiler_it_says_what_to_install_and_makes_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(home / "no-compiler"))
    with pytest.raises(BackendRefusal, match="Install one"):
        building.build(quiet=True)
    assert not (home / "cache").exists()


def test_without_kernels_it_says_how_to_build_them(home: Path) -> None:
    reason = building.missing()
    assert reason is not None
    assert building.COMMAND in reason
    assert "not built" in _explained()


def _build(compiler: str, cache: str, queue: SimpleQueue[Path]) -> None:
    os.environ.update(CXX=compiler, XDG_CACHE_HOME=cache)
    os.environ["POSENC_KERNELS"] = "build"
    building.path.cache_clear()
    building.choose.cache_clear()
    queue.put(building.build(quiet=True))


def test_processes_at_once_build_once(home: Path) -> None:
    context = forking()
    queue = context.SimpleQueue()
    environment = os.environ["CXX"], os.environ["XDG_CACHE_HOME"]
    both = [context.Process(target=_build, args=(*environment, queue)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert len({queue.get() for _ in both}) == 1
    assert len((home / "calls").read_text().splitlines()) == 3, "two objects, one linking"


@pytest.mark.parametrize("macros", ["__GNUC__ 10", "__clang_major__ 15\n#define __clang__ 1"])
def test_old_compilers_are_refused(home: Path, macros: str) -> None:
    compiler = home / "g++"
    compiler.write_text(f"#!/bin/sh\necho '#define {macros}'\n")
    with pytest.raises(BackendRefusal, match=r"expected GCC 11, clang 16 or newer, got .* 1[05] "):
        building.build(quiet=True)


@pytest.mark.parametrize("flags", building.OBJECTS.values(), ids=building.OBJECTS)
@pytest.mark.parametrize(
    "name", ["g++-11 -march=native", "aarch64-linux-gnu-g++", "clang++", "clang++-19"]
)
def test_other_compilers_take_them(name: str, flags: tuple[str, ...]) -> None:
    name, *processor = name.split()
    compiler = shutil.which(name)
    if compiler is None:
        pytest.skip(f"there is no {name}")
    version = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True)
    if "clang" in name and int(version.stdout.split(".")[0]) < 16:
        pytest.skip("it is older than clang 16")
    source = str(building.SOURCES / "kernels.cpp")
    flags = (*building.compile_flags(), *flags, *processor)
    command = [compiler, *flags, "-Werror", "-fsyntax-only", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
