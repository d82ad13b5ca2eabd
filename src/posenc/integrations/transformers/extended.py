"""Configuration of extended models: transformers' fields, or a field of posenc's own."""

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
"""Field of ``config.json`` with method, factor, length and options, if transformers has none."""


def extension_field(
    method: str, *, factor: float, length: float, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The field for an extended model; the others describe the original model."""
    described = {"method": method, "factor": factor, "length": length, "options": dict(options)}
    return {FIELD: described}


def extended(model: nn.Module, fields: Fields) -> nn.Module:
    """The model with the extension of its configuration applied, if there is one.

    Raises:
        CheckpointError: if the extension is invalid.
    """
    extension = fields.values.get(FIELD)
    if extension is None:
        return model
    keys = {"method", "factor", "length", "options"}
    if not isinstance(extension, Mapping) or set(extension) != keys:
        raise fields.wrong(FIELD, "method, factor, length and options", extension)
    try:
        encodings = extend_layers(
            encodings_of(model),
            extension["method"],
            factor=extension["factor"],
            length=extension["length"],
            **extension["options"],
        )
    except Exception as error:  # an arbitrary file
        raise fields.wrong(FIELD, "an extension that fits the model", error) from error
    return with_encodings(model, encodings)


def native_fields(
    method: str, original: Encoding, *, factor: float, length: float, options: Mapping[str, Any]
) -> dict[str, Any]:
    """``rope_parameters`` of a method that transformers supports; empty for others."""
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
            remedy="Omit the others.",
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
"""``rope_type`` of each method, and its options' names and defaults in transformers."""
