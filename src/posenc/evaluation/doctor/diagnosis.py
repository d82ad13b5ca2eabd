"""Diagnosis of a folder with ``config.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posenc.evaluation.doctor.config_findings import Finding, findings
from posenc.evaluation.doctor.costs import Cost, costs
from posenc.evaluation.doctor.positions import Positions, positions_of
from posenc.extension import EXTENSIONS
from posenc.integrations.transformers.config import Fields, read_object

UNMEASURED = "Costs were not measured."


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``posenc doctor`` reports.

    Args:
        model_type: of the config.
        positions: the encodings.
        findings: settings that do not do what they say.
        extensions: for each encoding, names of the methods that extend it to longer inputs.
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
    config = Fields.read(folder).values
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    positions = positions_of(inner)
    rows, acceleration = (
        costs(folder, budget=budget) if budget else ([], "Costs were not measured.")
    )
    return Diagnosis(
        str(config.get("model_type", "")),
        tuple(positions),
        tuple(findings(inner, read_object(folder / "tokenizer_config.json"))),
        {place.encoding: _extensions(place.encoding) for place in positions if place.encoding},
        tuple(rows),
        acceleration,
    )


def _extensions(encoding: str) -> tuple[str, ...]:
    return tuple(
        name for name, method in EXTENSIONS.items() if encoding in method.on or "any" in method.on
    )
