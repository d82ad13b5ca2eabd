"""Extension methods that an engine serves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from posenc.errors import ArgumentError
from posenc.extension import EXTENSIONS, applicable
from posenc.lab.evaluation.candidates import Method, extended_by
from posenc.lab.reporting.sentences import listed
from posenc.transformers.engines.comparison import differences
from posenc.transformers.engines.config import ModelConfig
from posenc.transformers.engines.engine import Engine
from posenc.transformers.engines.remedy import for_engines
from posenc.transformers.engines.transformers import TRANSFORMERS
from posenc.transformers.live import LiveModel

UNKNOWN = "is known to no engine"


def served_methods(
    methods: Sequence[Method],
    model: LiveModel,
    engines: Sequence[Engine],
    *,
    factor: float,
    length: int,
) -> tuple[list[Method], dict[str, str]]:
    """The methods that all of some engines serve, and why not the others, by their specs.

    Methods that do not fit the model are left in, to be refused with their reason.

    Raises:
        ArgumentError: if they serve none of them; the remedy names the nearest that they serve.
    """
    served, left = [], {}
    for method in methods:
        try:
            config = _config(method, model, factor=factor, length=length)
        except ArgumentError:
            served.append(method)
            continue
        why = _differences(config, engines, length)
        if why:
            left[method.spec] = why
        else:
            served.append(method)
    if served:
        return served, left
    near = nearest(methods[0], model, engines, factor=factor, length=length)
    words = "; ".join(f"{spec} {why}" for spec, why in left.items())
    names = listed([engine.name for engine in engines])
    they, serve = ("it", "serves") if len(engines) == 1 else ("all", "serve")
    none = f"{they.capitalize()} {serve} none for this model."
    raise ArgumentError(
        "method",
        expected=f"one that {names} {serve}",
        got=words,
        remedy=f"The nearest that {they} {serve}: {near}." if near else none,
    )


def nearest(
    method: Method, model: LiveModel, engines: Sequence[Engine], *, factor: float, length: int
) -> str:
    """The method that engines serve with frequencies nearest to another's; "": there is none.

    Methods without frequencies of their own are nearest to YaRN.
    """

    def config_by(spec: str) -> ModelConfig | None:
        with suppress(ArgumentError):
            return _config(Method.parse(spec), model, factor=factor, length=length)
        return None

    goal = int(factor * length)
    wanted = config_by(method.spec) or config_by("yarn")
    distances: dict[str, float] = {}
    for name in applicable(model.trained_encoding()):
        if name == "direct" or not EXTENSIONS[name].claims.transformers:
            continue
        config = config_by(name)
        if config is not None and not _differences(config, engines, length):
            distances[name] = 0.0 if wanted is None else _distance(wanted, config, goal)
    return min(distances, key=lambda name: distances[name], default="")


def _config(method: Method, model: LiveModel, *, factor: float, length: int) -> ModelConfig | None:
    """The config of the extended model; None if its fields cannot express the extension.

    Raises:
        ArgumentError: if the method does not fit.
    """
    extended = extended_by(model, method, factor=factor, length=length).model
    if not isinstance(extended, LiveModel) or not extended.served or extended.served == "table":
        return None
    return ModelConfig.of(for_engines(extended.model.config.to_dict()))


def _differences(config: ModelConfig | None, engines: Sequence[Engine], length: int) -> str:
    """Differences of engines' rotations from transformers', in words; "" where there is none."""
    by_engine = {engine.name: _difference(config, engine, length) for engine in engines}
    if len(set(by_engine.values())) == 1:
        return next(iter(by_engine.values()))
    return " and ".join(f"{why} in {name}" for name, why in by_engine.items() if why)


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
