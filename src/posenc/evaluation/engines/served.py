"""Extension methods that an engine serves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from posenc.errors import ArgumentError
from posenc.evaluation.candidates import Method, extended_by
from posenc.evaluation.engines.comparison import differences
from posenc.evaluation.engines.config import ModelConfig
from posenc.evaluation.engines.engine import Engine
from posenc.evaluation.engines.remedy import for_engines
from posenc.evaluation.engines.transformers import TRANSFORMERS
from posenc.evaluation.live import LiveModel
from posenc.extension import EXTENSIONS, applicable

UNKNOWN = "is known to no engine"


def served_methods(
    methods: Sequence[Method], model: LiveModel, engine: Engine, *, factor: float, length: int
) -> tuple[list[Method], dict[str, str]]:
    """The methods that an engine serves, and why not the others, by their specs.

    Methods that do not fit the model are left in, to be refused with their reason.

    Raises:
        ArgumentError: if it serves none of them; the remedy names the nearest that it serves.
    """
    kept, left = [], {}
    for method in methods:
        try:
            config = _config(method, model, factor=factor, length=length)
        except ArgumentError:
            kept.append(method)
            continue
        why = _difference(config, engine, length)
        if why:
            left[method.spec] = why
        else:
            kept.append(method)
    if kept:
        return kept, left
    near = nearest(methods[0], model, engine, factor=factor, length=length)
    words = "; ".join(f"{spec} {why}" for spec, why in left.items())
    raise ArgumentError(
        "method",
        expected=f"one that {engine.name} serves",
        got=words,
        remedy=f"The nearest that it serves: {near}." if near else "It serves none for this model.",
    )


def nearest(method: Method, model: LiveModel, engine: Engine, *, factor: float, length: int) -> str:
    """The method that an engine serves with frequencies nearest to another's; "": there is none.

    Methods without frequencies of their own are nearest to YaRN.
    """

    def config_by(spec: str) -> ModelConfig | None:
        with suppress(ArgumentError):
            return _config(Method.parse(spec), model, factor=factor, length=length)
        return None

    goal = int(factor * length)
    wanted = config_by(method.spec) or config_by("yarn")
    found: dict[str, float] = {}
    for name in applicable(model.trained_encoding()):
        if name == "direct" or not EXTENSIONS[name].claims.transformers:
            continue
        config = config_by(name)
        if config is not None and not _difference(config, engine, length):
            found[name] = 0.0 if wanted is None else _distance(wanted, config, goal)
    return min(found, key=lambda name: found[name], default="")


def _config(method: Method, model: LiveModel, *, factor: float, length: int) -> ModelConfig | None:
    """The config of the extended model; None where transformers cannot be told.

    Raises:
        ArgumentError: if the method does not fit.
    """
    extended = extended_by(model, method, factor=factor, length=length).model
    if not isinstance(extended, LiveModel) or not extended.served or extended.served == "table":
        return None
    return ModelConfig.of(for_engines(extended.model.config.to_dict()))


def _difference(config: ModelConfig | None, engine: Engine, length: int) -> str:
    if config is None:
        return UNKNOWN
    if engine is TRANSFORMERS:
        return ""
    return differences(engine.with_options(config), length=length).get(engine.name, UNKNOWN)


def _distance(one: ModelConfig, other: ModelConfig, length: int) -> float:
    """Mean distance of logarithms of frequencies."""
    rotations = [next(iter(TRANSFORMERS.rotations(c, length).values())) for c in (one, other)]
    pairs = list(zip(*(rotation.frequencies for rotation in rotations), strict=True))
    return sum(abs(math.log(a / b)) for a, b in pairs if a and b) / len(pairs)
