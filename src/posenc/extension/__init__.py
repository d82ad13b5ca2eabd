"""Extension of trained encodings to longer inputs.

Each method of ``EXTENSIONS`` is here by its name, such as ``posenc.extension.yarn``.
"""

from collections.abc import Callable
from typing import Any

from posenc.extension.entry import Extension, ExtensionClaims
from posenc.extension.fitting import NotApplicable
from posenc.extension.registry import EXTENSIONS, advice, applicable, extend, extend_layers
from posenc.extension.search import Found, SearchSettings, Tried, search_factors

__all__ = [
    "EXTENSIONS",
    "Extension",
    "ExtensionClaims",
    "Found",
    "NotApplicable",
    "SearchSettings",
    "Tried",
    "advice",
    "applicable",
    "extend",
    "extend_layers",
    "search_factors",
]


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__") or name not in EXTENSIONS:
        raise AttributeError(f"module 'posenc.extension' has no attribute {name!r}")
    return EXTENSIONS[name].function


def __dir__() -> list[str]:
    return sorted([*globals(), *EXTENSIONS])
