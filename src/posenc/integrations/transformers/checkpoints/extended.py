"""Reading of extensions that only posenc supports."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from posenc.extension import extend_layers
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.models.replacing import encodings_of, with_encodings

FIELD = "posenc_extension"
"""Field of ``config.json`` with method, factor, length and options, if transformers has none."""


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
    context = {name: extension[name] for name in ("factor", "length")}
    try:
        encodings = extend_layers(
            encodings_of(model), extension["method"], **context, **extension["options"]
        )
    except Exception as error:  # an arbitrary file
        raise fields.wrong(FIELD, "an extension that fits the model", error) from error
    return with_encodings(model, encodings)
