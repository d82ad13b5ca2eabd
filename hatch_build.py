"""Puts compiled kernels into a wheel for one platform; scripts/wheels.py sets the two variables.

Without them the wheel is of Python alone, for any platform.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PREBUILT = "posenc/attention/backends/native/prebuilt"


class KernelsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        platform = os.environ.get("POSENC_WHEEL_PLATFORM")
        if platform is None or version == "editable":
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        for file in Path(os.environ["POSENC_WHEEL_KERNELS"]).glob("*.so"):
            build_data["force_include"][str(file)] = f"{PREBUILT}/{file.name}"
