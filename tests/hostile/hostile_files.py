"""Damage files and folders that posenc reads, and see that it says so: quickly, and in its words.

Some hundreds of variants run in the tests. More: ``make fuzz-files``, or ``python -m
tests.hostile.hostile_files 7000``.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from posenc.errors import PosencError

SECONDS, MEGABYTES, HANGS = 1.0, 300, 30
"""Of the processor for a variant; of memory for all; of the clock until a variant is given up."""

WORDS = ("0", "-1", "1.5", "1e308", "1e999", "NaN", "-Infinity", "true", "null", '""', "[]", "{}")
VALUES = (
    *WORDS,
    *map(str, (10**9, 20_000, 2**63, 10**30, 10**400)),
    *('"x\\u001b[31m[/]"', '"\\ud800"', '"\\u0000"', '"../../etc"', f'"{"y" * 5000}"'),
    *("[" * 200_000, "[" * 5000 + "]" * 5000, f"[{', '.join(['1'] * 3000)}]"),
    *('[1, "a", null]', '{"a": {"b": []}}'),
)
"""Values that replace one of a JSON file."""


@dataclass(frozen=True)
class Target:
    """Something that is read.

    Args:
        name: of it.
        folder: that holds whole files.
        read: reads what is in a folder like it.
    """

    name: str
    folder: Path
    read: Callable[[Path], object]


@dataclass(frozen=True)
class Failure:
    """A variant that was not refused as it should be."""

    target: str
    variant: str
    what: str


def variants(target: Target, seed: int) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Endless damages: a phrase, and what does it to a copy of the target's folder."""
    names = sorted(path.name for path in target.folder.iterdir())
    draw = random.Random(f"{target.name}/{seed}")
    while True:
        name = draw.choice(names)
        structured = JSON if name.endswith(".json") else TENSORS if "safetensors" in name else []
        damage = draw.choice([*structured, *structured, *structured, *ANY])
        yield f"{name}: {damage.__name__}", lambda f, d=damage, n=name: d(f / n, draw)


def _value_replaced(path: Path, draw: random.Random) -> None:
    """One value, somewhere, becomes another one."""
    value = json.loads(path.read_text())
    places = list(_places(value))
    mark = "here"
    if not places:
        path.write_text(draw.choice(VALUES))
        return
    holder, key = draw.choice(places)
    holder[key] = mark
    path.write_text(json.dumps(value).replace(json.dumps(mark), draw.choice(VALUES), 1))


def _key_dropped(path: Path, draw: random.Random) -> None:
    value = json.loads(path.read_text())
    holders = [(holder, key) for holder, key in _places(value) if isinstance(holder, dict)]
    if holders:
        holder, key = draw.choice(holders)
        del holder[key]
    path.write_text(json.dumps(value))


def _key_added(path: Path, draw: random.Random) -> None:
    value = json.loads(path.read_text())
    if isinstance(value, dict):
        value["\x1b[31mnew"] = [1, {"a": None}]
    path.write_text(json.dumps(value))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a JSON value that holds one."""
    keys = range(len(value)) if isinstance(value, list) else value
    for key in list(keys) if isinstance(value, dict | list) else ():
        yield value, key
        yield from _places(value[key])


def _header_changed(path: Path, draw: random.Random) -> None:
    """A value of the header of tensors becomes another one, or its length does."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    if draw.random() < 0.2:
        path.write_bytes(struct.pack("<Q", draw.choice((0, 1, 2**40, 2**63, 99))) + content[8:])
        return
    header = json.loads(content[8 : 8 + length])
    holder, key = draw.choice(list(_places(header)))
    holder[key] = "here"
    text = json.dumps(header).replace('"here"', draw.choice(VALUES), 1).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def _flipped(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes()) or bytearray(1)
    for _ in range(draw.choice((1, 5))):
        content[draw.randrange(min(len(content), draw.choice((200, 10**9))))] ^= draw.randrange(256)
    path.write_bytes(content)


def _cut(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content) + 1)])


def _garbage(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(draw.choice((0, 1, 7, 100, 5000))))


def _sparse(path: Path, draw: random.Random) -> None:
    """Nothing, and much of it."""
    with path.open("ab") as file:
        file.truncate(1 << 40)


def _missing(path: Path, draw: random.Random) -> None:
    path.unlink()


def _pipe(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(draw.choice(("/dev/zero", "/dev/random", "/dev/null", "/dev/tty")))


def _folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


JSON = [_value_replaced, _value_replaced, _value_replaced, _key_dropped, _key_added]
TENSORS = [_header_changed]
ANY = [_flipped, _cut, _garbage, _sparse, _missing, _pipe, _device, _folder, _loop]


def run(targets: list[Target], *, count: int, seed: int, work: Path) -> list[Failure]:
    """Damage the targets in turn and read them: all that went wrong."""
    for target in targets:
        target.read(target.folder)  # whole, and all that is imported late is there
    failures: list[Failure] = []
    sources = [variants(target, seed) for target in targets]
    before = _megabytes()
    for number in range(count):
        target = targets[number % len(targets)]
        name, damage = next(sources[number % len(targets)])
        copy = work / "copy"
        shutil.copytree(target.folder, copy)
        damage(copy)
        began = time.process_time()
        what = ""
        try:
            with _at_most(HANGS):
                target.read(copy)
        except PosencError as error:
            what = "" if len(str(error)) < 5000 else "a message without end"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            what = f"{type(error).__name__}: {str(error)[:200]}"
        seconds = time.process_time() - began
        if not what and seconds > SECONDS:
            what = f"{seconds:.1f} s"
        if not what and _megabytes() - before > MEGABYTES:
            what, before = f"{_megabytes() - before:.0f} MB", _megabytes()
        if what:
            failures.append(Failure(target.name, name, what))
        shutil.rmtree(copy)
    return failures


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """End what takes longer, a wait for a pipe, too."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end after {seconds} s")

    earlier = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def _megabytes() -> float:
    """The most memory this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(count: int, seed: int) -> int:
    """Run many variants and print what goes wrong."""
    from tests.hostile.hostile_targets import make_targets

    with tempfile.TemporaryDirectory() as folder:
        targets = make_targets(Path(folder))
        failures = run(targets, count=count, seed=seed, work=Path(folder))
    for (target, what), times in Counter((f.target, f.what) for f in failures).most_common():
        names = sorted({f.variant for f in failures if (f.target, f.what) == (target, what)})
        sys.stdout.write(f"{times:4} × {target}: {what}   ({', '.join(names[:3])})\n")
    sys.stdout.write(f"{count} variants of {len(targets)} targets, {len(failures)} failures\n")
    return 1 if failures else 0


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(numbers + [2000, 0][len(numbers) :])))
