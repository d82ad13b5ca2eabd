"""posenc's attention under models of transformers, in place; needs transformers."""

from posenc.integrations.transformers import versions  # noqa: F401 - first: it may refuse
from posenc.integrations.transformers.accelerate.api import accelerate, restore
from posenc.integrations.transformers.accelerate.family import FAMILIES, AcceleratedFamily
from posenc.integrations.transformers.accelerate.interface import register
from posenc.integrations.transformers.accelerate.report import AccelerateReport

__all__ = ["FAMILIES", "AccelerateReport", "AcceleratedFamily", "accelerate", "register", "restore"]
