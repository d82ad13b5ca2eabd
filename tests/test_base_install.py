"""posenc where nothing but a base install is there, and without metadata of its own."""

from __future__ import annotations

import json
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
from posenc.cli import main
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
    assert not {"cattrs", "transformers", "typer", "torchdiffeq"} & brought()


def test_a_source_tree_without_metadata_is_enough(tmp_path: Path) -> None:
    """It has no entry points, and its version is that of the package."""
    sizes = "--steps 2 --seeds 1 --batch 2 --train-length 8 --width 8 --heads 2 --layers 1"
    command = ["compare", *sizes.split(), "--encodings", "rope", "--out", str(tmp_path / "out")]
    program = (
        f"{WITHOUT_METADATA}\n"
        "from posenc.bench.run import about\n"
        "from posenc.training.machine import versions\n"
        "try: metadata.version('posenc')\n"
        "except metadata.PackageNotFoundError: pass\n"
        "else: raise AssertionError('posenc has metadata')\n"
        "found = [versions()['posenc'], about('cpu')['versions']['posenc']]\n"
        "print(json.dumps(found), flush=True)\n"
        f"sys.argv[1:] = {command!r}\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.partition("\n")[0]) == [posenc.__version__] * 2
    assert list(tmp_path.rglob("index.html"))
