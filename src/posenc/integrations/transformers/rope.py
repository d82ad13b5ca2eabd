"""RoPE's parameters in ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.integrations.transformers.fields import Fields
from posenc.models import Decoder

__all__ = ["rope_options", "rope_parameters"]


def rope_options(
    fields: Fields, *, head_dim: int, base: str = "rope_theta", fraction: str, turned: float = 1.0
) -> dict[str, Any]:
    """Options of ``rope`` for a configuration.

    Recent files have them in ``rope_parameters``, older ones in fields of their own, beside
    ``rope_scaling``.

    Args:
        fields: the configuration.
        head_dim: width of a head.
        base, fraction: older names of the fields.
        turned: the fraction where the file has none.

    Raises:
        CheckpointError: when the frequencies are scaled in a way that is not supported.
    """
    found = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise fields.wrong("rope_parameters", "an object", found)
    parameters = Fields(found, fields.path)
    kind = found.get("rope_type", found.get("type", "default"))
    if kind != "default":
        raise fields.wrong("rope_type", "'default'", repr(kind))
    share = parameters.number("partial_rotary_factor", fields.number(fraction, turned))
    return {
        "base": parameters.number("rope_theta", fields.number(base, 10000.0)),
        "fraction": int(share * head_dim) / head_dim,
    }


def rope_parameters(model: Decoder) -> dict[str, Any]:
    """The same, the other way.

    Raises:
        ArgumentError: when the model's encoding is not RoPE as transformers has it.
    """
    record = model.encodings[0]
    rope = record.query_key
    if record.parts() != (rope,) or type(rope) is not Rope:
        raise ArgumentError(
            "model",
            expected="one encoded by rope alone",
            got=" and ".join(type(part).__name__ for part in record.parts()) or "no encoding",
            remedy="Save it by model.save(folder), which keeps every encoding.",
        )
    if rope.pairing != "half" or rope.log_frequencies is not None:
        raise ArgumentError(
            "model",
            expected="rope with pairing='half' and learned=False",
            got=f"pairing={rope.pairing!r}, learned={rope.log_frequencies is not None}",
            remedy="Save it by model.save(folder), which keeps every option.",
        )
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.base}
    if rope.turned != rope.head_dim:
        parameters["partial_rotary_factor"] = rope.turned / rope.head_dim
    return parameters
