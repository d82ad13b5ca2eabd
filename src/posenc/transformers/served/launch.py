"""A server as it is started: its engine, and RoPE's parameters once all options are applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from posenc.transformers.checkpoints import TRAINED, parameters_in, scaling_of
from posenc.transformers.engines import reason_of
from posenc.transformers.engines.config import (
    LAYERS,
    WINDOWS,
    Engine,
    Fields,
    ModelConfig,
    NotServedError,
    first,
)
from posenc.transformers.engines.rotation import EngineRotation, RopeParameters

PARAMETERS = ("rope_parameters", "rope_scaling")
"""Names of RoPE's parameters in overrides; engines take the older one for the newer."""

LIMITED = {
    "vllm": ("--max-model-len", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
    "sglang": ("--context-length", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"),
}
"""Engines that refuse a longest text beyond that of the config, by which option, unless a variable
of the environment is set."""

NEED_TRAINED = ("yarn", "llama3", "longrope", "deepseek_yarn")
"""Scalings that vLLM does not start with unless their parameters have the trained length."""

USUAL_BASE = 10000.0
BASES = dict.fromkeys(("qwen2", "qwen3", "exaone4", "exaone_moe"), 1e6) | {
    "ernie4_5_moe": 5e5,
    "falcon_h1": 1e11,
}
"""Bases of vLLM, and of SGLang, for parameters without one, by family; others have the usual."""


@dataclass(frozen=True)
class StartedServer:
    """A server.

    Args:
        engine: that it runs.
        ropes: parameters by layer type, as the engine reads them; "": of all layers.
        longest: tokens of the longest text; None: no limit, or not known.
        windows: tokens that each layer sees, 0: all; None: not known.
        refusals: reasons for which it does not start, or is not compared; empty: none.
        family: ``model_type``, or the architecture of a GGUF file.
        unread: settings that could not be read, such as those that a server does not tell.
    """

    engine: Engine
    ropes: Mapping[str, RopeParameters]
    longest: int | None
    windows: tuple[int, ...] | None = None
    refusals: tuple[str, ...] = ()
    family: str = ""
    unread: tuple[str, ...] = field(default=())

    @classmethod
    def of(
        cls,
        engine: Engine,
        config: ModelConfig,
        *,
        longest: int | None = None,
        windowed: bool = True,
        refusals: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> StartedServer:
        """A server of a config to which overrides are applied already.

        Args:
            engine: that it runs.
            config: of the model.
            longest: tokens of the longest text as an option sets it; None: that of the config.
            windowed: False if an option switches windows off.
            refusals: known already.
            environment: variables that are set in the command.
        """
        seen, limit = windows(config.completed), _limit(engine, config)
        if not windowed and any(seen):
            limit, seen = max(seen), (0,) * len(seen)
        option, variable = LIMITED.get(engine.option, ("", ""))
        longer = longest is not None and limit is not None and longest > limit
        if longer and option and (environment or {}).get(variable) not in ("1", "true", "True"):
            refusals += (
                f"does not start: {option} {longest:,} is more than the {limit:,} tokens of its "
                f"config (unless {variable}=1)",
            )
        usual = engine.longest(config)
        usual = usual if windowed or usual is None or limit is None else min(usual, limit)
        config = replace(config, served=longest or usual)
        try:
            ropes = engine.ropes(config)
        except NotServedError as error:
            ropes, refusals = {}, (*refusals, reason_of(error))
        return cls(engine, ropes, longest or usual, seen, refusals, config.family)

    def rotations(self, length: int) -> dict[str, EngineRotation]:
        """Rotations in a text of ``length`` tokens, by layer type.

        Raises:
            NotServedError: if the engine does not start.
        """
        return self.engine.rotate(self.ropes, length)


def windows(fields: Fields) -> tuple[int, ...]:
    """Tokens that each layer sees, 0: all.

    Args:
        fields: of a config as transformers completes it.
    """
    layers, window = first(fields, LAYERS) or 0, first(fields, WINDOWS) or 0
    types = fields.get("layer_types")
    if types:
        return tuple(window if _windowed(str(kind)) else 0 for kind in types)
    return (window if fields.get("use_sliding_window", True) else 0,) * layers


def _windowed(layer_type: str) -> bool:
    return layer_type.startswith(("sliding", "chunked", "hybrid_sliding"))


def _limit(engine: Engine, config: ModelConfig) -> int | None:
    """Tokens of the longest text that an option may set."""
    ropes = config.ropes().values()
    if any(rope.kind == "longrope" for rope in ropes):
        return config.longest
    return engine.longest(config)


Override = Callable[[ModelConfig, Fields], ModelConfig]


def overridden_by_vllm(config: ModelConfig, overrides: Fields) -> ModelConfig:
    """A config with ``hf_overrides``, as vLLM 0.33 applies them (config/model.py, 2026-11).

    At the top RoPE's parameters replace the former ones, base included, and a base beside them is
    not read; in a part of the config they are merged. Fields at the top do not reach the part.

    Raises:
        NotServedError: if it does not start with the result.
    """
    inner = _of_part(config, overrides)
    config = _with_values(config, inner)
    parameters = dict(parameters_in(config.completed))
    trained = inner.get(TRAINED)
    if trained is not None and scaling_of(parameters) in NEED_TRAINED:
        parameters[TRAINED] = trained
    for name in PARAMETERS:
        if name not in inner:
            continue
        given = inner[name] or {}
        parameters = _merged(parameters, given) if config.nested else _replaced(config, given)
    for one in _by_layers(parameters):
        if "rope_type" not in one and "type" in one:
            raise NotServedError("rope_parameters of an override need rope_type, not type")
        if scaling_of(one) in NEED_TRAINED and one.get(TRAINED) is None:
            raise NotServedError(f"rope_parameters of an override have no {TRAINED}")
    return _with_parameters(config, parameters)


def overridden_by_sglang(config: ModelConfig, overrides: Fields) -> ModelConfig:
    """A config with ``json_model_override_args``, as SGLang 0.5.23 applies them.

    By srt/utils/hf_transformers/config.py, 2026-11: at the top RoPE's parameters are merged, in a
    part of the config they replace the former ones.
    """
    inner = _of_part(config, overrides)
    config = _with_values(config, inner)
    parameters = dict(parameters_in(config.completed))
    for name in PARAMETERS:
        if name in inner:
            given = inner[name] or {}
            parameters = _replaced(config, given) if config.nested else {**parameters, **given}
    return _with_parameters(config, parameters)


def _of_part(config: ModelConfig, overrides: Fields) -> dict[str, Any]:
    """Overrides that reach the model of text."""
    inner = overrides.get(config.nested, {}) if config.nested else overrides
    return dict(inner) if isinstance(inner, Mapping) else {}


def _with_values(config: ModelConfig, inner: Fields) -> ModelConfig:
    values = {k: v for k, v in inner.items() if k not in (*PARAMETERS, "rope_theta")}
    return replace(
        config, written={**config.written, **values}, completed={**config.completed, **values}
    )


def _by_layers(parameters: Fields) -> list[Fields]:
    """Parameters of each type of layers, or those of all."""
    nested = [one for one in parameters.values() if isinstance(one, Mapping)]
    return nested or [parameters]


def _merged(old: Fields, new: Fields) -> dict[str, Any]:
    """Nested dicts merged by their keys."""
    merged = dict(old)
    for name, value in new.items():
        inside = merged.get(name)
        both = isinstance(inside, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(inside, value) if both else value  # type: ignore[arg-type]
    return merged


def _replaced(config: ModelConfig, given: Fields) -> dict[str, Any]:
    """Given parameters with the engine's base, and all of a head, where they name none."""
    usual = {"rope_theta": BASES.get(config.family, USUAL_BASE), "partial_rotary_factor": 1.0}
    if not any(isinstance(one, Mapping) for one in given.values()):
        return {**usual, **given}
    return {k: {**usual, **v} if isinstance(v, Mapping) else v for k, v in given.items()}


def _with_parameters(config: ModelConfig, parameters: dict[str, Any]) -> ModelConfig:
    beside = ("rope_scaling", "rope_theta", "partial_rotary_factor")
    completed = {k: v for k, v in config.completed.items() if k not in beside}
    if TRAINED in parameters:
        completed[TRAINED] = parameters[TRAINED]
    return replace(config, completed={**completed, "rope_parameters": parameters})


OVERRIDDEN: Mapping[str, Override] = {"vllm": overridden_by_vllm, "sglang": overridden_by_sglang}
"""Overrides of fields by the engine's option."""
