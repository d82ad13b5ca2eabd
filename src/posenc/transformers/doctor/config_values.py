"""Values of a ``config.json`` by which positions are computed, held to their types and ranges."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posenc.arguments import EXACT
from posenc.errors import CheckpointError
from posenc.transformers.checkpoints import Fields
from posenc.transformers.doctor.config_findings import Finding
from posenc.transformers.engines.config import LAYERS, PARTS, WINDOWS, completed, is_known

Config = Mapping[str, Any]
Wrong = tuple[tuple[str, ...], str, Any]
"""Names that lead to a value, the valid ones in words, and the value."""


@dataclass(frozen=True)
class FieldKind:
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


def _at_most(limit: int) -> Callable[[Any], bool]:
    """Valid for whole numbers, or those of stages or parts, up to a limit; for all else too."""

    def valid(value: Any) -> bool:
        parts = value.values() if isinstance(value, Mapping) else value
        parts = parts if isinstance(value, list | Mapping) else (value,)
        return not any(type(part) is int and part > limit for part in parts)

    return valid


HEADS = ("num_attention_heads", "n_head", "num_key_value_heads")
WIDTHS = ("hidden_size", "n_embd")
LENGTHS = ("max_position_embeddings", "n_positions", "original_max_position_embeddings")

LIMITS = {
    2**10: (
        *LAYERS,
        "num_encoder_layers",
        "num_decoder_layers",
        "encoder_layers",
        "decoder_layers",
    ),
    2**13: (*HEADS, "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads"),
    2**16: ("head_dim", "global_head_dim", "qk_rope_head_dim", "d_kv"),
    2**20: (*WIDTHS, "d_model", "dim", "embed_dim"),
    2**31: ("vocab_size",),
    EXACT: LENGTHS,
}
"""Fields by a size beyond those of all models, from which on a model takes hours to build."""


SIZES = (
    FieldKind("a name", lambda value: isinstance(value, str), ("model_type",)),
    FieldKind("a whole number of 1 or more", _counts, (*WIDTHS, *HEADS, *LAYERS)),
    *(FieldKind(f"at most {most:,}", _at_most(most), names) for most, names in LIMITS.items()),
    FieldKind("a whole number", lambda value: type(value) is int and value >= 0, ("head_dim",)),
    FieldKind(
        "a number of tokens, 1 or more", lambda value: _is_number(value) and value >= 1, LENGTHS
    ),
    FieldKind(
        "a whole number of tokens, or -1", lambda value: type(value) is int and value >= -1, WINDOWS
    ),
    FieldKind("a number", _is_number, ("attn_logit_softcapping",)),
    FieldKind(
        "a list of names",
        lambda value: isinstance(value, list) and all(isinstance(kind, str) for kind in value),
        ("layer_types", "architectures"),
    ),
    FieldKind(
        "an object",
        lambda value: isinstance(value, Mapping),
        (*PARTS, "rope_scaling", "rope_parameters"),
    ),
)

ROPE = (
    FieldKind("a name", lambda value: isinstance(value, str), ("rope_type", "type")),
    FieldKind("a number above 1", lambda value: _is_number(value) and value > 1, ("rope_theta",)),
    FieldKind("a number above 0", _above_zero, ("factor", "beta_fast", "beta_slow")),
    FieldKind(
        "a share from 0 to 1",
        lambda value: _is_number(value) and 0 <= value <= 1,
        ("partial_rotary_factor", "rotary_pct"),
    ),
    FieldKind(
        "a number",
        _is_number,
        ("low_freq_factor", "high_freq_factor", "attention_factor", "mscale", "mscale_all_dim"),
    ),
    FieldKind(
        "a list of numbers above 0",
        lambda value: isinstance(value, list) and all(map(_above_zero, value)),
        ("short_factor", "long_factor"),
    ),
    *(kind for kind in SIZES if kind.names is LENGTHS),
)
"""Fields of RoPE's parameters; those of a config beside them are valid alike."""

TOP_LEVEL_TOO = ("rope_theta", "partial_rotary_factor", "rotary_pct")
"""Fields of RoPE that a config has outside of its parameters too."""


ROTATION = (*TOP_LEVEL_TOO, "rope_scaling", "rope_parameters")
"""Fields without which nothing is known of a rotation."""


def readable(fields: Fields) -> tuple[Config, list[Finding]]:
    """The values by which positions can be computed, and findings on those that are left out.

    Values by layer, where one number is usual, are those of the model's class in transformers if
    it reads them. Those that code of the model's own reads (``auto_map``, or a ``model_type`` that
    transformers does not know) are left out, and of a rotation all fields.

    Raises:
        CheckpointError: for the first other value that is not valid; null and missing ones are.
    """
    values: Config = fields.values
    unreadable: list[Finding] = []
    for place in ("", *PARTS):
        part = values.get(place) if place else values
        if not isinstance(part, Mapping):
            continue
        wrong = list(_invalid(part))
        if wrong:
            by_layer = all(isinstance(value, list | Mapping) for *_, value in wrong)
            read = _as_class_reads(values, place) if by_layer else None
            if read is None:
                unreadable += _left_out(fields, wrong, place)
                read = _without({names[0] for names, *_ in wrong}, part)
            part = read
        values = {**values, place: part} if place else dict(part)
    return values, unreadable


def _as_class_reads(values: Config, place: str) -> Config | None:
    """A part as transformers completes it; None where that holds values that are not valid."""
    completed_fields = completed(values)
    made = completed_fields.get(place) if place else completed_fields
    return made if isinstance(made, Mapping) and not any(_invalid(made)) else None


def _left_out(fields: Fields, wrong: list[Wrong], place: str) -> Iterator[Finding]:
    """Findings on values by layer that the model's own code reads.

    Raises:
        CheckpointError: for the first value that is something else.
    """
    kind = fields.values.get("model_type")
    custom_code = "auto_map" in fields.values or not is_known(kind)
    for names, expected, value in wrong:
        name = ".".join((place, *names) if place else names)
        if not custom_code or not isinstance(value, list | Mapping):
            raise CheckpointError(
                f"{name} in {fields.path}",
                expected=expected,
                got=json.dumps(value),
                remedy="Correct it in this file, or save the config anew by save_pretrained.",
            )
        code = "auto_map" if "auto_map" in fields.values else f"model_type {kind!r}"
        usual = "one value"
        if names[0] in ROTATION:
            usual = '"rope_parameters" by layer type'
        yield Finding(
            name,
            f"has {len(value)} values, which code of the model's own ({code}) reads and posenc "
            f"does not: {_consequence(names[0])}",
            f"{usual} into a copy of config.json, for posenc alone",
            unread=True,
        )


def _consequence(name: str) -> str:
    if name in ROTATION:
        return "how these layers rotate is not known"
    return "what it says of these layers is not known"


def _without(names: set[str], part: Config) -> Config:
    left_out = names | (set(ROTATION) if names & set(ROTATION) else set())
    return {name: value for name, value in part.items() if name not in left_out}


def _invalid(config: Config) -> Iterator[Wrong]:
    """Values of a part that are not valid."""
    yield from _of(config, SIZES)
    yield from _of({name: config.get(name) for name in TOP_LEVEL_TOO}, ROPE)
    types = config.get("layer_types")
    types = types if isinstance(types, list) else ()
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if not isinstance(rope, Mapping):
            continue
        yield from _of(rope, ROPE, name)
        for kind, part in rope.items():
            if isinstance(part, Mapping):
                yield from _of(part, ROPE, name, kind)
            elif kind in types and part is not None:
                yield (name, kind), "an object", part


def _of(values: Config, kinds: tuple[FieldKind, ...], *names: str) -> Iterator[Wrong]:
    for kind in kinds:
        for name in kind.names:
            value = values.get(name)
            if value is not None and not kind.valid(value):
                yield (*names, name), kind.words, value
