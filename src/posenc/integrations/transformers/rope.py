"""RoPE's parameters in ``config.json``, with and without extension."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.extension import extend
from posenc.extension.methods.dynamic_ntk import DynamicNtkRope
from posenc.extension.methods.longrope import LongRope
from posenc.integrations.transformers.config import Fields
from posenc.models import Decoder, DecoderConfig

__all__ = ["RopeFields", "rope_decoder"]


@dataclass(frozen=True, kw_only=True)
class RopeFields:
    """Names of RoPE's parameters in a family.

    Recent files have ``rope_parameters``, older ones separate fields and ``rope_scaling``.

    Args:
        base, fraction: the older fields.
        rotated: default fraction of a head.
        partial: transformers supports rotating a fraction of a head in this family.
    """

    base: str = "rope_theta"
    fraction: str = "partial_rotary_factor"
    rotated: float = 1.0
    partial: bool = False

    def read(self, fields: Fields, *, head_dim: int) -> Encoding:
        """The encoding of each layer.

        Raises:
            CheckpointError: for an unsupported scaling.
        """
        values = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
        if not isinstance(values, Mapping):
            raise fields.wrong("rope_parameters", "an object", values)
        parameters = Fields(values, fields.path)
        share = fields.number(self.fraction, self.rotated)
        share = parameters.number("partial_rotary_factor", share)
        if share != 1.0 and not self.partial:
            raise fields.wrong("partial_rotary_factor", "1 in this family", share)
        rope = Rope(
            head_dim=head_dim,
            base=parameters.number("rope_theta", fields.number(self.base, 10000.0)),
            fraction=int(share * head_dim) / head_dim,
        )
        kind = values.get("rope_type", values.get("type", "default"))
        if kind == "default":
            return Encoding.of(rope)
        if kind not in METHODS:
            raise fields.wrong("rope_type", f"default, {', '.join(METHODS)}", repr(kind))
        method, options = METHODS[kind]
        stretched = extend(Encoding.of(rope), method, **options(parameters, fields))
        part = stretched.query_key
        if isinstance(part, LongRope) and part.long == part.short:
            # equal factors for every length: plain rope
            return Encoding.of(rope.stretched(part.long, gain=part.gain))
        return stretched

    def write(self, model: Decoder, like: Fields) -> dict[str, Any]:
        """The fields of the model's encoding; those of ``like`` if they are equivalent.

        Any method that divides frequencies is written as LongRoPE with equal factors for short and
        long texts.

        Raises:
            ArgumentError: if transformers lacks the encoding.
        """
        encoding = model.encodings[0]
        if any(_traits(other) != _traits(encoding) for other in model.encodings):
            raise _unknown("one encoding for all layers", "several")
        head_dim = model.config.head_dim or model.config.dim // model.config.heads
        named = {"rope_parameters", "rope_scaling", self.base} & set(like.values)
        if named and _alike(self.read(like, head_dim=head_dim), encoding):
            return {}
        parameters = _parameters(encoding)
        fraction = parameters["partial_rotary_factor"]
        if not self.partial and fraction != 1.0:
            raise _unknown("rope with fraction=1 for this family", f"fraction={fraction:g}")
        changes = {
            "rope_parameters": parameters,
            # for versions before rope_parameters
            "rope_scaling": None if parameters["rope_type"] == "default" else parameters,
            self.base: parameters["rope_theta"],
            self.fraction: fraction,
        }
        part = encoding.query_key
        if isinstance(part, DynamicNtkRope):
            changes["max_position_embeddings"] = int(part.length)
        return changes


def rope_decoder(encoding: Encoding, **fields: Any) -> Decoder:
    """A decoder with this encoding in each layer; by name if possible."""
    part = _known(encoding)
    rope = part if isinstance(part, Rope) else part.rope
    options: dict[str, Any] = {"base": rope.base, "fraction": rope.fraction}
    if rope.divisors is not None:
        options |= {"divisors": rope.divisors, "gain": rope.gain}
    config = DecoderConfig(**fields, encoding="rope", options=options)
    named = isinstance(part, Rope)
    return Decoder(config, encodings=None if named else [encoding] * config.layers)


def _length(parameters: Fields, fields: Fields) -> int:
    """The trained length, which an extended model's configuration keeps."""
    for place in (fields, parameters):
        length = place.optional_count("original_max_position_embeddings")
        if length is not None:
            return length
    return fields.count("max_position_embeddings")


def _factor(parameters: Fields, fields: Fields) -> float:
    if parameters.values.get("factor") is not None:
        return parameters.number("factor")
    return fields.count("max_position_embeddings") / _length(parameters, fields)


def _optional(parameters: Fields, name: str) -> float | None:
    return None if parameters.values.get(name) is None else parameters.number(name)


def _linear(parameters: Fields, fields: Fields) -> dict[str, Any]:
    return {"factor": parameters.number("factor")}


def _dynamic(parameters: Fields, fields: Fields) -> dict[str, Any]:
    return {
        "factor": parameters.number("factor"),
        "length": fields.count("max_position_embeddings"),
    }


def _llama3(parameters: Fields, fields: Fields) -> dict[str, Any]:
    return {
        "factor": parameters.number("factor"),
        "length": _length(parameters, fields),
        "low": parameters.number("low_freq_factor"),
        "high": parameters.number("high_freq_factor"),
    }


def _yarn(parameters: Fields, fields: Fields) -> dict[str, Any]:
    factor, temperature = _factor(parameters, fields), _optional(parameters, "attention_factor")
    scale, scale_all = _optional(parameters, "mscale"), _optional(parameters, "mscale_all_dim")
    if temperature is None and scale and scale_all:
        temperature = (0.1 * scale * math.log(factor) + 1) / (
            0.1 * scale_all * math.log(factor) + 1
        )
    return {
        "factor": factor,
        "length": _length(parameters, fields),
        "alpha": _optional(parameters, "beta_slow") or 1.0,
        "beta": _optional(parameters, "beta_fast") or 32.0,
        "truncate": parameters.flag("truncate", True),
        "temperature": temperature,
    }


def _longrope(parameters: Fields, fields: Fields) -> dict[str, Any]:
    return {
        "factor": _factor(parameters, fields),
        "length": _length(parameters, fields),
        "long_factors": parameters.numbers("long_factor"),
        "short_factors": parameters.numbers("short_factor"),
        "temperature": _optional(parameters, "attention_factor"),
    }


METHODS: dict[str, tuple[str, Callable[[Fields, Fields], dict[str, Any]]]] = {
    "dynamic": ("dynamic_ntk", _dynamic),
    "linear": ("interpolate", _linear),
    "llama3": ("llama3", _llama3),
    "longrope": ("longrope", _longrope),
    "yarn": ("yarn", _yarn),
}
"""Method in ``posenc.extension`` and its arguments, by ``rope_type``."""


def _parameters(encoding: Encoding) -> dict[str, Any]:
    """``rope_parameters`` of an encoding."""
    part = _known(encoding)
    rope = part if isinstance(part, Rope) else part.rope
    if rope.pairing != "half" or rope.log_frequencies is not None:
        learned = rope.log_frequencies is not None
        raise _unknown(
            "rope with pairing='half' and learned=False",
            f"pairing={rope.pairing!r}, learned={learned}",
        )
    base = {"rope_theta": rope.base, "partial_rotary_factor": rope.fraction}
    if isinstance(part, DynamicNtkRope):
        return {"rope_type": "dynamic", "factor": part.factor, **base}
    if isinstance(part, LongRope):
        long, short, length = part.long, part.short, part.length
    elif part.divisors is None:
        return {"rope_type": "default", **base}
    elif len(set(part.divisors)) == 1 and part.gain == 1:
        return {"rope_type": "linear", "factor": part.divisors[0], **base}
    else:
        # equal for short and long texts: any length will do
        long, short, length = part.divisors, part.divisors, 2
    return {
        "rope_type": "longrope",
        "factor": max(1.0, *long),
        "long_factor": list(long),
        "short_factor": list(short),
        "attention_factor": part.gain,
        "original_max_position_embeddings": int(length),
        **base,
    }


def _known(encoding: Encoding) -> Rope | DynamicNtkRope | LongRope:
    """The only part of an encoding, which transformers supports.

    Raises:
        ArgumentError: for other parts.
    """
    part = encoding.query_key
    if encoding.parts() == (part,) and isinstance(part, Rope | DynamicNtkRope | LongRope):
        return part
    names = " and ".join(type(part).__name__ for part in encoding.parts()) or "no encoding"
    raise _unknown("a model encoded by rope only", names)


def _traits(encoding: Encoding) -> tuple[object, ...]:
    """Attributes in which two equal encodings agree."""
    part = _known(encoding)
    rope = part if isinstance(part, Rope) else part.rope
    own: tuple[float, ...] = ()
    if isinstance(part, DynamicNtkRope):
        own = (part.factor, part.length)
    if isinstance(part, LongRope):
        own = (part.length, *part.long, *part.short)
    learned = rope.log_frequencies is not None
    divisors = rope.divisors or (1.0,) * (rope.rotated // 2)
    return (type(part), rope.pairing, learned, rope.base, rope.rotated, part.gain, *divisors, *own)


def _alike(one: Encoding, other: Encoding) -> bool:
    """True if two encodings rotate equally, up to rounding."""
    first, second = _traits(one), _traits(other)
    return len(first) == len(second) and all(
        math.isclose(a, b, rel_tol=1e-6)
        if isinstance(a, float) and isinstance(b, float)
        else a == b
        for a, b in zip(first, second, strict=True)
    )


def _unknown(expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        "model",
        expected=expected,
        got=got,
        remedy="Save it by model.save(folder), which supports every encoding.",
    )
