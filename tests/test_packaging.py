"""The shipped files, their dependencies, and the locks that pin all of them."""

from __future__ import annotations

import email
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import posenc

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = ["requirements.lock", "requirements-test.lock"]
# On machines with a GPU torch brings these along, each build its own.
BROUGHT_BY_TORCH = ("nvidia-", "cuda-", "triton")
OF_THE_LAB = ["altair", "cattrs", "cyclopts", "jinja2", "lightning_fabric", "pandas", "rich"]
OF_THE_LAB += ["scipy"]
OPTIONAL = [*OF_THE_LAB, "hypothesis", "pytest", "torchdiffeq", "transformers", "vl_convert"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built as ``make wheel`` builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.iterdir()
    assert file.name == f"posenc-{posenc.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(file) as archive:
        yield archive


def test_wheel_holds_every_file_of_the_package_and_no_other(wheel: zipfile.ZipFile) -> None:
    sources = {
        file.relative_to(ROOT / "src").as_posix()
        for file in (ROOT / "src" / "posenc").rglob("*")
        if file.is_file() and not {"__pycache__", "prebuilt"} & set(file.parts)
    }
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert shipped == sources
    assert "posenc/py.typed" in shipped
    assert any("/templates/" in name for name in shipped)


def test_wheel_describes_itself(wheel: zipfile.ZipFile) -> None:
    (folder,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    about = email.message_from_bytes(wheel.read(f"{folder}/METADATA"))
    needed = [Requirement(text) for text in about.get_all("Requires-Dist", [])]
    assert {each.name for each in needed if each.marker is None} == {
        "torch",
        "jaxtyping",
        "safetensors",
    }
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.11"
    assert "posenc = posenc.lab.cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    licence = wheel.read(f"{folder}/licenses/LICENSE").decode()
    assert "END OF TERMS AND CONDITIONS" in licence


def test_unpacked_wheel_runs_without_the_optional_packages(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path / "site")
    program = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))
import torch, posenc, posenc.models as models
print(posenc.__file__)
config = models.DecoderConfig(
    vocabulary=8, dim=16, layers=1, heads=2, max_length=8, encoding="rope"
)
decoder = models.Decoder(config).eval()
decoder.save("model")
text = torch.arange(8)[None]
assert torch.equal(models.Decoder.load("model")(text), decoder(text))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")


def test_command_line_runs_from_the_unpacked_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", "from posenc.lab.cli import main; main()", "list", "--json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert '"rope"' in done.stdout


def pins(file: str) -> dict[str, str]:
    found = {}
    for line in (ROOT / file).read_text().splitlines():
        if line.startswith(("#", "-r ")):
            continue
        requirement = Requirement(line)
        elsewhere = requirement.marker is not None and not requirement.marker.evaluate()
        if requirement.name == "triton" or elsewhere:
            continue
        exact = re.fullmatch(r"==([0-9][0-9a-z.]*)", str(requirement.specifier))
        assert exact, f"{file}: {line}"
        assert requirement.name not in found, f"{file} pins {requirement.name} twice"
        found[requirement.name] = exact[1]
    return found


def all_pins() -> dict[str, str]:
    return pins(LOCKS[0]) | pins(LOCKS[1])


def test_locks_pin_exactly_and_leave_the_build_of_torch_open() -> None:
    first, second = (pins(file) for file in LOCKS)
    assert f"torch=={first['torch']}" in (ROOT / "scripts" / "lock.py").read_text()
    assert not first.keys() & second.keys()
    assert not [name for name in first | second if name.startswith(BROUGHT_BY_TORCH)]


def test_triton_is_as_the_build_of_torch_asks() -> None:
    """Builds of one torch ask for one exact patch of a series of Triton, or for none."""
    locked, installed = pins(LOCKS[0])["torch"], version("torch").partition("+")[0]
    if installed != locked:
        pytest.skip(f"the locks are for PyTorch {locked}; this is {installed}")
    lines = [line for file in LOCKS for line in (ROOT / file).read_text().splitlines()]
    (triton,) = (Requirement(line) for line in lines if line.startswith("triton"))
    assert re.fullmatch(r"~=\d+\.\d+\.0", str(triton.specifier))
    asked = [Requirement(text) for text in distribution("torch").requires or []]
    for requirement in asked:
        if requirement.name == "triton":
            (exact,) = requirement.specifier
            assert exact.version in triton.specifier


def needs_of(extras: set[str]) -> list[Requirement]:
    """Dependencies of posenc with these extras, those they name in turn included."""
    texts = list(PROJECT["dependencies"])
    for extra in extras:
        texts += PROJECT["optional-dependencies"][extra]
    needed = []
    for requirement in map(Requirement, texts):
        if requirement.name == "posenc":
            needed += needs_of(requirement.extras)
        else:
            needed.append(requirement)
    return needed


@pytest.mark.parametrize("extras", [{"cli", "ode"}, {"all", "test"}], ids=["demo", "test"])
def test_pins_meet_what_the_project_asks(extras: set[str]) -> None:
    available = all_pins() if "test" in extras else pins(LOCKS[0])
    for requirement in needs_of(extras):
        if requirement.name.startswith(BROUGHT_BY_TORCH):
            continue
        version = available.get(canonicalize_name(requirement.name))
        assert version, f"{requirement} is not pinned: run `make lock`"
        assert version in requirement.specifier, f"{requirement} is pinned to {version}"


def test_what_is_timed_against_is_pinned_beside_the_tests() -> None:
    available = all_pins() | pins("requirements-bench.lock")
    for requirement in needs_of({"bench"}):
        assert available.get(canonicalize_name(requirement.name), "") in requirement.specifier


def test_pins_are_closed() -> None:
    """Dependencies of a pinned package on this machine are pinned too."""
    available = all_pins()
    queue = [(requirement.name, requirement.extras) for requirement in needs_of({"all", "test"})]
    seen = set()
    while queue:
        name, extras = queue.pop()
        if (name, frozenset(extras)) in seen:
            continue
        seen.add((name, frozenset(extras)))
        if name.startswith(BROUGHT_BY_TORCH):
            continue
        assert canonicalize_name(name) in available, f"{name} is not pinned: run `make lock`"
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            pytest.fail(f"{name} is pinned but not installed: run `make check`")
        for requirement in map(Requirement, requires):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in {"", *extras}):
                queue.append((requirement.name, requirement.extras))


def test_ci_can_be_executed() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_hosted_workflow_runs_what_there_is() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "run: .ci/run\n" in workflow
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"run: make ([a-z-]+)\n", workflow)
    assert targets == ["test-exhaustive", "test-oldest-triton", "wheels", "test-wheel"]
    for target in targets:
        assert f"\n{target}:" in makefile


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {posenc.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_refuses_an_old_python_and_says_what_to_do(tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "Python 3.11 or newer" in done.stderr
    assert "make PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()
