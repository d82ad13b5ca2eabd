"""RoPE's fields of released models, and where each was confirmed (``SOURCES``).

``released.json`` has them as their config.json files do. LongRoPE's factors are made up
(``_with_factors``), of the released number. Of a config that is confirmed, the base, the rotated
width, the scaling and the longest text are the released ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TRAINED = "original_max_position_embeddings"

USUAL = ("transformers", "vLLM", "SGLang", "llama.cpp", "mlx-lm")
"""Engines of most families and scalings; those of few have tests of their own."""


def _with_factors(fields: dict[str, Any]) -> dict[str, Any]:
    """The object of a config; a number of LongRoPE's factors becomes the factors."""
    if "factors" in fields:
        pairs = fields.pop("factors")
        fields["short_factor"] = [1.0 + 0.05 * t for t in range(pairs)]
        fields["long_factor"] = [1.0 + 60.0 * t / pairs for t in range(pairs)]
    return fields


_TABLE = json.loads(
    Path(__file__).with_name("released.json").read_text(), object_hook=_with_factors
)
RELEASED: dict[str, dict[str, Any]] = _TABLE["models"]
SOURCES: dict[str, list[str]] = _TABLE["sources"]
"""Models by source; those of "" are written from memory and serve as shapes of configs.

GLM-4-9B's base is 10,000 times the ``rope_ratio`` of its config.json, 500.
"""
