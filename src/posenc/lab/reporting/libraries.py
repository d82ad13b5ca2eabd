"""The scripts that draw the charts of a page: Vega, Vega-Lite and vega-embed in one text."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import vl_convert

from posenc.attention.user_cache import kept


def bundled() -> str:
    """The scripts, from the user's cache after the first time: to bundle them takes seconds."""
    make: Callable[[], str] = vl_convert.javascript_bundle  # type: ignore[assignment]  # a wrong stub
    name = f"vega-{version('vl-convert-python')}.js"
    return kept("scripts", name, make, read=bytes.decode, write=str.encode)
