"""Change single lines of posenc, and list the changes that no test notices.

    python scripts/mutants.py --count 200 --seed 3         operators of Python, at random
    python scripts/mutants.py --only layout --count 20     of files with this in their path
    python scripts/mutants.py --planted FILE.toml          those of a list, as of the C++ kernels

Random changes are Cosmic Ray's. The suite runs once to record the lines that each test runs: three
cases of each test or a twelfth, and none of its long tests. Each change is made in a copy of the
checkout, in which tests that run the changed lines run until one fails, those named after the file
first. What survives is printed as a diff: some of it changes nothing that a user can see; the rest
wants a test.
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
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any

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
        tests: arguments of pytest that choose the tests; none are those that run the change.
    """

    path: Path
    before: str
    after: str
    tests: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Of the file and its folders, innermost first."""
        parts = self.path.with_suffix("").parts[len(SOURCE.parts) :]
        return [part.strip("_") for part in reversed(parts) if part != "__init__"]

    def distance(self, test: str) -> int:
        """How many names do not occur in a test's path before one that does."""
        path = test.partition("::")[0].replace("/", "_")
        return next((i for i, name in enumerate(self.names) if f"_{name}" in path), len(self.names))

    @property
    def diff(self) -> str:
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), str(self.path), "", lineterm="", n=1
        )
        return "\n".join([str(self.path), *list(lines)[2:]])


def planted(file: Path) -> Iterator[Mutant]:
    """The changes of a list: ``[[mutant]]`` with path, old and new, and tests of all of them."""
    listed = tomllib.loads(file.read_text())
    for entry in listed["mutant"]:
        before = (ROOT / entry["path"]).read_text()
        if before.count(entry["old"]) != 1:
            sys.exit(
                f"{entry['path']}: {entry['old']!r} is there {before.count(entry['old'])} times"
            )
        after = before.replace(entry["old"], entry["new"])
        yield Mutant(Path(entry["path"]), before, after, tuple(listed.get("tests", ())))


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
    try:
        compile(changed or "", "", "exec")
    except SyntaxError:  # of a bare * among parameters, say
        return None
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


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """As a plugin of pytest: leave three cases of each test, or a twelfth where it has more."""
    cases: dict[str, list[Any]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chance = random.Random(0)
    items[:] = [
        item
        for several in cases.values()
        for item in chance.sample(several, min(len(several), max(3, len(several) // 12)))
    ]


class Record:
    """The tests that run each line.

    Args:
        file: of coverage.py, kept with a report beside it. Where there is none, the suite runs.
        workers: processes at a time.
    """

    def __init__(self, file: Path, workers: int) -> None:
        from coverage import CoverageData

        report = file.with_suffix(".xml")
        if not report.exists():
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", f"-n{workers}"]
            command += ["-m", "not long and not exhaustive", f"--junitxml={report.resolve()}"]
            command += [f"--cov={SOURCE}", "--cov-context=test", "--cov-report="]
            command += ["-p", f"scripts.{Path(__file__).stem}"]
            with tempfile.TemporaryDirectory() as folder:
                root = checkout(Path(folder))
                environment = environment_of(root) | {"COVERAGE_FILE": str(file.resolve())}
                subprocess.run(command, cwd=root, env=environment, check=False)
        self.passed: dict[str, set[str]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            test_file = f"{case.get('classname', '').replace('.', '/')}.py"
            if not len(case):  # neither failed nor skipped
                self.passed.setdefault(test_file, set()).add(f"{test_file}::{case.get('name')}")
        self.coverage = CoverageData(str(file))
        self.coverage.read()

    def running(self, mutant: Mutant) -> set[str]:
        """The tests that run the smallest statement around a change that any test runs.

        Where that runs at import, or in processes of their own, whole files named after it come
        too, with their long tests.
        """
        lines = zip_longest(mutant.before.splitlines(), mutant.after.splitlines())
        changed = next(n for n, (old, new) in enumerate(lines, 1) if old != new)
        spans = sorted(
            (node.end_lineno - node.lineno, node.lineno, node.end_lineno)
            for node in ast.walk(ast.parse(mutant.before))
            if isinstance(node, ast.stmt) and node.lineno <= changed <= node.end_lineno
        )
        files = self.coverage.measured_files()
        file = next((file for file in files if file.endswith(f"/{mutant.path}")), "")
        tests_by_line = self.coverage.contexts_by_lineno(file)
        beside: set[str] = set()
        for _, first, last in [*spans, (0, 1, sys.maxsize)]:
            contexts = {
                context
                for line, running in tests_by_line.items()
                if first <= line <= last
                for context in running
            }
            if tests := set().union(*map(self._tests, contexts)):
                return tests | beside
            test_files = [str(file.relative_to(ROOT)) for file in (ROOT / TESTS).rglob("test_*.py")]
            least = min(map(mutant.distance, test_files))
            beside = {file for file in test_files if mutant.distance(file) == least}
        return beside

    def _tests(self, context: str) -> set[str]:
        """A test, or those of its file where a fixture of it ran."""
        test, _, phase = context.rpartition("|")
        passed = self.passed.get(test.partition("::")[0], set())
        return passed & {test} if phase == "run" else passed

    def chosen(self, mutant: Mutant, cap: int) -> list[str]:
        """At most so many tests that run what changes: the nearest file's, then of all in turns."""
        files: dict[str, list[str]] = {}
        for test in sorted(self.running(mutant)):
            files.setdefault(test.partition("::")[0], []).append(test)
        for tests in files.values():
            random.Random(0).shuffle(tests)
        nearest = sorted(files, key=mutant.distance)
        turns = zip_longest(*(files[file] for file in nearest))
        spread = [test for turn in turns for test in turn if test is not None]
        kept = list(dict.fromkeys([*files[nearest[0]], *spread]))[:cap] if files else []
        return sorted(kept, key=lambda test: nearest.index(test.partition("::")[0]))


def environment_of(root: Path) -> dict[str, str]:
    """Variables of processes that import posenc from a checkout."""
    return os.environ | {
        "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


def survives(mutant: Mutant, tests: Sequence[str], root: Path) -> bool:
    """Whether the tests pass with the change, in a checkout at ``root``."""
    environment = environment_of(root)
    commands = [["pytest", "-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider", *tests]]
    if mutant.path.suffix != ".py":
        environment["XDG_CACHE_HOME"] = str(root / ".cache")
        commands.insert(0, ["posenc.attention.backends.native", "--require"])
    if not tests:
        return True
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


def survivors(mutants: Sequence[Mutant], tests: Sequence[Sequence[str]], workers: int) -> int:
    """How many no test notices; they are printed as they are found.

    Args:
        mutants: changes.
        tests: of each.
        workers: processes at a time.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for worker in range(workers):
            free.put(checkout(Path(folder) / f"worker-{worker}"))

        def alive(mutant: Mutant, tests: Sequence[str]) -> bool:
            root = free.get()
            try:
                return survives(mutant, tests, root)
            finally:
                free.put(root)

        found = 0
        for mutant, lives in zip(mutants, pool.map(alive, mutants, tests), strict=True):
            print(
                "survived" if lives else "noticed ", mutant.diff, sep="  ", end="\n\n", flush=True
            )
            found += lives
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description="List changes of posenc that no test notices.")
    parser.add_argument("--count", type=int, default=60, help="random changes to try")
    parser.add_argument("--seed", type=int, default=0, help="of the random changes")
    parser.add_argument("--only", default="", help="only files with this in their path")
    parser.add_argument("--planted", type=Path, help="a list of changes instead of random ones")
    parser.add_argument("--tests", type=int, default=150, help="at most so many a random change")
    parser.add_argument("--record", type=Path, help="where the lines of each test are kept")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    if options.planted:
        mutants = list(planted(options.planted))
    else:
        source = drawn(options.only, random.Random(options.seed))
        mutants = [next(source) for _ in range(options.count)]
    tests: list[Sequence[str]] = [mutant.tests for mutant in mutants]
    if not all(tests):
        with tempfile.TemporaryDirectory() as folder:
            record = Record(options.record or Path(folder) / "coverage", options.workers)
            tests = [mutant.tests or record.chosen(mutant, options.tests) for mutant in mutants]
    print(f"{len(mutants)} changes, {survivors(mutants, tests, options.workers)} survived")


if __name__ == "__main__":
    main()
