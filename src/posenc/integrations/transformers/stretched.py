"""Writing of extended models, for transformers where it supports the method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.integrations.transformers.checkpoint import save
from posenc.integrations.transformers.config import Fields
from posenc.integrations.transformers.extended import FIELD
from posenc.integrations.transformers.families import FAMILIES
from posenc.integrations.transformers.family import family_name
from posenc.integrations.transformers.rope import SCALINGS, TRAINED, yarn_gain
from posenc.models.replacing import with_encodings

RAMP = {"alpha": "low", "beta": "high"}
"""Options of ``ntk_by_parts`` by their names in ``llama3``."""


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
    """Write an extended model atomically as a checkpoint of its original family.

    If transformers supports the encoding, ``config.json`` describes it, with the new length as
    ``max_position_embeddings``. Otherwise it describes the original model, which transformers then
    runs, and ``posenc_extension`` the extension for ``posenc.integrations.transformers.load``.

    Args:
        model: the extended model.
        folder: new or empty.
        like: the original checkpoint, or the fields of its ``config.json``.
        originals: the original encoding of each block.
        method, factor, length, options: as for ``posenc.extension.extend``.

    Returns:
        True if transformers supports it.

    Raises: as ``save``.
    """
    fields = like if isinstance(like, Fields) else Fields.read(Path(like))
    family = str(fields.get("model_type"))
    whole = round(factor * length)
    grown: dict[str, Any] = {}
    if originals[0].query_key is not None:
        # a table has its own length, rope does not; dynamic NTK keeps the trained length
        grown["max_position_embeddings"] = length if method == "dynamic_ntk" else whole
    context: dict[str, Any] = {"factor": factor, "length": length, "options": dict(options)}
    extension = {"method": method, **context}
    try:
        native = _native_fields(originals[0], fields, method=method, **context)
        save(model, folder, family=family, like=fields, fields={**grown, **native})
    except ArgumentError:
        plain = with_encodings(model, originals)
        save(plain, folder, family=family, like=fields, fields={FIELD: extension})
        return False
    return True


def _native_fields(
    original: Encoding,
    fields: Fields,
    *,
    method: str,
    factor: float,
    length: int,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Fields of a method that transformers names; empty if they are derived from the model."""
    part = original.query_key
    rope = FAMILIES[family_name(str(fields.get("model_type")))].rope
    if rope is None or not isinstance(part, Rope) or part.divisors is not None or part.gain != 1:
        return {}
    if method == "ntk_by_parts":  # Llama 3's ramp with other ends
        options = {RAMP.get(name, name): value for name, value in options.items()}
        method, options = "llama3", {"low": 1.0, "high": 32.0, **options}
    kinds = {ours: kind for kind, (ours, _) in SCALINGS.items() if kind != "longrope"}
    if method not in kinds or options.get("low") == 0:  # llama3 of transformers divides by it
        return {}
    kind = kinds[method]
    names = SCALINGS[kind][1]
    if set(options) - set(names):
        raise ArgumentError(
            "options",
            expected=f"of {', '.join(names) or 'none'}",
            got=", ".join(options),
            remedy="Omit the others.",
        )
    written = {theirs: options.get(ours, default) for ours, (theirs, default) in names.items()}
    if kind == "yarn":
        written |= yarn_gain(factor, written.pop("attention_factor"))
    if kind in ("yarn", "llama3"):
        written[TRAINED] = length
    parameters = {
        "rope_type": kind,
        "rope_theta": part.base,
        "partial_rotary_factor": part.fraction,
        "factor": factor,
        **written,
    }
    return rope.described(parameters, fields)


def is_stretched(folder: Path | str) -> bool:
    """True if a checkpoint has an extension that only posenc supports.

    Raises:
        CheckpointError: if it is not a checkpoint.
    """
    return FIELD in Fields.read(Path(folder)).values
