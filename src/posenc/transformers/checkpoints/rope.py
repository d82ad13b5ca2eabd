"""RoPE's parameters in ``config.json``, with and without extension."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.extension.methods.dynamic_ntk import DynamicNtkRope
from posenc.extension.methods.longrope import LongRope

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


def _unknown(expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        "model",
        expected=expected,
        got=got,
        remedy="Save it by model.save(folder), which supports every encoding.",
    )
