"""A trained encoding at a new length: each method from an encoding to an encoding."""

from posenc.extension.entry import Extension, ExtensionClaims
from posenc.extension.fitting import Misfit
from posenc.extension.methods.direct import direct
from posenc.extension.methods.drope import drope
from posenc.extension.methods.dual_chunk import dual_chunk
from posenc.extension.methods.dynamic_ntk import dynamic_ntk
from posenc.extension.methods.hierarchical import hierarchical
from posenc.extension.methods.interpolate import interpolate
from posenc.extension.methods.leaky_rerope import leaky_rerope
from posenc.extension.methods.llama3 import llama3
from posenc.extension.methods.log_n import log_n
from posenc.extension.methods.longrope import longrope
from posenc.extension.methods.ntk import ntk
from posenc.extension.methods.ntk_by_parts import ntk_by_parts
from posenc.extension.methods.radix_base import radix_base
from posenc.extension.methods.random_tail import random_tail
from posenc.extension.methods.rerope import rerope
from posenc.extension.methods.segments import segments
from posenc.extension.methods.self_extend import self_extend
from posenc.extension.methods.string import string
from posenc.extension.methods.yarn import yarn
from posenc.extension.registry import EXTENSIONS, advice, applicable, extend, extend_layers
from posenc.extension.search import Found, Plan, Tried, search_factors

__all__ = [
    "EXTENSIONS",
    "Extension",
    "ExtensionClaims",
    "Found",
    "Misfit",
    "Plan",
    "Tried",
    "advice",
    "applicable",
    "direct",
    "drope",
    "dual_chunk",
    "dynamic_ntk",
    "extend",
    "extend_layers",
    "hierarchical",
    "interpolate",
    "leaky_rerope",
    "llama3",
    "log_n",
    "longrope",
    "ntk",
    "ntk_by_parts",
    "radix_base",
    "random_tail",
    "rerope",
    "search_factors",
    "segments",
    "self_extend",
    "string",
    "yarn",
]
