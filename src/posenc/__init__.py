"""Positional encodings for Transformers: exact, in every model, at the speed of attention."""

__version__ = "0.1.0"  # before modules that name it

from importlib import import_module
from typing import TYPE_CHECKING

from posenc.attention import Attention, Cache, attend, explain
from posenc.encoding import EmbeddingEncoding, Encoding, QueryKeyTransform, ScoreTerm, ValueTerm
from posenc.encoding.prepared import Prepared

# Exported programs may call the operators of these two.
from posenc.encodings.common import recurrence as _recurrence  # noqa: F401
from posenc.encodings.embedding import floater as _floater  # noqa: F401
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.registration import register
from posenc.registry import ENCODINGS, create, create_layers

if TYPE_CHECKING:
    from posenc import extension as extension
    from posenc import lab as lab
    from posenc import models as models
    from posenc import testing as testing
    from posenc import transformers as transformers

__all__ = [
    "ENCODINGS",
    "Attention",
    "Cache",
    "EmbeddingEncoding",
    "Encoding",
    "Grid",
    "Layout",
    "Prepared",
    "QueryKeyTransform",
    "ScoreTerm",
    "ValueTerm",
    "attend",
    "create",
    "create_layers",
    "explain",
    "register",
]

_LAZY = ("extension", "lab", "models", "testing", "transformers")
"""Subpackages that are imported at their first use as ``posenc.NAME``."""


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return import_module(f"posenc.{name}")
    raise AttributeError(f"module 'posenc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
