"""RoPE of a ``config.json`` in the engines that serve it, by rules transcribed from their sources.

Each engine is a module with its rules as a table, their source and date.
"""

from posenc.transformers.engines.comparison import (
    ENGINES,
    ConfigRemedy,
    Served,
    compare,
    differences,
    right_in_all,
)
from posenc.transformers.engines.config import ModelConfig
from posenc.transformers.engines.rotation import EngineRotation
from posenc.transformers.engines.transformers import Checked, check

__all__ = [
    "ENGINES",
    "Checked",
    "ConfigRemedy",
    "EngineRotation",
    "ModelConfig",
    "Served",
    "check",
    "compare",
    "differences",
    "right_in_all",
]
