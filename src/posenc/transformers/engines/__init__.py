"""RoPE of a ``config.json`` in the engines that serve it, by rules transcribed from their sources.

Each engine is a module with its rules as a table, their source and date; here configs are compared
as each rotates by them, with the lines of a config by which all rotate alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posenc.errors import UnknownNameError
from posenc.transformers.checkpoints import TRAINED, parameters_in, yarn_gain
from posenc.transformers.engines.config import (
    FULL,
    Engine,
    ModelConfig,
    NotServedError,
    UnreadError,
    is_known,
)
from posenc.transformers.engines.ctranslate2 import CTRANSLATE2
from posenc.transformers.engines.llama_cpp import LLAMA_CPP, NAMES
from posenc.transformers.engines.mlx_lm import MLX_LM, has_model
from posenc.transformers.engines.onnxruntime_genai import ONNXRUNTIME_GENAI, has_builder
from posenc.transformers.engines.openvino import OPENVINO, has_export
from posenc.transformers.engines.rotation import EngineRotation, RopeParameters
from posenc.transformers.engines.runs import Run, newer, run_of
from posenc.transformers.engines.sglang import SGLANG
from posenc.transformers.engines.transformers import TRANSFORMERS, Checked, check
from posenc.transformers.engines.vectors import rotation_vectors, write_vectors
from posenc.transformers.engines.vllm import VLLM

__all__ = [
    "ENGINES",
    "Checked",
    "ConfigRemedy",
    "EngineRotation",
    "ModelConfig",
    "Served",
    "check",
    "compare",
    "differences",
    "right_in_all",
    "rotation_vectors",
    "write_vectors",
]

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        TRANSFORMERS,
        VLLM,
        SGLANG,
        LLAMA_CPP,
        MLX_LM,
        CTRANSLATE2,
        ONNXRUNTIME_GENAI,
        OPENVINO,
    )
}
"""Engines by name, transformers first."""

OTHERS = tuple(engine for engine in ENGINES.values() if engine is not TRANSFORMERS)

IGNORED, BASE_TOO = "ignores the scaling", "ignores base and scaling"
AS_LONGER = "rotates texts up to the trained length as longer ones"
OTHER = "rotates by other frequencies"
NOT_COMPARED = "is not compared"
"""Differences in words; the last is that of models without a rule here."""


@dataclass(frozen=True)
class Served:
    """A config in one engine.

    Args:
        engine: its name.
        longest: tokens of the longest text that it serves by default; None: no limit.
        rotations: at the longest text of the config, by layer type; empty if it does not start.
        difference: from transformers, in words; "" where it rotates as transformers does.
        effect: of the difference on texts.
        agreement: mean cosine of the error of angles over the longest text; 1: none.
        source, read: files that its rules are from, and the month of reading.
        run: that held the engine to its rules; None: none.
        newer: release that is installed here, if it is newer than those of the rules; "": none.
    """

    engine: str
    longest: int | None
    rotations: Mapping[str, EngineRotation] = field(default_factory=dict)
    difference: str = ""
    effect: str = ""
    agreement: float = 1.0
    source: str = ""
    read: str = ""
    run: Run | None = None
    newer: str = ""


def engine_named(option: str, *, also: tuple[str, ...] = ()) -> Engine:
    """The engine of an option, such as ``llama.cpp``.

    Args:
        option: or the name of the engine.
        also: other words that are valid, for the message.

    Raises:
        UnknownNameError: if there is none.
    """
    matches = [engine for engine in ENGINES.values() if option in (engine.option, engine.name)]
    if matches:
        return matches[0]
    names = (engine.option for engine in ENGINES.values())
    raise UnknownNameError.of("engine", option, (*names, *also))


def no_engine_has(family: str) -> bool:
    """True if neither transformers nor any engine's rules name this ``model_type``."""
    models = (is_known, NAMES.__contains__, has_model, has_builder, has_export)
    return not any(has(family) for has in models)


def differences(fields: Mapping[str, Any] | ModelConfig, *, length: int) -> dict[str, str]:
    """Differences of other engines from transformers, in words; "" where there is none.

    Empty for models without RoPE, and for those that transformers does not rotate by these rules.

    Args:
        fields: of ``config.json``.
        length: the trained length.
    """
    config = fields if isinstance(fields, ModelConfig) else ModelConfig.of(fields)
    try:
        right = [TRANSFORMERS.rotations(config, n) for n in _lengths(length)]
    except NotServedError:
        return {}
    if not right[0]:
        return {}
    return {engine.name: _difference(engine, config, right, length) for engine in OTHERS}


def compare(fields: Mapping[str, Any] | ModelConfig) -> tuple[Served, ...]:
    """A config in every engine, transformers first; empty for models without RoPE."""
    config = fields if isinstance(fields, ModelConfig) else ModelConfig.of(fields)
    ropes = config.ropes()
    if not ropes:
        return ()
    length = min(rope.length for rope in ropes.values())
    goal = max(config.longest or length, length)
    by_engine = differences(config, length=length)
    return tuple(
        _served(engine, config, by_engine.get(engine.name, ""), length, goal)
        for engine in ENGINES.values()
    )


def _served(engine: Engine, config: ModelConfig, difference: str, length: int, goal: int) -> Served:
    one = Served(
        engine.name,
        engine.longest(config),
        difference=difference,
        source=engine.source,
        read=engine.read,
        run=run_of(engine),
        newer=newer(engine),
    )
    try:
        rotations = engine.rotations(config, goal)
    except NotServedError as error:
        return replace(one, longest=None, difference=reason_of(error), agreement=0.0)
    try:
        right = TRANSFORMERS.rotations(config, goal)
    except NotServedError:
        return replace(one, rotations=rotations)
    same = [right[kind].agreement(rotation, goal) for kind, rotation in rotations.items()]
    agreement = min(same, default=1.0)
    effect = _effect(difference, agreement, length, goal)
    return replace(one, rotations=rotations, effect=effect, agreement=agreement)


def differs(difference: str) -> bool:
    """True if an engine is known to rotate otherwise, or not to start."""
    return bool(difference) and not difference.startswith(NOT_COMPARED)


def reason_of(error: NotServedError) -> str:
    """A sentence without its subject: an engine that does not start, or is not compared."""
    return f"{NOT_COMPARED if isinstance(error, UnreadError) else 'does not start'}: {error}"


def _effect(difference: str, agreement: float, length: int, goal: int) -> str:
    """The effect of a difference on texts."""
    if difference.startswith((IGNORED, OTHER)):
        at = f"at {goal:,} tokens angles agree by {agreement:.2f} of 1"
        return f"right for the first tokens, worse with each further one: {at}"
    if difference == BASE_TOO or difference.startswith("rotates "):
        if difference == AS_LONGER:
            return f"texts of up to {length:,} tokens lose some quality, longer ones none"
        return "wrong from the first tokens on: text does not hold together"
    if difference.startswith("scales logits"):
        return "attention too sharp or too flat at every length: repeats, or lost details"
    return ""


def _lengths(length: int) -> tuple[int, int, int]:
    """LongRoPE changes past the trained length, dynamic NTK with every token past it."""
    return length, length + 1, 2 * length


Rotations = Mapping[str, EngineRotation]


def _difference(
    engine: Engine, config: ModelConfig, right: Sequence[Rotations], length: int
) -> str:
    try:
        served = [engine.rotations(config, n) for n in _lengths(length)]
    except NotServedError as error:
        return reason_of(error)
    for kind in right[0]:
        rotated, expected = ([at[kind] for at in rotations] for rotations in (served, right))
        plain = config.ropes()[kind].plain()
        difference = _between(rotated, expected, plain)
        if difference:
            return difference + (f" in layers of {kind}" if kind and len(right[0]) > 1 else "")
    return ""


def _between(
    served: Sequence[EngineRotation], right: Sequence[EngineRotation], plain: EngineRotation
) -> str:
    """The difference of rotations at three lengths, in words."""
    if all(map(EngineRotation.like, served, right)):
        return ""
    widths = [2 * len(rotations[0].frequencies) for rotations in (served, right)]
    if widths[0] != widths[1]:
        return f"rotates {widths[0]} features of a head instead of {widths[1]}"
    if all(rotation.like(plain) for rotation in served):
        return IGNORED
    usual = EngineRotation(tuple(10000.0 ** (-2 * t / widths[0]) for t in range(widths[0] // 2)))
    if all(rotation.like(usual) for rotation in served):
        return BASE_TOO
    if all(map(EngineRotation.like, served[1:], right[1:])):
        return AS_LONGER
    if not served[2].same_gain(right[2]):
        return f"scales logits by {served[2].logit_gain:.3g} instead of {right[2].logit_gain:.3g}"
    return OTHER


GAINS = ("attention_factor", "attn_factor", "mscale", "mscale_all_dim")
"""Parameters that a gain can be written by."""

PARTIAL = "partial_rotary_factor"
"""Rotated share of a head."""

FIELD_NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
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


def _under_all_names(fields: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's parameters under every name that programs read them from.

    mlx-lm reads base and rotated share beside them, llama.cpp the trained length, versions of
    transformers before 5 ``rope_scaling``.

    Args:
        fields: of the model's ``config.json``.
        parameters: ``rope_parameters`` of all layers.
    """
    base, share = FIELD_NAMES.get(str(fields.get("model_type")), ("rope_theta", PARTIAL))
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
            other = ModelConfig.of(_with_lines(fields, lines, config.nested))
            after = differences(other, length=length)
            if after and len(_unlike(after)) < len(most) and _same(config, other, length):
                best, most = (ConfigRemedy(lines, config.nested, _unlike(after)), _unlike(after))
    return best


def _with_lines(fields: Mapping[str, Any], lines: Mapping[str, Any], nested: str) -> dict[str, Any]:
    """A ``config.json`` with other lines, in a part of it unless ``nested`` is ""."""
    return {**fields, nested: {**fields[nested], **lines}} if nested else {**fields, **lines}


def for_engines(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` with its rotation under the names that other programs read too."""
    parameters = parameters_in(fields)
    if {"rope_type", "rope_theta"} <= set(parameters):
        return {**fields, **_under_all_names(fields, parameters)}
    remedy = right_in_all(fields)  # of layers of several types, or of a part
    return {**fields} if remedy is None else _with_lines(fields, remedy.changes, remedy.nested)


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
            yield _under_all_names(config.written, parameters)
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
