"""Released models and libraries that use an encoding."""

from __future__ import annotations

import tomllib
from pathlib import Path

USERS = Path(__file__).with_name("used_by.toml")


def users() -> dict[str, list[str]]:
    """Names of models and libraries by encoding."""
    return tomllib.loads(USERS.read_text(encoding="utf-8"))
