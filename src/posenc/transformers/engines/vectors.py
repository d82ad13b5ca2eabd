"""Test vectors of RoPE for engines written by hand: cosines, sines and gains of every scaling."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posenc import __version__
from posenc.storage import write_bytes
from posenc.transformers.engines.config import ModelConfig
from posenc.transformers.engines.rotation import EngineRotation, RopeParameters
from posenc.transformers.engines.transformers import TRANSFORMERS

FORMAT, VERSION = "posenc rotation vectors", 1
"""Name of the format, and the number that rises with every change of what its fields mean."""

DIGITS = {"significant digits of frequencies and factors": 11, "decimals of cosines and sines": 8}
"""Precision: coarser than the last bits of a float64, in which C libraries differ."""

SIGNIFICANT, DECIMALS = DIGITS.values()

CONVENTIONS = (
    "frequencies: radians a token of each pair of features, slowest last; 0: the pair is unrotated",
    "cosines, sines: of position times frequency as written here, a row a position, without factor",
    "attention_factor: factor of cosines and sines, in queries and in keys",
    "logit_scale: further factor of all logits, to multiply a model's softmax scale by",
    "layer_type: empty if all layers rotate alike",
    "text_length: tokens of the text; null if the rotation does not depend on it",
)
"""The meaning of each field, written into the file."""

POSITIONS = (0, 1, 2, 3, 100, 4095, 16383)
"""Positions in each text that has them, before its last one."""

VARYING = frozenset({"dynamic", "longrope"})
"""Scalings that depend on the length of the text."""

CONFIGS: Mapping[str, Mapping[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
"""RoPE's fields of small models, a scaling each, and of released ones, by name.

The released ones are those of the models' own ``config.json``, in the form of transformers 5.
"""


def rotation_vectors() -> dict[str, Any]:
    """Test vectors of every scaling and of released models, as transformers 5 rotates them.

    Returns:
        JSON values: ``format``, ``version``, ``posenc`` (its version), ``rules`` (the sources that
        they follow), ``digits``, ``conventions`` (the meaning of each field) and ``cases``. A case
        has its ``config``, fields of a ``config.json``, and ``rotations`` by layer type and length.
        The same on every machine: no value is nearer to a tie of its rounding than the last bits
        of its computation.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "posenc": __version__,
        "rules": TRANSFORMERS.source,
        "digits": DIGITS,
        "conventions": CONVENTIONS,
        "cases": [
            {"name": name, "kind": kind, "config": config, "rotations": [*_rotations(config)]}
            for kind, configs in CONFIGS.items()
            for name, config in configs.items()
        ],
    }


def write_vectors(path: Path) -> int:
    """Write ``rotation_vectors()`` as JSON, a list of numbers a line; returns the number of cases.

    Raises:
        OutputError: if the file cannot be written.
    """
    values = rotation_vectors()
    text = json.dumps(values, indent=1, allow_nan=False)
    rows = re.sub(r"\[[^][{}\"]+\]", lambda row: " ".join(row[0].split()), text)
    write_bytes(path, (rows + "\n").encode())
    return len(values["cases"])


def _rotations(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rotations of a config, whose fields are complete without transformers' defaults."""
    config = ModelConfig(fields, fields)
    for layer_type, rope in TRANSFORMERS.ropes(config).items():
        longest = max(rope.longest, 2 * rope.length if rope.kind in VARYING else 0)
        lengths = (rope.length, rope.length + 1, longest) if rope.kind in VARYING else (None,)
        for length in lengths:
            rotation = TRANSFORMERS.rotations(config, length or longest)[layer_type]
            yield {
                "layer_type": layer_type,
                "text_length": length,
                **_written(rotation, length or longest),
                "logit_scale": _significant(_logit_scale(fields, rope)),
            }


def _written(rotation: EngineRotation, length: int) -> dict[str, Any]:
    frequencies = [_significant(theta) for theta in rotation.frequencies]
    positions = [position for position in POSITIONS if position < length - 1] + [length - 1]
    return {
        "frequencies": frequencies,
        "attention_factor": _significant(rotation.gain),
        "positions": positions,
        "cosines": [
            [round(math.cos(p * theta), DECIMALS) for theta in frequencies] for p in positions
        ],
        "sines": [
            [round(math.sin(p * theta), DECIMALS) for theta in frequencies] for p in positions
        ],
    }


def _logit_scale(fields: Mapping[str, Any], rope: RopeParameters) -> float:
    """The square of YaRN's gain by ``mscale_all_dim``, in models with latent attention."""
    every = rope.parameters.get("mscale_all_dim")
    return rope.usual_gain(every) ** 2 if every and fields.get("qk_rope_head_dim") else 1.0


def _significant(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT}g}")
