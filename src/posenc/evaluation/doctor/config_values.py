"""Values of a ``config.json`` by which positions are computed, held to their types and ranges."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posenc.errors import CheckpointError
from posenc.integrations.transformers.checkpoints.fields import Fields

TEXT = "text_config"


@dataclass(frozen=True)
class Kind:
    """Valid values of some fields.

    Args:
        words: for the message.
        valid: True for them.
        names: of the fields.
    """

    words: str
    valid: Callable[[Any], bool]
    names: tuple[str, ...]


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _above_zero(value: Any) -> bool:
    return _is_number(value) and value > 0


def _counts(value: Any) -> bool:
    """A whole number of 1 or more, or those of stages or parts."""
    parts = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, list | Mapping):
        return all(type(part) is int and part >= 0 for part in parts)
    return type(value) is int and value >= 1


SIZES = (
    Kind("a name", lambda value: isinstance(value, str), ("model_type",)),
    Kind(
        "a whole number of 1 or more",
        _counts,
        (
            *("hidden_size", "n_embd", "num_attention_heads", "n_head", "num_key_value_heads"),
            *("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        ),
    ),
    Kind("a whole number", lambda value: type(value) is int and value >= 0, ("head_dim",)),
    Kind(
        "a number of tokens, 1 or more",
        lambda value: _is_number(value) and value >= 1,
        ("max_position_embeddings", "n_positions", "original_max_position_embeddings"),
    ),
    Kind(
        "a whole number of tokens",
        lambda value: isinstance(value, int),
        ("sliding_window", "attention_chunk_size", "local_attention"),
    ),
    Kind("a number", _is_number, ("attn_logit_softcapping",)),
    Kind(
        "a list of names",
        lambda value: isinstance(value, list) and all(isinstance(kind, str) for kind in value),
        ("layer_types",),
    ),
    Kind(
        "an object",
        lambda value: isinstance(value, Mapping),
        (TEXT, "rope_scaling", "rope_parameters"),
    ),
)

ROPE = (
    Kind("a name", lambda value: isinstance(value, str), ("rope_type", "type")),
    Kind("a number above 0", _above_zero, ("rope_theta", "factor", "beta_fast", "beta_slow")),
    Kind(
        "a number of 0 or more",
        lambda value: _is_number(value) and value >= 0,
        ("partial_rotary_factor", "rotary_pct"),
    ),
    Kind(
        "a number",
        _is_number,
        ("low_freq_factor", "high_freq_factor", "attention_factor", "mscale", "mscale_all_dim"),
    ),
    Kind(
        "a list of numbers above 0",
        lambda value: isinstance(value, list) and all(map(_above_zero, value)),
        ("short_factor", "long_factor"),
    ),
    *(kind for kind in SIZES if "original_max_position_embeddings" in kind.names),
)
"""Fields of RoPE's parameters; those of a config beside them are valid alike."""

BESIDE = ("rope_theta", "partial_rotary_factor", "rotary_pct")
"""Fields of RoPE that a config has outside of its parameters too."""


def require_values(fields: Fields) -> None:
    """Require values by which positions can be computed; null and missing ones are valid.

    Raises:
        CheckpointError: for the first other one.
    """
    _require_part(fields, fields.values, "")
    text = fields.values.get(TEXT)
    if isinstance(text, Mapping):
        _require_part(fields, text, f"{TEXT}.")


def _require_part(fields: Fields, config: Mapping[str, Any], where: str) -> None:
    _require(fields, config, SIZES, where)
    _require(fields, {name: config.get(name) for name in BESIDE}, ROPE, where)
    types = config.get("layer_types") or ()
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        _require(fields, rope, ROPE, f"{where}{name}.")
        for kind, part in rope.items():
            if kind in types and part is not None and not isinstance(part, Mapping):
                raise _wrong(fields, f"{where}{name}.{kind}", "an object", part)
            if isinstance(part, Mapping):
                _require(fields, part, ROPE, f"{where}{name}.{kind}.")


def _require(
    fields: Fields, values: Mapping[str, Any], kinds: tuple[Kind, ...], where: str
) -> None:
    for kind in kinds:
        for name in kind.names:
            value = values.get(name)
            if value is not None and not kind.valid(value):
                raise _wrong(fields, where + name, kind.words, value)


def _wrong(fields: Fields, name: str, expected: str, got: object) -> CheckpointError:
    return CheckpointError(
        f"{name} in {fields.path}",
        expected=expected,
        got=json.dumps(got),
        remedy="Correct it in this file, or save the config anew by save_pretrained.",
    )
