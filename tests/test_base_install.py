"""posenc where nothing but a base install is there, and without metadata of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import posenc
from tests.support.base_install import CALLS

ROOT = Path(posenc.__file__).parents[2]

WITHOUT_METADATA = """
import json, sys
from importlib import metadata

distributions = metadata.Distribution.discover
metadata.Distribution.discover = lambda *args, **options: (
    found for found in distributions(*args, **options) if found.name != "posenc"
)
try:
    metadata.version("posenc")
except metadata.PackageNotFoundError:
    pass
else:
    raise SystemExit("posenc has metadata")

from posenc.lab.bench.run import about
from posenc.lab.cli import main
from posenc.lab.training.machine import versions

print(json.dumps([versions()["posenc"], about("cpu")["versions"]["posenc"]]), flush=True)
sys.argv[1:] = ["--version"]
main()
"""


@cache
def raised_in_base_install() -> dict[str, str]:
    """Errors of calls in a process that has what ``pip install posenc`` brings, by call."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.base_install", ",".join(brought())],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    errors: dict[str, str] = json.loads(done.stdout)
    return errors


def brought() -> set[str]:
    """Top-level modules of the distributions that posenc requires without an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, known = [*map(Requirement, project["dependencies"])], set[tuple[str, ...]]()
    while waiting:
        required = waiting.pop()
        name, extras = canonicalize_name(required.name), sorted(required.extras)
        if (name, *extras) in known:
            continue
        known.add((name, *extras))
        try:
            others = map(Requirement, metadata.requires(name) or ())
        except metadata.PackageNotFoundError:  # of another platform
            continue
        waiting += [
            other
            for other in others
            if other.marker is None
            or any(other.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        ]
    names = {name for name, *_ in known}
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if any(canonicalize_name(owner) in names for owner in owners)
    }


@pytest.mark.parametrize("call", CALLS)
def test_a_base_install_serves(call: str) -> None:
    assert raised_in_base_install().get(call, "") == ""


def test_a_base_install_lacks_what_extras_bring() -> None:
    assert {"torch", "jaxtyping", "safetensors", "numpy"} <= brought()
    assert not {"cattrs", "cyclopts", "transformers", "torchdiffeq"} & brought()


def test_a_source_tree_without_metadata_is_enough() -> None:
    """It has no entry points, and its version is that of the package."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_METADATA], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    versions, command = done.stdout.splitlines()
    assert json.loads(versions) == [posenc.__version__] * 2
    assert command.startswith(f"posenc {posenc.__version__};")


def test_no_source_asks_for_metadata_of_posenc() -> None:
    asking = re.compile(r"(version|metadata|distribution|requires)\(\s*[\"']posenc[\"']")
    sources = [*Path(posenc.__file__).parent.rglob("*.py")]
    assert len(sources) > 100
    assert [file.name for file in sources if asking.search(file.read_text())] == []
