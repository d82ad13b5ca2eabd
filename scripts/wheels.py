"""Build the wheels and the source archive into dist/: make wheels.

Kernels are compiled by zig, which has the headers and libraries of each platform at the age that
manylinux allows: a wheel for another processor needs no machine of its kind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from posenc.attention.backends.native.build import compile_kernels
from posenc.attention.backends.native.variants import file_of

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
LARGEST = 6_000_000
ZIG = [sys.executable, "-m", "ziglang", "c++"]


class Platform(NamedTuple):
    """zig's name of a platform, and of the processor that each variant is compiled for.

    None for musl: PyTorch has no wheels for it.
    """

    target: str
    processors: dict[str, str]


PLATFORMS = {
    "manylinux_2_28_x86_64": Platform(
        "x86_64-linux-gnu.2.28",
        {"v3": "x86_64_v3", "v4": "x86_64_v4", "amx": "x86_64_v4+avx512bf16+amx_tile+amx_bf16"},
    ),
    "manylinux_2_28_aarch64": Platform("aarch64-linux-gnu.2.28", {"neon": "generic"}),
    "macosx_11_0_arm64": Platform("aarch64-macos.11.0", {"neon": "apple_m1"}),
}


def compile_variants(platform: Platform, folder: Path) -> None:
    """The variants of a platform, under the names by which the package finds them."""
    for name, processor in platform.processors.items():
        sys.stdout.write(f"Compiling {name} for {platform.target} …\n")
        sys.stdout.flush()
        # Clang prefers vectors of 256 bits for x86-64-v4; the option means nothing elsewhere.
        wide = ["-mprefer-vector-width=512"] if processor.startswith("x86_64_v4") else []
        compiler = [*ZIG, "-s", "-target", platform.target]  # links for any processor, so once
        compile_kernels(compiler, [f"-mcpu={processor}", *wide], folder / file_of(name).name)


def build(*arguments: str, **environment: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST), *arguments]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True)


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    build()
    for name, platform in PLATFORMS.items():
        kernels = ROOT / "build" / "kernels" / name
        shutil.rmtree(kernels, ignore_errors=True)
        kernels.mkdir(parents=True)
        compile_variants(platform, kernels)
        build("--wheel", POSENC_WHEEL_PLATFORM=name, POSENC_WHEEL_KERNELS=str(kernels))
        (wheel,) = DIST.glob(f"*-{name}.whl")
        if "linux" in name:
            subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)], check=True)
        if wheel.stat().st_size > LARGEST:
            sys.exit(f"{wheel.name} has {wheel.stat().st_size:,} bytes, more than {LARGEST:,}")


main()
