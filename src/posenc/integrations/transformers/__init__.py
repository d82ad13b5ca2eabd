"""Reading and writing of transformers checkpoints, without importing transformers."""

from posenc.integrations.transformers.checkpoint import load, save
from posenc.integrations.transformers.families import FAMILIES
from posenc.integrations.transformers.family import Family, Written

__all__ = ["FAMILIES", "Family", "Written", "load", "save"]
