"""Rules of mlx-lm, which reads ``config.json`` as it is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from posenc.transformers.checkpoints.rope import TRAINED
from posenc.transformers.engines.config import FULL, Fields, ModelConfig
from posenc.transformers.engines.engine import Engine, NotServedError, UnreadError
from posenc.transformers.engines.mlx_models import (
    ALL,
    FILES,
    FLAT,
    NAMED,
    NAMED_BY_CLASS,
    PARTS,
    REFUSED,
    STEP,
    SU,
    SU_SCALED,
    UNREAD,
    Reads,
)
from posenc.transformers.engines.rotation import (
    ALPHA,
    EngineRotation,
    RopeParameters,
    Rule,
    latent_yarn,
    linear,
    llama3,
    ntk_alpha,
    plain,
)

YARNS = ("yarn", "deepseek_yarn", "telechat3-yarn")
DEFAULT_LENGTHS = {"llama3": 8192, SU: 4096, SU_SCALED: 4096, **dict.fromkeys(YARNS, 4096)}
"""Trained lengths where it finds none."""

PARAMETERS, SHARE = "rope_parameters", "partial_rotary_factor"


def has_model(family: str) -> bool:
    """True if MLX LM has a model of this ``model_type``."""
    name = NAMED.get(family, family)
    return name == STEP or any(name in table for table in (FILES, PARTS, REFUSED, UNREAD))


def _file(config: ModelConfig) -> str:
    """The name of the file that reads a config.

    Raises:
        NotServedError: if there is none.
    """
    kind = config.outer
    by_class = (NAMED_BY_CLASS.get((kind, one)) for one in config.root.get("architectures") or ())
    name = next(filter(None, by_class), NAMED.get(kind, kind))
    if name in PARTS:
        if not config.nested and name not in FLAT:
            raise NotServedError("config.json has no text_config")
        name = PARTS[name].get(config.family, PARTS[name][""])
    if name in REFUSED:
        raise NotServedError(REFUSED[name])
    if name in UNREAD:
        raise UnreadError(UNREAD[name])
    if name != STEP and name not in FILES:
        raise NotServedError(f"it has no model {kind}")
    return name


def _ropes(config: ModelConfig) -> dict[str, RopeParameters]:
    name, standard, written = _file(config), config.ropes(), config.written
    if name == STEP:
        return {
            kind: _with_trained_length(rope) for kind, rope in _of_step(config, standard).items()
        }
    reads = FILES[name]
    for needed in reads.needs:
        outer, _, name = needed.rpartition(".")
        if name not in ((written.get(outer) or {}) if outer else written):
            raise NotServedError(f"config.json has no {name}" + (f" in {outer}" if outer else ""))
    if reads.by_layer:
        return {kind: _of_layer(reads, written, kind, rope) for kind, rope in standard.items()}
    base = float(_first_field(written, reads.bases, reads.base))
    scalings = (_at(written, place) for place in reads.scaling)
    scaling = next((one for one in scalings if isinstance(one, Mapping)), {})
    parameters = _scaling(reads, scaling)
    return {
        kind: _rope(config, reads, kind, replace(rope, base=base), parameters)
        for kind, rope in standard.items()
    }


def _rope(
    config: ModelConfig,
    reads: Reads,
    kind: str,
    rope: RopeParameters,
    parameters: Mapping[str, Any],
) -> RopeParameters:
    written, base = config.written, rope.base
    if reads.windows and kind not in ("", FULL):
        base, parameters = float(_first_field(written, (reads.windows,), reads.local)), {}
    width: int = rope.width
    if not config.completed.get("qk_rope_head_dim"):
        stated_width = next((written[name] for name in reads.widths if written.get(name)), None)
        width = stated_width or int(rope.head * _first_field(written, reads.shares, reads.share))
    if width % 2:
        raise NotServedError(f"it cannot rotate {width} features of a head, an odd number")
    trained = (written if reads.trained_outside else parameters).get(TRAINED)
    return _with_trained_length(
        replace(rope, base=base, width=width, parameters=parameters, trained=trained)
    )


def _of_layer(reads: Reads, written: Fields, kind: str, rope: RopeParameters) -> RopeParameters:
    """RoPE as read by a file with base, share and scaling of each layer type."""
    by_type = written.get(PARAMETERS)
    every = by_type if isinstance(by_type, Mapping) else reads.default
    parameters = every.get(kind or FULL) or {}
    base = float(_first_field(parameters, ("rope_theta",), reads.base))
    scaling = _scaling(reads, parameters)
    share: Any = 1.0
    if reads.shares or scaling["rope_type"] == "proportional":
        share = parameters.get(SHARE, written.get(SHARE) or 1.0)
    of_layer = replace(rope, base=base, width=int(rope.head * share), parameters=scaling)
    return _with_trained_length(replace(of_layer, trained=scaling.get(TRAINED)))


def _scaling(reads: Reads, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a scaling as a file takes them, its kind by ``rope_type``.

    Raises:
        NotServedError: if it does not start with them.
    """
    if not parameters:
        if reads.named and reads.needs:
            raise NotServedError("config.json has no rope_scaling")
        return {"rope_type": "default"}
    if not reads.keys <= parameters.keys():
        names = _listed(reads.keys)
        raise NotServedError(f"it takes a scaling of this model with {names}")
    kind = parameters.get("type") or parameters.get("rope_type") or "default"  # in this order
    if reads.starts is not ALL and kind not in reads.starts:
        raise NotServedError(f"it knows {_listed(reads.starts)} scaling of this model alone")
    if reads.kinds is not ALL and kind not in reads.kinds:
        return {"rope_type": "default"}
    scaling = {name: value for name, value in parameters.items() if name != "type"}
    if reads.trained_outside:
        scaling.pop(TRAINED, None)
    return scaling | {"rope_type": reads.named.get("", reads.named.get(kind, kind))}


def _of_step(
    config: ModelConfig, standard: Mapping[str, RopeParameters]
) -> dict[str, RopeParameters]:
    """The scaling is that of the layer types in ``yarn_only_types``, or of all without them."""
    written = config.written
    scaling = written.get("rope_scaling") or {}
    scaled = written.get("yarn_only_types") or standard
    ropes = {}
    for kind, rope in standard.items():
        named = {"rope_type": "default", **(scaling if kind in scaled else {})}
        base = rope.base if "rope_theta" in written else 1e4
        width = rope.width if written.get("partial_rotary_factors") else rope.head
        of_layer = replace(rope, base=base, width=width, parameters=named)
        ropes[kind] = replace(of_layer, trained=named.get(TRAINED))
    return ropes


def _at(fields: Fields, place: str) -> Any:
    """A field, or one in another; None if there is none."""
    outer, _, inner = place.rpartition(".")
    part = fields.get(outer) if outer else fields
    return part.get(inner) if isinstance(part, Mapping) else None


def _first_field(fields: Fields, places: tuple[str, ...], default: float | None) -> Any:
    """The first of some fields.

    Raises:
        NotServedError: if there is none, and no default.
    """
    values = (_at(fields, place) for place in places)
    value = next((value for value in values if value is not None), default)
    if value is None:
        outer, _, name = places[0].rpartition(".")
        where = f"in {outer}" if outer else "beside the parameters"
        raise NotServedError(f"config.json has no {name} {where}")
    return value


def _listed(names: Iterable[str]) -> str:
    *first, last = sorted(names)
    return f"{', '.join(first)} and {last}" if first else last


def _with_trained_length(rope: RopeParameters) -> RopeParameters:
    return rope if rope.trained else replace(rope, trained=DEFAULT_LENGTHS.get(rope.kind))


def _by_factor(rule: Rule) -> Rule:
    """A scaling whose factor is not derived from lengths."""

    def rotation(rope: RopeParameters, length: int) -> EngineRotation:
        return rule(replace(rope, parameters={**rope.parameters, "factor": _factor(rope)}), length)

    return rotation


def _factor(rope: RopeParameters) -> float:
    return float(rope.parameters["factor"])


def _longrope(rope: RopeParameters, length: int) -> EngineRotation:
    """Long factors for all texts; the trained length is required, a gain is not read."""
    trained = int(rope.parameters[TRAINED])
    return _su(replace(rope, trained=trained), length)


def _su(rope: RopeParameters, length: int) -> EngineRotation:
    usual: dict[str, Any] = {"long_factor": [1.0] * len(rope.frequencies())}
    return replace(rope, parameters=usual | dict(rope.parameters)).longrope(
        "long", rope.length_gain()
    )


def _su_scaled(rope: RopeParameters, length: int) -> EngineRotation:
    return rope.longrope("long", float(rope.parameters["long_mscale"] or rope.length_gain()))


MLX_LM = Engine(
    name="mlx-lm",
    option="mlx",
    source="mlx-lm 0.32.2, utils.py, models/rope_utils.py and the files of the models",
    read="2026-11",
    kinds={
        "default": plain,
        "mrope": plain,
        "linear": _by_factor(linear),
        "dynamic": _by_factor(RopeParameters.dynamic),
        "llama3": _by_factor(llama3),
        ALPHA: ntk_alpha,
        "longrope": _longrope,
        SU: _su,
        SU_SCALED: _su_scaled,
        "proportional": lambda rope, length: rope.proportional(rope.number("factor", 1.0)),
        **dict.fromkeys(YARNS, _by_factor(latent_yarn)),  # ``attention_factor`` is not read
    },
    ropes=_ropes,
    longest=lambda config: None,
)
