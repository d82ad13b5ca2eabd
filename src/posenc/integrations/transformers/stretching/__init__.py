"""Stretching of transformers models in place: ``stretch`` and ``restore``."""

from posenc.integrations.transformers import versions  # noqa: F401 - first: it may refuse
from posenc.integrations.transformers.stretching.api import restore, stretch
from posenc.integrations.transformers.stretching.report import StretchedPart, StretchReport

__all__ = ["StretchReport", "StretchedPart", "restore", "stretch"]
