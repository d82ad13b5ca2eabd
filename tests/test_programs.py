"""Programs that the Makefile, scripts, CI and documents run, and a list that one reads."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from scripts.mutants import planted

ROOT = Path(__file__).parent.parent
FILES = [
    ROOT / "Makefile",
    *(ROOT / "scripts").rglob("*.py"),
    *(ROOT / "benchmarks").rglob("*.py"),
    *(ROOT / ".github").rglob("*.yml"),
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
]
RUN = re.compile(r"""-m(?:", ?"| )((?:posenc|tests|benchmarks|scripts)(?:\.\w+)*)""")


def is_program(module: str) -> bool:
    """True if ``python -m`` runs it: a file, or a package with ``__main__``."""
    found = importlib.util.find_spec(module)
    if found is None or found.submodule_search_locations is None:
        return found is not None
    return importlib.util.find_spec(f"{module}.__main__") is not None


def test_programs_that_are_run_exist() -> None:
    named = {match for file in FILES for match in RUN.findall(file.read_text())}
    assert "posenc.attention.backends.native" in named
    assert "tests.testing.call_fuzz" in named
    assert [name for name in sorted(named) if not is_program(name)] == []
    assert not is_program("posenc.lab.cli")


def test_listed_mutants_can_be_planted() -> None:
    """Each stands once in its file, as the list says."""
    mutants = list(planted(ROOT / "scripts" / "kernel_mutants.toml"))
    assert mutants
    assert all(mutant.before != mutant.after for mutant in mutants)
