"""RoPE of a ``config.json`` in the engines that serve it, by rules transcribed from their sources.

Each engine is a module with its rules as a table, their source and date.
"""

from posenc.evaluation.engines.comparison import ENGINES, Served, compare, differences
from posenc.evaluation.engines.config import ModelConfig
from posenc.evaluation.engines.loaded import Checked, check
from posenc.evaluation.engines.remedy import ConfigRemedy, right_in_all
from posenc.evaluation.engines.rotation import EngineRotation

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
