"""Families of transformers checkpoints, one per file."""

from posenc.integrations.transformers.checkpoints.family import Family
from posenc.registration import Registry

__all__ = ["FAMILIES"]

FAMILIES: Registry[Family] = Registry(
    Family,
    "family",
    "posenc.integrations.transformers.checkpoints.families",
    group="posenc.families",
)
"""Families by ``model_type``, its hyphens as underscores (see ``family_name``)."""
