"""Stretching of transformers models in place: ``stretch`` and ``restore``."""

from posenc.transformers import versions  # noqa: F401 - first: it may refuse
from posenc.transformers.stretching.api import restore, stretch
from posenc.transformers.stretching.changes import StretchedPart, StretchReport

__all__ = ["StretchReport", "StretchedPart", "restore", "stretch"]
