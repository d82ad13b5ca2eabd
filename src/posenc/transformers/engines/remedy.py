"""Lines of a ``config.json`` by which all engines rotate alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posenc.transformers.checkpoints.rope import TRAINED, parameters_in, yarn_gain
from posenc.transformers.engines.comparison import differences, differs
from posenc.transformers.engines.config import FULL, ModelConfig
from posenc.transformers.engines.engine import NotServedError
from posenc.transformers.engines.rotation import RopeParameters
from posenc.transformers.engines.transformers import TRANSFORMERS

GAINS = ("attention_factor", "attn_factor", "mscale", "mscale_all_dim")
"""Parameters that a gain can be written by."""

PARTIAL = "partial_rotary_factor"
"""Rotated share of a head."""

NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
"""Fields of base and rotated share beside ``rope_parameters``, of types that rename them."""

ABSENT = object()
"""Sentinel unequal to any field's value, null included."""


@dataclass(frozen=True)
class ConfigRemedy:
    """Lines to change.

    Args:
        changes: fields of the model of text.
        nested: the part of ``config.json`` that they belong to; "": none.
        left: engines that rotate otherwise still, and how.
    """

    changes: Mapping[str, Any]
    nested: str
    left: Mapping[str, str]


def under_all_names(fields: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's parameters under every name that programs read them from.

    mlx-lm reads base and rotated share beside them, llama.cpp the trained length, versions of
    transformers before 5 ``rope_scaling``.

    Args:
        fields: of the model's ``config.json``.
        parameters: ``rope_parameters`` of all layers.
    """
    base, share = NAMES.get(str(fields.get("model_type")), ("rope_theta", PARTIAL))
    parameters = dict(parameters)
    changes = {
        "rope_parameters": parameters,
        "rope_scaling": None if parameters["rope_type"] == "default" else parameters,
        base: parameters["rope_theta"],
    }
    if PARTIAL in parameters:
        changes[share] = parameters[PARTIAL]
    if TRAINED in parameters:
        changes[TRAINED] = parameters[TRAINED]
    return changes


def right_in_all(fields: Mapping[str, Any]) -> ConfigRemedy | None:
    """The lines by which most engines rotate as transformers does now; None: as they are.

    Args:
        fields: of ``config.json``.
    """
    config = ModelConfig.of(fields)
    ropes = config.ropes()
    if not ropes:
        return None
    length = min(rope.length for rope in ropes.values())
    best, most = None, _unlike(differences(config, length=length))
    for changes in _candidates(config):
        new = {k: v for k, v in changes.items() if v != config.written.get(k, ABSENT)}
        for lines in ({k: v for k, v in new.items() if v is not None or k in config.written}, new):
            other = ModelConfig.of(with_lines(fields, lines, config.nested))
            after = differences(other, length=length)
            if after and len(_unlike(after)) < len(most) and _same(config, other, length):
                best, most = (ConfigRemedy(lines, config.nested, _unlike(after)), _unlike(after))
    return best


def with_lines(fields: Mapping[str, Any], lines: Mapping[str, Any], nested: str) -> dict[str, Any]:
    """A ``config.json`` with other lines, in a part of it unless ``nested`` is ""."""
    return {**fields, nested: {**fields[nested], **lines}} if nested else {**fields, **lines}


def for_engines(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` with its rotation under the names that other programs read too."""
    parameters = parameters_in(fields)
    if {"rope_type", "rope_theta"} <= set(parameters):
        return {**fields, **under_all_names(fields, parameters)}
    remedy = right_in_all(fields)  # of layers of several types, or of a part
    return {**fields} if remedy is None else with_lines(fields, remedy.changes, remedy.nested)


def _unlike(by_engine: Mapping[str, str]) -> dict[str, str]:
    return {engine: difference for engine, difference in by_engine.items() if differs(difference)}


def _same(one: ModelConfig, other: ModelConfig, length: int) -> bool:
    """True if transformers rotates alike by both."""
    for n in (length, length + 1, 2 * length):
        try:
            before, after = TRANSFORMERS.rotations(one, n), TRANSFORMERS.rotations(other, n)
        except NotServedError:
            return False
        if before.keys() != after.keys() or not all(before[k].like(after[k]) for k in before):
            return False
    return True


def _candidates(config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Ways to write the same rotation."""
    ropes = config.ropes()
    rope = ropes.get("")
    if rope is not None:
        standard = {"rope_type": rope.kind, "rope_theta": rope.base, **rope.parameters}
        for parameters in _gains(rope, standard, config):
            yield under_all_names(config.written, parameters)
    elif FULL in ropes:
        full, others = ropes[FULL], [r for kind, r in ropes.items() if kind != FULL]
        for parameters in _gains(full, full.parameters, config):
            scaling = {k: v for k, v in parameters.items() if k != "rope_theta"}
            top_level = {
                "rope_theta": full.base,
                "rope_scaling": None if full.kind == "default" else scaling,
            }
            both = {**(config.written.get("rope_parameters") or {}), FULL: parameters}
            yield top_level
            for other in others:
                yield top_level | {"rope_local_base_freq": other.base}
            yield {"rope_theta": full.base, "rope_parameters": both}


def _gains(
    rope: RopeParameters, parameters: Mapping[str, Any], config: ModelConfig
) -> Iterator[Mapping[str, Any]]:
    """Parameters as they are, and with the gain by the names that more engines read."""
    yield parameters
    try:
        rotations = TRANSFORMERS.rotations(config, rope.length).values()
    except NotServedError:
        return
    gain = max(rotation.gain for rotation in rotations)
    bare = {k: v for k, v in parameters.items() if k not in GAINS}
    if rope.kind == "longrope":
        yield {**bare, "attention_factor": gain, "long_mscale": gain, "short_mscale": gain}
    if rope.kind == "yarn" and not math.isclose(gain, rope.usual_gain(), rel_tol=1e-6):
        every = yarn_gain(rope.factor, gain)
        yield {**bare, **every}
        yield {**bare, **{k: v for k, v in every.items() if k != "attn_factor"}}
