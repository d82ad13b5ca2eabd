"""Released models and libraries that use an encoding."""

from __future__ import annotations

import tomllib
from pathlib import Path

USERS = Path(__file__).with_name("used_by.toml")


def users() -> dict[str, list[str]]:
    """Names of models and libraries by encoding."""
    return tomllib.loads(USERS.read_text(encoding="utf-8"))


def is_used_by(encoding: str, model: str) -> bool:
    """True if a user's name contains ``model``, whatever the case, spaces and punctuation."""
    wanted = _letters(model)
    return any(wanted in _letters(user) for user in users().get(encoding, []))


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))
