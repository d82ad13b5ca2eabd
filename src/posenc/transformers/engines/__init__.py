"""RoPE of a ``config.json`` in the engines that serve it, by rules transcribed from their sources.

Each engine is a module with its rules as a table, their source and date.
"""

from posenc.transformers.engines.comparison import ENGINES, Served, compare, differences
from posenc.transformers.engines.config import ModelConfig
from posenc.transformers.engines.loaded import Checked, check
from posenc.transformers.engines.remedy import ConfigRemedy, right_in_all
from posenc.transformers.engines.rotation import EngineRotation

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
