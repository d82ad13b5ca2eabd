"""Rules of transformers, and a loaded model's own frequencies against its config."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from posenc.transformers.checkpoints import parameters_in
from posenc.transformers.engines.config import HUNYUAN, Engine, ModelConfig, NotServedError
from posenc.transformers.engines.rotation import (
    ALPHA,
    USUAL,
    EngineRotation,
    RopeParameters,
    ntk_alpha,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def yarn(rope: RopeParameters, length: int) -> EngineRotation:
    """The gain as it is given, else of ``mscale`` and ``mscale_all_dim``, else the usual one."""
    parameters = rope.parameters
    gain = parameters.get("attention_factor")
    if gain is None:
        one, every = (float(parameters.get(name) or 0) for name in ("mscale", "mscale_all_dim"))
        gain = rope.quotient_gain(one, every) if one and every else rope.usual_gain()
    truncate = parameters.get("truncate")
    return rope.yarn(float(gain), truncate=True if truncate is None else bool(truncate))


def _longrope(rope: RopeParameters, length: int) -> EngineRotation:
    gain = rope.parameters.get("attention_factor")
    if gain is None:
        longer = rope.factor > 1
        gain = math.sqrt(1 + math.log(rope.factor) / math.log(rope.length)) if longer else 1.0
    return rope.longrope(rope.side(length), float(gain))


def _of_hunyuan(rope: RopeParameters) -> RopeParameters:
    if rope.kind != "dynamic" or not rope.parameters.get("alpha"):
        return rope
    return replace(rope, parameters={**rope.parameters, "rope_type": ALPHA})


def _ropes(config: ModelConfig) -> dict[str, RopeParameters]:
    """``truncate`` is read beside layer types, not in them; ``alpha`` by Hunyuan alone."""
    if config.family in HUNYUAN:
        return {kind: _of_hunyuan(rope) for kind, rope in config.ropes().items()}
    parameters = parameters_in(config.completed)
    return {
        kind: replace(
            rope, parameters={**rope.parameters, "truncate": parameters.get("truncate", True)}
        )
        if kind
        else rope
        for kind, rope in config.ropes().items()
    }


TRANSFORMERS = Engine(
    name="transformers",
    option="transformers",
    release="5.23",
    files="modeling_rope_utils.py, models/hunyuan_v1_dense and _moe",
    read="2026-11",
    packages=("transformers",),
    kinds={
        **USUAL,
        "dynamic": RopeParameters.dynamic,
        ALPHA: ntk_alpha,
        "longrope": _longrope,
        "proportional": lambda rope, length: rope.proportional(rope.number("factor", 1.0)),
        "yarn": yarn,
    },
    ropes=_ropes,
    longest=lambda config: config.longest,
)


@dataclass(frozen=True)
class Checked:
    """Frequencies of a loaded model.

    Args:
        path: of their buffer.
        layer_type: of the layers that they belong to; "": all.
        own: as the model rotates.
        stated: as a model made of its config would; None where the config does not say.
        problem: the difference in words; "" if there is none.
    """

    path: str
    layer_type: str
    own: EngineRotation
    stated: EngineRotation | None
    problem: str


def check(model: PreTrainedModel) -> tuple[Checked, ...]:
    """Each set of rotary frequencies of a loaded model beside those that its config states.

    They differ where a scaling was written into the config of a model that had been made already,
    where an override dropped the base, or where frequencies were lost in half precision. Those of
    models of images are left out.

    Args:
        model: of transformers, with its weights or without; frequencies that change with the length
            are those of the last text.
    """
    from posenc.transformers.stretching.frequencies import frequencies_in

    checked = []
    for frequencies in frequencies_in(model):
        config = getattr(frequencies.module, "config", None)
        if config is None or getattr(config, "rope_parameters", None) is None:
            continue
        own = EngineRotation(tuple(frequencies.theta().tolist()), frequencies.gain)
        stated = _stated(ModelConfig.of(config.to_dict()), frequencies.layer_type, own)
        problem = _problem(own, stated)
        checked.append(Checked(frequencies.name, frequencies.layer_type, own, stated, problem))
    return tuple(checked)


def _stated(config: ModelConfig, layer_type: str, own: EngineRotation) -> EngineRotation | None:
    """The rotation of a config; of those that change with the length, the one like ``own``."""
    ropes = config.ropes()
    rope = ropes.get(layer_type)
    if rope is None:
        return None
    try:
        made = [
            TRANSFORMERS.rotations(config, n)[layer_type] for n in (rope.length, rope.length + 1)
        ]
    except NotServedError:
        return None
    return next((rotation for rotation in made if rotation.like(own)), made[0])


def _problem(own: EngineRotation, stated: EngineRotation | None) -> str:
    if stated is None or own.like(stated):
        return ""
    if len(own.frequencies) != len(stated.frequencies):
        widths = (2 * len(rotation.frequencies) for rotation in (own, stated))
        return "rotates {} features of a head, its config says {}".format(*widths)
    if not own.same_gain(stated):
        return f"has the gain {own.gain:.5g}, its config says {stated.gain:.5g}"
    worst = max(
        abs(a / b - 1) if b else float(a != b)
        for a, b in zip(own.frequencies, stated.frequencies, strict=True)
    )
    return f"has other frequencies than its config says, by up to {worst:.2g} of their size"
