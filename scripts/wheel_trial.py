"""Run the wheel of dist/ in an empty environment without a compiler: make test-wheel.

Each prebuilt variant that this processor supports runs the tests of the kernels and the README's
examples. Nothing but the environment's own programs is on the path, there is no home folder, and
the command runs from packages that are read-only (to others than root).
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheel-trial"
PYTHON = WORK / "venv" / "bin" / "python"
TESTS = [
    *("tests/attention/test_native.py", "tests/attention/test_native_fading.py"),
    *("tests/attention/test_native_tiles.py", "tests/attention/test_rotation.py"),
    *("tests/attention/test_variants.py", "tests/test_docs.py::test_the_readmes_examples_run"),
]
LAWS = ["tests/testing/test_laws.py", "-k", "agree or full or separate"]
COMPARE = [
    *("compare", "--encodings", "rope,alibi", "--steps", "2", "--seeds", "1"),
    *("--layers", "1", "--width", "16", "--heads", "2"),
    *("--out", str(WORK / "report"), "--replace"),
]
SUPPORTED = """
from posenc.attention.backends.native.variants import NEEDS, file_of, unsupported
for name in NEEDS:
    if file_of(name).exists():
        print(name, unsupported(name) or "")
"""
NAMED = """
import sys, torch, posenc
from posenc import Grid, Layout
q = torch.randn(1, 4, 512, 64)
call = q, q, q, Grid.of(Layout.sequence(512)), posenc.create("t5", heads=4)
text = str(posenc.explain(*call))
print(text.splitlines()[0])
assert text.startswith("native ") and f"kernels: {sys.argv[1]}, prebuilt" in text, text
expected = posenc.attend(*call, backend="reference")
torch.testing.assert_close(posenc.attend(*call), expected)
"""


def run(*command: object, **environment: str) -> str:
    """Standard output of a command in the trial's folder; nothing of this environment is passed."""
    bare = {"PATH": str(PYTHON.parent), "OMP_NUM_THREADS": "2", **environment}
    print("+", *command, flush=True)
    done = subprocess.run(
        [*map(str, command)], cwd=WORK, env=bare, check=True, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, flush=True)
    return done.stdout


def install(*packages: str) -> None:
    """From the package index, as this user is set up to reach it."""
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile"]
    subprocess.run([*command, *packages], check=True)


def let_write(mode: str) -> None:
    """``-w``: nobody but root may write into the environment."""
    subprocess.run(["chmod", "-R", f"u{mode}", WORK / "venv"], check=True)


def main() -> None:
    wheels = list((ROOT / "dist").glob(f"posenc-*_{platform.machine()}.whl"))
    if len(wheels) != 1:
        sys.exit(f"dist/ has {len(wheels)} wheels for this machine. Remedy: make wheels")
    if WORK.exists():
        let_write("+w")
        shutil.rmtree(WORK)
    venv.create(WORK / "venv", with_pip=True)
    install(f"{wheels[0]}[cli]")
    let_write("-w")
    run(PYTHON.with_name("posenc"), *COMPARE)
    variants = [line.split(" ", 1) for line in run(PYTHON, "-c", SUPPORTED).splitlines()]
    supported = [name for name, reason in variants if not reason]
    assert supported, variants
    best = run(PYTHON.with_name("posenc"), "--version")
    assert f"CPU kernels: {supported[0]}, prebuilt" in best
    let_write("+w")
    install(f"{wheels[0]}[transformers,ode]", "pytest", "hypothesis", "hatchling")
    for name in ("tests", "docs", "README.md", "pyproject.toml", "hatch_build.py"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, WORK / name)
    for name in supported:
        run(PYTHON, "-c", NAMED, name, POSENC_KERNELS=name)
        run(PYTHON, "-m", "pytest", "-q", "-x", *TESTS, POSENC_KERNELS=name)
        run(PYTHON, "-m", "pytest", "-q", "-x", *LAWS, POSENC_KERNELS=name)
        run(PYTHON, "-m", "tests.testing.attention_fuzz", "--count", "1000", POSENC_KERNELS=name)
    print(f"works: {', '.join(supported)}")


main()
