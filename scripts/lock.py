"""Write the lock files: every package of an environment, pinned.

    python scripts/lock.py              keeps the present pins, adds what pyproject.toml newly needs
    python scripts/lock.py --upgrade    resolves everything anew
    python scripts/lock.py --check      writes nothing; fails where a lock cannot be installed

requirements.lock holds what ``posenc[cli,ode]`` needs and what builds posenc itself,
requirements-test.lock what the tests need beside it; requirements-bench.lock,
requirements-mutants.lock and requirements-wheels.lock what the benchmarks, mutation testing and
kernels for other machines need beside both. uv resolves them for every platform and Python at once,
from the package index alone. Pins have no hashes, since builds of torch differ from machine to
machine, and what a build of torch asks for itself (CUDA's libraries, Triton) is left to its
metadata: the tests, which run Triton kernels everywhere, name Triton's series only.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.15.0"
LOCKS = {
    "requirements.lock": ("cli", "ode"),
    "requirements-test.lock": ("test",),
    "requirements-bench.lock": ("bench",),
    "requirements-mutants.lock": ("mutants",),
    "requirements-wheels.lock": ("wheels",),
}
HEADER = "# Written by scripts/lock.py; do not edit.\n"
BROUGHT_BY_TORCH = ("nvidia-", "cuda-", "triton")
OLDEST_PYTHON = "3.11"


def without_settings() -> dict[str, str]:
    """The environment without what sets indexes or wheel folders of this machine."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))
    }


def compiled(*arguments: str, requirements: str = "") -> str:
    """The output of ``uv pip compile``, without settings, indexes or wheel folders of this machine.

    Raises:
        subprocess.CalledProcessError: the requirements cannot be met; uv has said why.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet"]
    command += ["--no-header", "--no-annotate", *arguments]
    return subprocess.run(
        command,
        input=requirements,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=without_settings(),
    ).stdout


def build_requirements() -> list[str]:
    """Build requirements of posenc, so that installing it in place needs no network."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [*project["build-system"]["requires"], "editables"]


def pins(text: str) -> dict[str, str]:
    """The lines of a lock that pin a package, by its name and marker, but for torch's own."""
    return {
        re.sub("==[^ ]+", "", line): line
        for line in text.splitlines()
        if "==" in line and not line.startswith(BROUGHT_BY_TORCH)
    }


def resolved(extras: tuple[str, ...], kept: str) -> dict[str, str]:
    """Pins of every package that posenc with these extras needs, on any platform.

    Args:
        extras: names of optional dependencies in pyproject.toml.
        kept: pins that stay as they are.
    """
    constraints = ROOT / ".lock-constraints.txt"
    constraints.write_text(kept)
    try:
        found = compiled(
            *("pyproject.toml", "-", "--universal", f"--python-version={OLDEST_PYTHON}"),
            *("--constraint", str(constraints)),
            *(f"--extra={extra}" for extra in extras),
            requirements="\n".join([TORCH, *build_requirements()]),
        )
    finally:
        constraints.unlink()
    return pins(found)


def triton_series() -> str:
    """The requirement on Triton that the index's build of torch fits, and others can take."""
    found = compiled(
        "-", f"--python-version={OLDEST_PYTHON}", "--python-platform=linux", requirements=TORCH
    )
    version = re.search(r"^triton==(\d+\.\d+)", found, re.MULTILINE)
    assert version is not None, "the index's torch asks for no Triton"
    return f"triton~={version[1]}.0 ; sys_platform == 'linux'"


def write(kept: str) -> None:
    """Write every lock."""
    known: dict[str, str] = {}
    for file, extras in LOCKS.items():
        new = {
            package: line
            for package, line in resolved(extras, "\n".join([kept, *known.values()])).items()
            if package not in known
        }
        first = f"-r {next(iter(LOCKS))}\n" if known else ""
        lines = [*new.values(), *([triton_series()] if "test" in extras else [])]
        (ROOT / file).write_text(HEADER + first + "".join(f"{line}\n" for line in lines))
        known |= new
        print(f"{file}: {len(new)} packages")


def check() -> None:
    """Resolve what is locked, for every Python and platform.

    Raises:
        SystemExit: something cannot be installed.
    """
    for file in LOCKS:
        try:
            compiled(file, "--universal", f"--python-version={OLDEST_PYTHON}")
        except subprocess.CalledProcessError:
            sys.exit(f"{file} cannot be installed from the package index. Remedy: make lock")
    print(f"{', '.join(LOCKS)} can be installed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Pin every package that posenc needs.")
    parser.add_argument("--upgrade", action="store_true", help="resolve everything anew")
    parser.add_argument("--check", action="store_true", help="only ask whether the locks resolve")
    options = parser.parse_args()
    if options.check:
        check()
    else:
        present = [ROOT / file for file in LOCKS if not options.upgrade and (ROOT / file).exists()]
        write("\n".join(line for path in present for line in pins(path.read_text()).values()))


if __name__ == "__main__":
    main()
