"""The oldest transformers: named by the project's files, and older ones refused by number."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from posenc.errors import PosencError, VersionError
from posenc.transformers import versions
from posenc.transformers.checkpoints import Fields
from posenc.transformers.engines.config import is_known
from posenc.transformers.kinds import kind_of
from posenc.transformers.versions import OLDEST, require

ROOT = Path(__file__).parents[2]
OLD = "5.10.4"


def test_extras_require_the_oldest_version() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = extras["optional-dependencies"].values()
    wanted = [Requirement(line) for extra in listed for line in extra]
    floors = [str(x.specifier) for x in wanted if x.name == "transformers"]
    assert len(floors) == 3
    assert set(floors) == {f">={OLDEST}"}


@pytest.mark.parametrize("page", ["docs/start/install.md", "docs/zh/start/install.md"])
def test_pages_name_the_oldest_version(page: str) -> None:
    rows = [x for x in (ROOT / page).read_text().splitlines() if x.startswith("| `transformers`")]
    assert re.findall(r"\d+\.\d+", rows[0]) == [OLDEST]


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0", "5.9.2", OLD, "5.18.0"])
def test_older_versions_are_refused_by_number(version: str) -> None:
    with pytest.raises(VersionError) as refused:
        require(version)
    assert isinstance(refused.value, ImportError)
    assert version in str(refused.value)
    assert f'pip install "transformers>={OLDEST}"' in refused.value.remedy


@pytest.mark.parametrize(
    "version", [f"{OLDEST}.0", "5.24.0", "5.100.0.dev0", "5.25rc1", "6.0.0rc1"]
)
def test_newer_versions_are_taken(version: str) -> None:
    require(version)


@pytest.fixture
def outdated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed version is an old one."""
    monkeypatch.setattr(metadata, "version", lambda name: OLD)
    monkeypatch.delitem(sys.modules, versions.__name__)
    monkeypatch.delattr("posenc.transformers.versions")


@pytest.mark.usefixtures("outdated")
def test_folders_are_refused(tmp_path: Path) -> None:
    """By ``extend``, ``evaluate`` and ``doctor``: nothing is read from the config by an old one."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    fields = Fields.read(tmp_path)
    for read in (lambda: kind_of(fields), lambda: is_known("llama")):
        with pytest.raises(PosencError, match=re.escape(OLD)):
            read()


@pytest.mark.parametrize("part", ["acceleration", "stretching"])
def test_imports_end_in_a_sentence_with_the_number(part: str, tmp_path: Path) -> None:
    """Whatever else the old version lacks."""
    (tmp_path / "transformers.py").write_text("raise AttributeError('imported')")
    info = tmp_path / f"transformers-{OLD}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: transformers\nVersion: {OLD}\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-c", f"import posenc.transformers.{part}"]
    given = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("posenc.errors.VersionError: ")
    assert OLD in last
    assert f"transformers>={OLDEST}" in last
