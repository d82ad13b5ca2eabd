"""Change single lines of posenc, and list the changes that no test notices.

    python scripts/mutants.py --count 200 --seed 3         operators of Python, at random
    python scripts/mutants.py --only layout --count 20     of files with this in their path
    python scripts/mutants.py --planted FILE.toml          those of a list, as of the C++ kernels

Random changes are Cosmic Ray's. Each is made in a copy of the checkout, in which the tests nearest
to the file run first and the rest of its folder after them, until one fails. What survives is
printed as a diff: some of it changes nothing that a user can see; the rest wants a test.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
SOURCE, TESTS = Path("src/posenc"), Path("tests")
SECONDS = 900
"""A change that the tests take longer with counts as noticed."""


@dataclass(frozen=True)
class Mutant:
    """A file with one change.

    Args:
        path: of the file, from the root of the checkout.
        before, after: its text.
        tests: arguments of pytest that choose the tests; none are the nearest ones.
    """

    path: Path
    before: str
    after: str
    tests: tuple[str, ...] = ()

    @property
    def diff(self) -> str:
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), str(self.path), "", lineterm="", n=1
        )
        return "\n".join([str(self.path), *list(lines)[2:]])


def planted(file: Path) -> Iterator[Mutant]:
    """The changes of a list: ``[[mutant]]`` with path, old, new and, where wanted, tests."""
    for entry in tomllib.loads(file.read_text())["mutant"]:
        before = (ROOT / entry["path"]).read_text()
        if before.count(entry["old"]) != 1:
            sys.exit(
                f"{entry['path']}: {entry['old']!r} is there {before.count(entry['old'])} times"
            )
        after = before.replace(entry["old"], entry["new"])
        yield Mutant(Path(entry["path"]), before, after, tuple(entry.get("tests", ())))


def drawn(only: str, chance: random.Random) -> Iterator[Mutant]:
    """Random changes of random files, without end; long files come more often."""
    files = [path for path in sorted((ROOT / SOURCE).rglob("*.py")) if only in str(path)]
    sizes = [path.stat().st_size for path in files]
    while True:
        (path,) = chance.choices(files, sizes)
        before = path.read_text()
        if after := _changed(before, chance):
            yield Mutant(path.relative_to(ROOT), before, after)


def _changed(source: str, chance: random.Random) -> str | None:
    """The source with a random operator of Cosmic Ray applied where code runs, if any can be."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    operators = [get_operator(name) for name in operator_names()]
    plain = [operator() for operator in operators if not operator.arguments()]
    nodes = list(ast_nodes(get_ast(source)))
    inert = _inert(source)
    places = []
    for operator in plain:
        positions = [place for node in nodes for place in operator.mutation_positions(node)]
        places += [
            (operator, occurrence)
            for occurrence, (start, _) in enumerate(positions)
            if not any(begin <= start < end for begin, end in inert)
        ]
    if not places:
        return None
    changed: str | None = mutate_code(source, *chance.choice(places))
    return changed


def _inert(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Spans of annotations, which nothing evaluates, and of messages: (line, column) from, to."""
    spans = []
    for node in ast.walk(ast.parse(source)):
        inert = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Raise):
            inert.append(node.exc)
        spans += [
            ((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset))
            for part in inert
            if isinstance(part, ast.expr)
        ]
    return spans


def nearest_tests(path: Path, root: Path) -> list[str]:
    """Arguments of pytest: tests named after the file or its folders, then the folder's others."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    folder = TESTS
    for part in parts[:-1]:
        if not (root / folder / part).is_dir():
            break
        folder /= part
    names = [part.strip("_") for part in reversed(parts) if part != "__init__"]
    files = sorted((root / folder).glob("test_*.py" if folder == TESTS else "**/test_*.py"))

    def distance(file: Path) -> int:
        return next((i for i, name in enumerate(names) if name in file.stem), len(names))

    chosen = [str(file.relative_to(root)) for file in sorted(files, key=distance)]
    if parts[0] in ("attention", "layout", "encoding", "grid"):
        chosen.append(str(TESTS / "testing/test_attention_fuzz.py"))
    laws = f"{TESTS}/testing/test_laws.py"
    if parts[0] == "encodings":
        return [*chosen, laws, "-k", f"not test_law or [{parts[-1]}-"]
    return [*chosen, laws, "-k", "not test_law or [rope- or [t5- or [deberta- or [floater-"]


def survives(mutant: Mutant, root: Path) -> bool:
    """Whether the tests pass with the change, in a checkout at ``root``."""
    environment = os.environ | {
        "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    tests = mutant.tests or nearest_tests(mutant.path, root)
    commands = [["pytest", "-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider", *tests]]
    if mutant.path.suffix != ".py":
        environment["XDG_CACHE_HOME"] = str(root / ".cache")
        commands.insert(0, ["posenc.attention.backends.native", "--require"])
    file = root / mutant.path
    file.write_text(mutant.after)
    try:
        for command in commands:
            subprocess.run(
                [sys.executable, "-m", *command],
                cwd=root,
                env=environment,
                capture_output=True,
                timeout=SECONDS,
                check=True,
            )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    finally:
        file.write_text(mutant.before)
    return True


def checkout(folder: Path) -> Path:
    """A copy of the tracked files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def survivors(mutants: Sequence[Mutant], workers: int) -> list[Mutant]:
    """Those that no test notices, printed as they are found."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for worker in range(workers):
            free.put(checkout(Path(folder) / f"worker-{worker}"))

        def alive(mutant: Mutant) -> bool:
            root = free.get()
            try:
                return survives(mutant, root)
            finally:
                free.put(root)

        found = []
        for mutant, lives in zip(mutants, pool.map(alive, mutants), strict=True):
            print(
                "survived" if lives else "noticed ", mutant.diff, sep="  ", end="\n\n", flush=True
            )
            found += [mutant] * lives
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description="List changes of posenc that no test notices.")
    parser.add_argument("--count", type=int, default=60, help="random changes to try")
    parser.add_argument("--seed", type=int, default=0, help="of the random changes")
    parser.add_argument("--only", default="", help="only files with this in their path")
    parser.add_argument("--planted", type=Path, help="a list of changes instead of random ones")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    if options.planted:
        mutants = list(planted(options.planted))
    else:
        source = drawn(options.only, random.Random(options.seed))
        mutants = [next(source) for _ in range(options.count)]
    alive = survivors(mutants, options.workers)
    print(f"{len(mutants)} changes, {len(alive)} survived")


if __name__ == "__main__":
    main()
