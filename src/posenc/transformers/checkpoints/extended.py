"""Reading of extensions that only posenc supports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from posenc.transformers.checkpoints.fields import Fields

FIELD = "posenc_extension"
"""Field of ``config.json`` with method, factor, length and options, if transformers has none."""


def require_extension(fields: Fields) -> None:
    """Require method, factor, length and options of an extension.

    Raises:
        CheckpointError: for any other value.
    """
    extension = fields.values.get(FIELD)
    if (
        not isinstance(extension, Mapping)
        or set(extension) != {"method", "factor", "length", "options"}
        or not isinstance(extension["options"], Mapping)
    ):
        raise fields.wrong(FIELD, "method, factor, length and options", extension)


@contextmanager
def fitting(fields: Fields) -> Iterator[None]:
    """Turn errors of the extension of an arbitrary file into a ``CheckpointError``."""
    try:
        yield
    except Exception as error:
        raise fields.wrong(FIELD, "an extension that fits the model", error) from error
