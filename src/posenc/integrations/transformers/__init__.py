"""Checkpoints of transformers, and its models stretched in place.

Only ``stretch`` and ``restore`` import transformers.
"""

from typing import TYPE_CHECKING, Any

from posenc.integrations.transformers.checkpoints.families import FAMILIES
from posenc.integrations.transformers.checkpoints.family import Family, Written
from posenc.integrations.transformers.checkpoints.folder import load, save

if TYPE_CHECKING:
    from posenc.integrations.transformers.stretching import restore, stretch

__all__ = ["FAMILIES", "Family", "Written", "load", "restore", "save", "stretch"]


def __getattr__(name: str) -> Any:
    if name in ("restore", "stretch"):
        from posenc.integrations.transformers import stretching

        return getattr(stretching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
