"""Reading of extensions that only posenc supports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from posenc.extension import extend_layers
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.models.replacing import encodings_of, with_encodings

FIELD = "posenc_extension"
"""Field of ``config.json`` with method, factor, length and options, if transformers has none."""


def stored_extension(fields: Fields) -> Mapping[str, Any] | None:
    """Method, factor, length and options of an extension; None without one.

    Raises:
        CheckpointError: for any other value.
    """
    extension = fields.values.get(FIELD)
    if extension is None:
        return None
    keys = {"method", "factor", "length", "options"}
    is_record = isinstance(extension, Mapping) and set(extension) == keys
    if not is_record or not isinstance(extension["options"], Mapping):
        raise fields.wrong(FIELD, "method, factor, length and options", extension)
    return extension


def extended(model: nn.Module, fields: Fields) -> nn.Module:
    """The model with the extension of its configuration applied, if there is one.

    Raises:
        CheckpointError: if the extension is invalid.
    """
    extension = stored_extension(fields)
    if extension is None:
        return model
    context = {name: extension[name] for name in ("factor", "length")}
    with fitting(fields):
        encodings = extend_layers(
            encodings_of(model), extension["method"], **context, **extension["options"]
        )
    return with_encodings(model, encodings)


@contextmanager
def fitting(fields: Fields) -> Iterator[None]:
    """Turn errors of the extension of an arbitrary file into a ``CheckpointError``."""
    try:
        yield
    except Exception as error:
        raise fields.wrong(FIELD, "an extension that fits the model", error) from error
