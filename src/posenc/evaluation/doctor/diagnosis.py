"""Diagnosis of a folder with ``config.json``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posenc.errors import CheckpointError
from posenc.evaluation.checkpoint import require_extendable
from posenc.evaluation.doctor.config_findings import Finding, findings
from posenc.evaluation.doctor.costs import Cost, costs
from posenc.evaluation.doctor.positions import Positions, positions_of
from posenc.extension import EXTENSIONS, applicable
from posenc.integrations.transformers.config import Fields, read_object
from posenc.integrations.transformers.families import FAMILIES
from posenc.integrations.transformers.family import family_name

UNMEASURED = "Costs were not measured."


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``posenc doctor`` reports.

    Args:
        model_type: of the config.
        positions: the encodings.
        findings: settings that do not do what they say.
        extensions: for each encoding, names of the methods by which ``posenc extend`` writes this
            model for longer inputs.
        costs: of one layer; empty if not measured.
        acceleration: whether ``accelerate`` helps, in a sentence.
    """

    model_type: str
    positions: tuple[Positions, ...]
    findings: tuple[Finding, ...]
    extensions: dict[str, tuple[str, ...]]
    costs: tuple[Cost, ...]
    acceleration: str

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as JSON values."""
        return asdict(self)


def diagnose(folder: Path | str, *, budget: float = 60.0) -> Diagnosis:
    """The encodings of a transformers model, their limits, costs and settings without effect.

    Reads ``config.json`` and, if it is there, ``tokenizer_config.json``; weights are not needed.

    Args:
        folder: written by ``save_pretrained``, or downloaded from a hub.
        budget: seconds to measure costs for; 0: none.

    Raises:
        CheckpointError: if there is no such file, or it is not a JSON object.
    """
    folder = Path(folder)
    fields = Fields.read(folder)
    stored = _text(fields.values)
    positions = positions_of(_text(_completed(folder, fields.values)))
    rows, acceleration = costs(folder, budget=budget) if budget else ([], UNMEASURED)
    return Diagnosis(
        str(fields.values.get("model_type", "")),
        tuple(positions),
        tuple(findings(stored, read_object(folder / "tokenizer_config.json"))),
        {
            place.encoding: _extensions(fields, place.encoding)
            for place in positions
            if place.encoding
        },
        tuple(rows),
        acceleration,
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _completed(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with transformers' defaults, such as the type of each layer, if it has them."""
    try:
        from transformers import AutoConfig
    except ImportError:
        return config
    library = logging.getLogger("transformers")
    level = library.level
    library.setLevel(logging.CRITICAL)  # findings say in words what it warns of
    try:
        return dict(AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict())
    except Exception:  # an arbitrary file
        return config
    finally:
        library.setLevel(level)


def _extensions(fields: Fields, encoding: str) -> tuple[str, ...]:
    """Methods of ``posenc extend`` for a checkpoint and one of its encodings."""
    family = str(fields.values.get("model_type"))
    try:
        require_extendable(fields, family)
        rope = FAMILIES[family_name(family)].rope
        if rope is None or encoding != "rope":
            fitting = [
                name
                for name, method in EXTENSIONS.items()
                if encoding in method.on or "any" in method.on
            ]
        else:
            heads = fields.count("num_attention_heads")
            width = fields.optional_count("head_dim") or fields.count("hidden_size") // heads
            fitting = applicable(rope.read(fields, head_dim=width))
    except CheckpointError:
        return ()
    return tuple(name for name in fitting if name != "direct")
