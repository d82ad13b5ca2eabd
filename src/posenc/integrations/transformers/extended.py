"""Checkpoints of stretched models: in transformers' words, or with what posenc needs beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.extension import extend_layers
from posenc.integrations.transformers.config import Fields
from posenc.models.replacing import encodings_of, with_encodings

__all__ = ["FIELD", "extended", "extension_field", "native_fields"]

FIELD = "posenc_extension"
"""In ``config.json``: method, factor, length and options where transformers has no words."""


def extension_field(
    method: str, *, factor: float, length: float, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What ``config.json`` says of a stretched model beside describing the one before."""
    described = {"method": method, "factor": factor, "length": length, "options": dict(options)}
    return {FIELD: described}


def extended(model: nn.Module, fields: Fields) -> nn.Module:
    """The model as its configuration says that posenc stretched it; most: itself.

    Raises:
        CheckpointError: when that cannot be done.
    """
    found = fields.values.get(FIELD)
    if found is None:
        return model
    if not isinstance(found, Mapping) or set(found) != {"method", "factor", "length", "options"}:
        raise fields.wrong(FIELD, "method, factor, length and options", found)
    try:
        encodings = extend_layers(
            encodings_of(model),
            found["method"],
            factor=found["factor"],
            length=found["length"],
            **found["options"],
        )
    except Exception as error:  # a file can say anything
        raise fields.wrong(FIELD, "an extension that fits the model", error) from error
    return with_encodings(model, encodings)


def native_fields(
    method: str, original: Encoding, *, factor: float, length: float, options: Mapping[str, Any]
) -> dict[str, Any]:
    """``rope_parameters`` of a method that transformers knows by name; empty for others."""
    part = original.query_key
    base = getattr(part, "base", None)
    if method not in NATIVE or base is None:
        return {}
    kind, names = NATIVE[method]
    parameters: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": base,
        "partial_rotary_factor": getattr(part, "fraction", 1.0),
        "factor": factor,
    }
    if method in ("yarn", "llama3"):
        parameters["original_max_position_embeddings"] = int(length)
    for ours, (theirs, default) in names.items():
        value = options.get(ours, default)
        if value is not None:
            parameters[theirs] = value
    if set(options) - set(names):
        raise ArgumentError(
            "options",
            expected=f"of {', '.join(names) or 'none'}",
            got=", ".join(options),
            remedy="Leave them out.",
        )
    return {"rope_parameters": parameters, "rope_scaling": parameters}


NATIVE: dict[str, tuple[str, dict[str, tuple[str, Any]]]] = {
    "interpolate": ("linear", {}),
    "dynamic_ntk": ("dynamic", {}),
    "llama3": ("llama3", {"low": ("low_freq_factor", 1.0), "high": ("high_freq_factor", 4.0)}),
    "yarn": (
        "yarn",
        {
            "alpha": ("beta_slow", 1.0),
            "beta": ("beta_fast", 32.0),
            "truncate": ("truncate", True),
            "temperature": ("attention_factor", None),
        },
    ),
}
"""By method: ``rope_type``, and what its options are called there, with their defaults."""
