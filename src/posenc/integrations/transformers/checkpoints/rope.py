"""RoPE's parameters in ``config.json``, with and without extension."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.extension import extend
from posenc.extension.methods.dynamic_ntk import DynamicNtkRope
from posenc.extension.methods.longrope import LongRope
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.models import Decoder, DecoderConfig

TRAINED = "original_max_position_embeddings"
"""Name of the trained length of an extended model."""

DEFAULT_LENGTH = 2048
"""Longest text of a model that has none, as in transformers' Llama."""


def parameters_in(config: Mapping[str, Any]) -> Any:
    """RoPE's parameters in a config, which may be by layer type; empty if it has none.

    Recent files have ``rope_parameters``, older ones ``rope_scaling``, which transformers prefers
    where there are both: it may have been added by hand.
    """
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def scaling_of(parameters: Mapping[str, Any]) -> str:
    """The kind of scaling that RoPE's parameters name, ``rope_type`` also by its older name."""
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


@dataclass(frozen=True, kw_only=True)
class RopeFields:
    """Names of RoPE's parameters in a family, beside ``parameters_in``.

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
        values = parameters_in(fields.values)
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
        kind = scaling_of(values)
        if kind == "default":
            return Encoding.of(rope)
        if kind not in SCALINGS:
            raise fields.wrong("rope_type", f"default, {', '.join(SCALINGS)}", repr(kind))
        arguments = _arguments(kind, parameters, fields)
        stretched = extend(Encoding.of(rope), SCALINGS[kind][0], **arguments)
        part = stretched.query_key
        if isinstance(part, LongRope) and part.long == part.short:
            # equal factors for every length: plain rope
            return Encoding.of(rope.stretched(part.long, gain=part.gain))
        return stretched

    def write(self, model: Decoder, like: Fields) -> dict[str, Any]:
        """The fields of the model's encoding; those of ``like`` if they are equivalent.

        A raised base is written as such. Any other method that divides frequencies is written as
        LongRoPE with equal factors for short and long texts.

        Raises:
            ArgumentError: if transformers lacks the encoding.
        """
        encoding = model.encodings[0]
        if any(_traits(other) != _traits(encoding) for other in model.encodings):
            raise _unknown("one encoding for all layers", "several")
        head_dim = model.config.head_dim or model.config.dim // model.config.heads
        named = not {"rope_parameters", "rope_scaling", self.base}.isdisjoint(like.values)
        if named and _alike(self.read(like, head_dim=head_dim), encoding):
            return {}
        longest = like.optional_count("max_position_embeddings") or model.config.max_length
        changes = self.described(parameters_of(encoding, longest))
        part = encoding.query_key
        if isinstance(part, DynamicNtkRope):
            changes["max_position_embeddings"] = int(part.length)
        return changes

    def described(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """``rope_parameters`` under every name that programs read them from.

        mlx-lm reads base and rotated share beside them, llama.cpp the trained length, versions of
        transformers before 5 ``rope_scaling``.

        Raises:
            ArgumentError: if transformers cannot rotate a fraction of a head in this family.
        """
        parameters = dict(parameters)
        fraction = parameters["partial_rotary_factor"]
        if not self.partial:
            if fraction != 1.0:
                raise _unknown("rope with fraction=1 for this family", f"fraction={fraction:g}")
            del parameters["partial_rotary_factor"]
        changes = {
            "rope_parameters": parameters,
            "rope_scaling": None if parameters["rope_type"] == "default" else parameters,
            self.base: parameters["rope_theta"],
        }
        if self.partial:  # llama.cpp and mlx-lm need it
            changes[self.fraction] = fraction
        if TRAINED in parameters:
            changes[TRAINED] = parameters[TRAINED]
        return changes


def rope_decoder(encoding: Encoding, **fields: Any) -> Decoder:
    """A decoder with this encoding in each layer; by name if possible."""
    part, rope = _supported_rope(encoding)
    options: dict[str, Any] = {"base": rope.base, "fraction": rope.fraction}
    if rope.divisors is not None:
        options |= {"divisors": rope.divisors, "gain": rope.gain}
    config = DecoderConfig(**fields, encoding="rope", options=options)
    return Decoder(config, encodings=None if part is rope else [encoding] * config.layers)


SCALINGS: dict[str, tuple[str, dict[str, tuple[str, Any]]]] = {
    "dynamic": ("dynamic_ntk", {}),
    "linear": ("interpolate", {}),
    "llama3": ("llama3", {"low": ("low_freq_factor", 1.0), "high": ("high_freq_factor", 4.0)}),
    "longrope": (
        "longrope",
        {
            "long_factors": ("long_factor", ()),
            "short_factors": ("short_factor", ()),
            "temperature": ("attention_factor", None),
        },
    ),
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
"""Method by ``rope_type``, and its options' names and defaults in transformers."""


def _arguments(kind: str, parameters: Fields, fields: Fields) -> dict[str, Any]:
    """Arguments of a scaling's method."""
    arguments: dict[str, Any] = {}
    for ours, (theirs, default) in SCALINGS[kind][1].items():
        if isinstance(default, tuple):
            arguments[ours] = parameters.numbers(theirs)
        elif isinstance(default, bool):
            arguments[ours] = parameters.flag(theirs, default)
        elif parameters.values.get(theirs) is None and kind != "llama3":
            arguments[ours] = default
        else:
            arguments[ours] = parameters.number(theirs)
    if kind == "dynamic":
        arguments["length"] = fields.count("max_position_embeddings")
    elif kind != "linear":
        trained = fields.optional_count(TRAINED) or parameters.optional_count(TRAINED)
        arguments["length"] = trained or fields.count("max_position_embeddings")
    if kind in ("longrope", "yarn") and parameters.values.get("factor") is None:
        arguments["factor"] = fields.count("max_position_embeddings") / arguments["length"]
    else:
        arguments["factor"] = parameters.number("factor")
    if kind == "yarn" and arguments["temperature"] is None:
        scales = [parameters.values.get(name) for name in ("mscale", "mscale_all_dim")]
        if all(scales):
            one, every = (
                0.1 * parameters.number(name) * math.log(arguments["factor"]) + 1
                for name in ("mscale", "mscale_all_dim")
            )
            arguments["temperature"] = one / every
    return arguments


def yarn_gain(factor: float, temperature: float | None) -> dict[str, float]:
    """Parameters of YaRN by which every program scales rotated features by ``temperature``.

    A quotient of ``mscale`` in transformers, vLLM and mlx-lm; in SGLang and older vLLM
    ``attn_factor``, relative to the default. They disagree about ``attention_factor``; files of
    llama.cpp keep none of these.
    """
    usual = 0.1 * math.log(factor) + 1
    if temperature is None or temperature == usual:
        return {}
    if factor == 1:
        return {"attention_factor": temperature}
    every = float(f"{(usual / temperature - 1) / math.log(factor) * 10:.12g}")
    return {"mscale": 1.0, "mscale_all_dim": every, "attn_factor": temperature / usual}


def parameters_of(encoding: Encoding, longest: int | None) -> dict[str, Any]:
    """``rope_parameters`` of an encoding, in a model of texts of up to ``longest`` tokens."""
    part, rope = _supported_rope(encoding)
    learned = rope.log_frequencies is not None
    if rope.pairing != "half" or learned:
        raise _unknown(
            "rope with pairing='half' and learned=False",
            f"pairing={rope.pairing!r}, learned={learned}",
        )
    base = {"rope_theta": rope.base, "partial_rotary_factor": rope.fraction}
    if isinstance(part, DynamicNtkRope):
        return {"rope_type": "dynamic", "factor": part.factor, **base}
    if isinstance(part, LongRope):
        trained = int(part.length)
        return _longrope(part.long, part.short, part.gain, trained, longest or trained) | base
    if part.divisors is None:
        return {"rope_type": "default", **base}
    raised = _raised_base(part)
    if raised is not None:
        return {"rope_type": "default", **base, "rope_theta": raised}
    if math.isclose(min(part.divisors), max(part.divisors), rel_tol=1e-6) and part.gain == 1:
        return {"rope_type": "linear", "factor": part.divisors[0], **base}
    return equal_factors(encoding, longest)


def equal_factors(encoding: Encoding, longest: int | None) -> dict[str, Any]:
    """``rope_parameters`` of LongRoPE with the same factors for short and long texts.

    Raises:
        ArgumentError: unless the encoding is RoPE with other frequencies.
    """
    part, rope = _supported_rope(encoding)
    if part is not rope or rope.divisors is None:
        raise _unknown("rope with other frequencies", type(part).__name__)
    longest = longest or DEFAULT_LENGTH
    base = {"rope_theta": rope.base, "partial_rotary_factor": rope.fraction}
    return _longrope(rope.divisors, rope.divisors, rope.gain, longest, longest) | base


def _raised_base(rope: Rope) -> float | None:
    """The base that divides the frequencies as NTK-aware scaling does; None for other divisors."""
    assert rope.divisors is not None
    pairs, slowest = rope.rotated // 2, rope.divisors[-1]
    steps = (slowest ** (t / max(1, pairs - 1)) for t in range(pairs))
    same = all(map(math.isclose, rope.divisors, steps))
    if not same or rope.gain != 1 or (pairs == 1 and slowest != 1):
        return None
    return float(rope.base * slowest ** (pairs / max(1, pairs - 1)))


def _longrope(
    long: Sequence[float], short: Sequence[float], gain: float, trained: int, longest: int
) -> dict[str, Any]:
    """LongRoPE's parameters; the gain by the names of transformers and of vLLM.

    mlx-lm derives it from the lengths: 1 unless ``longest`` exceeds ``trained``.
    """
    return {
        "rope_type": "longrope",
        "factor": max(1.0, longest / trained),
        "long_factor": list(long),
        "short_factor": list(short),
        "attention_factor": gain,
        "long_mscale": gain,
        "short_mscale": gain,
        TRAINED: trained,
    }


def _supported_rope(encoding: Encoding) -> tuple[Rope | DynamicNtkRope | LongRope, Rope]:
    """The only part of an encoding that transformers supports, and its RoPE as trained.

    Raises:
        ArgumentError: for other parts.
    """
    part = encoding.query_key
    if encoding.parts() == (part,) and isinstance(part, Rope | DynamicNtkRope | LongRope):
        return part, part if isinstance(part, Rope) else part.rope
    names = " and ".join(type(part).__name__ for part in encoding.parts()) or "no encoding"
    raise _unknown("a model encoded by rope only", names)


def _traits(encoding: Encoding) -> tuple[object, ...]:
    """Attributes in which two equal encodings agree."""
    part, rope = _supported_rope(encoding)
    parameters: tuple[float, ...] = ()
    if isinstance(part, DynamicNtkRope):
        parameters = (part.factor, part.length)
    if isinstance(part, LongRope):
        parameters = (part.length, *part.long, *part.short)
    learned = rope.log_frequencies is not None
    divisors = rope.divisors or (1.0,) * (rope.rotated // 2)
    # a raised base equals divisors
    periods = (rope.base ** (2 * t / rope.rotated) * by for t, by in enumerate(divisors))
    return (type(part), rope.pairing, learned, rope.rotated, part.gain, *periods, *parameters)


def _alike(one: Encoding, other: Encoding) -> bool:
    """True if two encodings rotate equally, up to rounding."""
    first, second = _traits(one), _traits(other)
    return len(first) == len(second) and all(
        a == b
        or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-6))
        for a, b in zip(first, second, strict=True)
    )


def _unknown(expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        "model",
        expected=expected,
        got=got,
        remedy="Save it by model.save(folder), which supports every encoding.",
    )
