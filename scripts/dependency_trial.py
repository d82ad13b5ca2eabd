"""Try posenc on the oldest and the newest versions of what it is built on: make test-versions.

Each row of ``ROWS`` is an environment in build/versions: that of the locks, with some packages at
the oldest version that pyproject.toml allows, or at the newest of the package index. A row that
resolves to an environment tried before is not tried again, such as the newest torch while the locks
have it. The oldest Triton comes with the oldest torch, since each release asks for one of its own.

A row needs some 7 GB while it runs, and some 25 minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from lock import LOCKS, OLDEST_PYTHON, ROOT, build_requirements, compiled, pins, without_settings

WORK = ROOT / "build" / "versions"
TESTS = ["tests/transformers", "tests/testing/test_laws.py", "tests/attention/test_triton.py"]

OLDEST, NEWEST = "oldest", "newest"
ROWS = {
    "oldest transformers": {"transformers": OLDEST},
    "oldest torch": {"torch": OLDEST},
    "oldest torch and transformers": {"torch": OLDEST, "transformers": OLDEST},
    "newest transformers": {"transformers": NEWEST},
    "newest torch": {"torch": NEWEST},
    "newest triton": {"triton": NEWEST},
    "all newest": {},  # no lock at all
}


def oldest(package: str) -> str:
    """The requirement of the oldest version that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    found = {
        line.partition(">=")[2]
        for group in groups
        for line in group
        if line.startswith(f"{package}>=")
    }
    if len(found) != 1:
        sys.exit(f"pyproject.toml asks for {len(found)} oldest versions of {package}: {found}")
    return f"{package}=={found.pop()}"


def resolved(row: dict[str, str]) -> str:
    """Requirements of the tests with the packages of a row, every version pinned.

    The locks' versions are kept but where a package of the row asks for others.
    """
    locked = pins("\n".join((ROOT / name).read_text() for name in LOCKS)).values()
    kept = [line for line in locked if line.partition("==")[0] not in row]
    WORK.mkdir(parents=True, exist_ok=True)
    file = WORK / "requirements.txt"
    file.write_text("\n".join(kept if row else []))  # uv prefers what its output had before
    asked = [oldest(package) for package, age in row.items() if age == OLDEST]
    override = WORK / "override.txt"
    override.write_text("triton" if "triton" in row else "")
    compiled(
        *("pyproject.toml", "-", "--extra=test", f"--python-version={OLDEST_PYTHON}"),
        *("--output-file", str(file), "--override", str(override)),
        requirements="\n".join([*asked, *build_requirements()]),
    )
    return file.read_text()


def install(python: Path, *packages: str) -> None:
    """From the package index alone."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--no-config", "--quiet"]
    command += ["--python", str(python), *packages]
    subprocess.run(command, check=True, env=without_settings())


def tried(name: str, requirements: str, tests: list[str]) -> bool:
    """True if the tests and the demo pass on these requirements."""
    folder = WORK / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    venv.create(folder)
    listed = folder / "requirements.txt"
    listed.write_text(requirements)
    install(python, "-r", str(listed))
    install(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    steps = [
        ["-m", "posenc.attention.backends.native"],
        ["-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-m", "not exhaustive", *tests],
        ["-m", "posenc", "compare", "--out", str(folder / "demo"), "--replace"],
    ]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    for step in steps:
        print("+ python", *step, flush=True)
        environment = threads if "pytest" in step else None
        if subprocess.run([python, *step], cwd=ROOT, env=environment).returncode:
            return False
    shutil.rmtree(folder)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Try posenc on other versions of its libraries.")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS], help="default: all")
    parser.add_argument("tests", nargs="*", default=TESTS, help="of pytest")
    options = parser.parse_args()
    outcomes: dict[str, str] = {}
    environments: dict[str, str] = {}
    for name in options.rows:
        requirements = resolved(ROWS[name])
        moved = re.findall(r"^(?:torch|transformers|triton)==\S+", requirements, re.MULTILINE)
        outcome = environments.get(requirements)
        if outcome is None:
            print(f"{name}: {', '.join(moved)}", flush=True)
            passed = tried(name, requirements, options.tests)
            outcome = environments[requirements] = "passed" if passed else "failed"
        outcomes[f"{name} ({', '.join(moved)})"] = outcome
    for name, outcome in outcomes.items():
        print(f"{outcome}: {name}")
    if "failed" in outcomes.values():
        sys.exit(1)


if __name__ == "__main__":
    main()
