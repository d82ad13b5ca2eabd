"""posenc's attention under models of transformers, in place; needs transformers."""

from posenc.transformers import versions  # noqa: F401 - first: it may refuse
from posenc.transformers.acceleration.accelerated import FAMILIES, AcceleratedFamily
from posenc.transformers.acceleration.api import AccelerateReport, accelerate, restore
from posenc.transformers.acceleration.interface import register

__all__ = ["FAMILIES", "AccelerateReport", "AcceleratedFamily", "accelerate", "register", "restore"]
