"""Lengths that a model holds, and a method for longer texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posenc.errors import CheckpointError
from posenc.transformers.checkpoints import TRAINED, Fields, scaling_of
from posenc.transformers.doctor.config_findings import rope_dicts
from posenc.transformers.doctor.facts import UNKNOWN, LayerReading, Layers, RotationFacts
from posenc.transformers.kinds import kind_of, require_unstretched
from posenc.transformers.live import LiveEncoder, LiveMaskedLM

Config = Mapping[str, Any]
FACTOR = 4
SENTENCES = "sentence_bert_config.json"
"""File of sentence-transformers, beside ``config.json``."""

REFUSED = "transformers refuses this config"


@dataclass(frozen=True)
class Limit:
    """Tokens beyond which outputs are undefined or degrade.

    Args:
        tokens: that work.
        why: further ones do not.
        beyond: what happens to longer texts: outputs degrade, the model breaks, or texts are cut.
    """

    tokens: int
    why: str
    beyond: Literal["degrades", "breaks", "cuts"] = "breaks"


@dataclass(frozen=True)
class Advice:
    """A method for texts beyond the limit; without a name where none is advised.

    Args:
        method: key of ``posenc.extension.EXTENSIONS``.
        why: it or none is advised.
        command: that writes the extended model, where ``posenc extend`` can.
        config: fields for ``config.json``, by which transformers itself uses the method.
    """

    method: str
    why: str
    command: str
    config: Mapping[str, Any]


def limits(config: Config, reading: LayerReading, cut: int | None = None) -> tuple[Limit, ...]:
    """The lengths that a model holds, the shortest first, then the one at which texts are cut.

    None for windows and biases.

    Args:
        config: of the text model, with defaults.
        reading: of its layers.
        cut: tokens that a sentence encoder keeps of a text; None: all.
    """
    bounds = [
        Limit(table.rows - table.first, f"{table.module} has no row for a further token")
        for table in reading.tables
    ]
    trained, count = trained_length(config), len(_beyond(reading))
    if trained and count:
        bounds.append(Limit(trained, "longer distances were never trained", "degrades"))
    if cut:
        bounds.append(
            Limit(cut, f"max_seq_length in {SENTENCES}, by sentence-transformers", "cuts")
        )
    return tuple(sorted(set(bounds), key=lambda limit: (limit.beyond == "cuts", limit.tokens)))


def trained_length(config: Config) -> int | None:
    """Tokens of the longest text that rotations serve, stretched ones included."""
    longest = config.get("max_position_embeddings") or config.get("n_positions")
    for rope in rope_dicts(config).values():
        kind, factor = scaling_of(rope), rope.get("factor")
        original = config.get(TRAINED) or rope.get(TRAINED)
        if kind == "dynamic" and longest and factor:
            return int(longest * factor)
        if kind == "linear" and original and factor:
            return int(original * factor)
    return int(longest) if longest else None


def advise(folder: Path, fields: Fields, config: Config, reading: LayerReading) -> Advice:
    """One method for longer texts, or why there is none.

    Args:
        folder: of the model, for the command.
        fields: of its ``config.json``.
        config: of its text model, with defaults.
        reading: its layers.
    """
    trained, beyond = trained_length(config), _beyond(reading)
    scaled = _scaled(config)
    if any(layers.attention.rotation == UNKNOWN for layers in reading.layers):
        return no_advice("how these layers encode positions is not known")
    if reading.tables and not beyond:
        return _for_table(folder, fields)
    if any(layers.attention.unlimited == UNKNOWN for layers in reading.layers):
        return no_advice("what some layers see is not known")
    if not beyond:
        return no_advice(_why_unlimited(reading))
    if trained is None:
        return no_advice("the config does not tell the length that the model was trained for")
    if scaled:
        return no_advice(f"the rotation is of type {scaled} already, not the default one")
    if any(layers.attention.rotation.base is None for layers in beyond):  # type: ignore[union-attr]
        return no_advice("the frequencies of the rotation are not those that methods start from")
    command = f"posenc extend {folder} --method yarn --factor {FACTOR}"
    command, lines = command if _extendable(fields) else "", _lines(config, beyond, trained)
    if not command and not lines:
        return no_advice("neither posenc extend nor transformers changes this model's rotation")
    why = f"factor {FACTOR}, for {FACTOR * trained:,} tokens: changes frequencies alone"
    return Advice("yarn", why, command, lines)


def _beyond(reading: LayerReading) -> list[Layers]:
    """Layers that rotate, over distances that grow with the text."""
    return [
        layers
        for layers in reading.layers
        if isinstance(layers.attention.rotation, RotationFacts)
        and layers.attention.unlimited is True
    ]


def _why_unlimited(reading: LayerReading) -> str:
    if not reading.layers:
        return "the config does not tell its layers"
    facts = [layers.attention for layers in reading.layers if layers.attention.kind != "none"]
    if not facts:
        return "no layer has attention: positions enter by the order of tokens"
    if any(isinstance(fact.rotation, RotationFacts) for fact in facts):
        return "no layer rotates over distances beyond its window"
    if any(fact.bias for fact in facts):
        return "positions enter by a bias, which is defined for all distances"
    if any(fact.absolute is True for fact in facts):
        return "positions are added to the input, by a computed table or another part"
    return "no layer encodes positions"


def _for_table(folder: Path, fields: Fields) -> Advice:
    if not _extendable(fields):
        return no_advice("posenc extend does not write models of this kind with a longer table")
    kind = kind_of(fields)
    if kind is LiveMaskedLM:
        return no_advice(
            "without training every longer table loses: cut texts around what is asked"
        )
    method, why = "interpolate", "a longer table with rows in between"
    if kind is LiveEncoder:
        method, why = "random_tail", "rows of short texts stay, further ones are drawn like them"
    command = f"posenc extend {folder} --method {method} --factor {FACTOR}"
    return Advice(method, f"factor {FACTOR}: {why}", command, {})


def _scaled(config: Config) -> str:
    return ", ".join(sorted({*map(scaling_of, rope_dicts(config).values())} - {"default"}))


def _lines(config: Config, beyond: list[Layers], trained: int) -> dict[str, Any]:
    """Fields of ``config.json`` with YaRN, for the layer types that it serves."""
    if not isinstance(config.get("rope_parameters"), Mapping):
        return {}
    types = config.get("layer_types") or ()
    served = {types[n] for layers in beyond for n in layers.numbers if n < len(types)}
    yarn = {"rope_type": "yarn", "factor": float(FACTOR), TRAINED: trained}
    ropes = {
        kind: {**rope, **(yarn if not kind or kind in served else {})}
        for kind, rope in rope_dicts(config).items()
    }
    if all(scaling_of(rope) == "default" for rope in ropes.values()):
        return {}
    rope: Mapping[str, Any] = ropes.get("", ropes)
    return {"max_position_embeddings": FACTOR * trained, "rope_parameters": rope}


def _extendable(fields: Fields) -> bool:
    try:
        require_unstretched(fields)
        return kind_of(fields) is not None
    except CheckpointError:
        return False


def no_advice(why: str) -> Advice:
    """Advice without a method, with the reason."""
    return Advice("", why, "", {})


def config_lines(advice: Advice) -> list[str]:
    """The fields as lines of a JSON object."""
    return json.dumps(advice.config, indent=2).splitlines()[1:-1] if advice.config else []
