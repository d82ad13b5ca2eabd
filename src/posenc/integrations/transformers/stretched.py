"""Writing a stretched model, so that transformers runs it where it can."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.integrations.transformers.checkpoint import save
from posenc.integrations.transformers.config import Fields
from posenc.integrations.transformers.extended import FIELD, extension_field, native_fields
from posenc.models.replacing import with_encodings

__all__ = ["is_stretched", "save_stretched"]


def save_stretched(
    model: nn.Module,
    folder: Path | str,
    *,
    like: Path | str | Fields,
    originals: list[Encoding],
    method: str,
    factor: float,
    length: int,
    options: Mapping[str, Any],
) -> bool:
    """Write a stretched model as a checkpoint of the family that it came from.

    Where transformers has the encoding, ``config.json`` says it in transformers' words, and
    ``max_position_embeddings`` is the new length. Elsewhere it describes the model as it was
    trained, so that transformers runs that, and ``posenc_extension`` says what
    ``posenc.integrations.transformers.load`` makes of it.

    Args:
        model: stretched.
        folder: new, or empty; it appears whole or not at all.
        like: the checkpoint that it came from, or the fields of its ``config.json``.
        originals: the record of each block as trained.
        method, factor, length, options: as for ``posenc.extension.extend``.

    Returns:
        Whether transformers has it.

    Raises: as ``save``.
    """
    fields = like if isinstance(like, Fields) else Fields.read(Path(like))
    family = str(fields.get("model_type"))
    whole = round(factor * length)
    grown: dict[str, Any] = {}
    if originals[0].query_key is not None:
        # A table's length is found from it, a rope's is not; dynamic NTK's is the trained one.
        grown["max_position_embeddings"] = length if method == "dynamic_ntk" else whole
    try:
        native = native_fields(method, originals[0], factor=factor, length=length, options=options)
        save(model, folder, family=family, like=fields, fields={**grown, **native})
    except ArgumentError:
        described = extension_field(method, factor=factor, length=length, options=options)
        plain = with_encodings(model, originals)
        save(plain, folder, family=family, like=fields, fields=described)
        return False
    return True


def is_stretched(folder: Path | str) -> bool:
    """Whether a checkpoint has been stretched in a way that only posenc knows.

    Raises:
        CheckpointError: when it is no checkpoint.
    """
    return FIELD in Fields.read(Path(folder)).values
