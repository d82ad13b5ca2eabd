"""A loaded model's own frequencies against its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from posenc.transformers.engines.config import ModelConfig
from posenc.transformers.engines.engine import NotServedError
from posenc.transformers.engines.rotation import EngineRotation
from posenc.transformers.engines.transformers import TRANSFORMERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
