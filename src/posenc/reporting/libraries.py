"""The scripts that draw the charts of a page: Vega, Vega-Lite and vega-embed in one text."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import vl_convert

from posenc.user_cache import cache_folder, opened_folder, read_file, write_file


def bundled() -> str:
    """The scripts, from the user's cache after the first time: to bundle them takes seconds."""
    path = _path()
    if path is not None:
        with suppress(OSError, UnicodeDecodeError), opened_folder(path.parent) as at:
            return read_file(path, at).decode()
    made: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub is wrong
    if path is not None:
        with suppress(OSError), opened_folder(path.parent, create=True) as at:
            write_file(path, at, made.encode())
    return made


def _path() -> Path | None:
    """The file of this version's scripts; None where no cache is kept."""
    if os.name == "posix":
        with suppress(OSError):
            return cache_folder("scripts") / f"vega-{version('vl-convert-python')}.js"
    return None
