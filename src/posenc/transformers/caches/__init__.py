"""Caches of transformers whose keys are rotated to other positions: ``moved`` and ``joined``."""

from posenc.transformers import versions  # noqa: F401 - first: it may refuse
from posenc.transformers.caches.moving import joined, moved

__all__ = ["joined", "moved"]
