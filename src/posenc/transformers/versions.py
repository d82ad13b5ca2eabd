"""The oldest transformers that posenc supports, and names that old supported versions lack.

Importing this module requires such a version.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from posenc.errors import VersionError

OLDEST = "5.19"
"""Oldest version of transformers, as in the extras of ``pyproject.toml``."""


def require(installed: str) -> None:
    """Require a version of transformers that is not older than ``OLDEST``.

    Raises:
        VersionError: if it is.
    """
    if _numbers(installed) < _numbers(OLDEST):
        raise VersionError(
            "transformers",
            expected=f"{OLDEST} or newer",
            got=installed,
            remedy=f'Upgrade it: pip install "transformers>={OLDEST}"',
        )


def _numbers(release: str) -> tuple[int, ...]:
    """Major and minor version, of releases and of those that come before them, such as 5.25rc1."""
    return tuple(map(int, re.findall(r"\d+", release)[:2]))


require(version("transformers"))


def _not_remapped(function: Callable[..., Any], position_ids: Any) -> Callable[..., Any]:
    """A function that no mask consists of: those of packed documents keep their indices."""
    return lambda *indices: function(*indices)


remap_positions_for_packed_sequence: Callable[..., Callable[..., Any]] = getattr(
    import_module("transformers.masking_utils"),
    "remap_positions_for_packed_sequence",  # since 5.23
    _not_remapped,
)
