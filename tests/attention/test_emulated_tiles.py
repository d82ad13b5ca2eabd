"""The kernels' paths by AMX on any processor with AVX-512, by tile registers in plain C++."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from posenc.attention.backends.native.variants import instruction_sets, unsupported

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "tests" / "support" / "emulated_tiles.h"


@pytest.mark.long
@pytest.mark.skipif("avx512bw" not in instruction_sets(), reason="the processor has no AVX-512")
@pytest.mark.skipif(unsupported("amx") is None, reason="the processor has AMX itself")
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_paths_by_amx() -> None:
    """Tests in bfloat16, in a process of their own with kernels that are built for them."""
    # Tiles in plain C++ gain nothing from the optimizations that compiling takes most time for.
    flags = f"-march=native -O1 -include {HEADER.relative_to(ROOT)}"
    environment = os.environ | {"POSENC_KERNEL_FLAGS": flags, "POSENC_KERNELS": "build"}
    build = [sys.executable, "-m", "posenc.attention.backends.native"]
    subprocess.run(build, env=environment, cwd=ROOT, check=True, capture_output=True)
    tests = ("attention/test_native_bfloat16.py", "testing/test_attention_fuzz.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-k", "bfloat16", "-m", "not exhaustive"]
    files = [str(ROOT / "tests" / name) for name in tests]
    done = subprocess.run(
        [*command, *files], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout
