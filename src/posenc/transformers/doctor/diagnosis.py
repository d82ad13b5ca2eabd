"""Diagnosis of a folder with ``config.json``, or of a loaded model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from posenc.attention.backends.native.build import description
from posenc.transformers.checkpoints.fields import Fields, read_object
from posenc.transformers.doctor.advice import (
    REFUSED,
    SENTENCES,
    Advice,
    Limit,
    advise,
    limits,
    no_advice,
)
from posenc.transformers.doctor.config_findings import Finding, findings, refused
from posenc.transformers.doctor.config_values import readable
from posenc.transformers.doctor.costs import LayerCost, costs
from posenc.transformers.doctor.disagreements import disagreements
from posenc.transformers.doctor.facts import LayerReading
from posenc.transformers.doctor.from_config import read_config, unknown_types
from posenc.transformers.doctor.process import SECONDS, NotRunError, read_by_running
from posenc.transformers.engines.config import completed, refusal, text_part
from posenc.transformers.hub import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNMEASURED = "Costs were not measured."
CUSTOM_CODE = (
    "code of the model's own, which posenc does not run, reads values of this config by layer"
)


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``posenc doctor`` reports.

    Args:
        model_type: of the config.
        reading: of its layers.
        limits: on the length of texts.
        findings: settings that do not do what they say.
        advice: for longer texts.
        costs: of one layer; empty if not measured.
        acceleration: whether ``accelerate`` helps, in a sentence.
        kernels: the CPU kernels that posenc uses on this machine, or why none.
    """

    model_type: str
    reading: LayerReading
    limits: tuple[Limit, ...]
    findings: tuple[Finding, ...]
    advice: Advice
    costs: tuple[LayerCost, ...]
    acceleration: str
    kernels: str

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as JSON values."""
        return asdict(self)


def diagnose(
    source: Path | str | PreTrainedModel, *, budget: float = 60.0, run_seconds: float = SECONDS
) -> Diagnosis:
    """The layers of a transformers model as they compute, their limits, costs and ignored settings.

    Reads ``config.json`` and, if it is there, ``tokenizer_config.json``; weights are not needed.
    The model is built without storing weights and run in a process of its own.

    Args:
        source: a folder written by ``save_pretrained``, or a name on the hub
            (``org/name@revision``), of which small files are fetched; or a loaded model, whose
            config is read.
        budget: seconds to measure costs for; 0: none.
        run_seconds: limit of that process; 0: the config alone is read.

    Raises:
        CheckpointError: if there is no such file, or it is not a JSON object, or no positions are
            computed by its values; or as ``HubName.folder``.
    """
    if isinstance(source, Path | str):
        folder = model_folder(source, weights=False)
        return _diagnose(folder, Path(source), budget, run_seconds)
    with TemporaryDirectory() as written:
        source.config.save_pretrained(written)
        named = Path(source.name_or_path or "FOLDER")
        return _diagnose(Path(written), named, budget, run_seconds)


def _diagnose(folder: Path, named: Path, budget: float, run_seconds: float) -> Diagnosis:
    """The diagnosis of a folder that commands call by a name."""
    fields = Fields.read(folder)
    values, unread = readable(fields)
    tokenizer = read_object(folder / "tokenizer_config.json")
    why = "" if unread else refusal(values)
    # defaults of a class in transformers are not those of the model's own code
    config = text_part(values if unread else completed(values))
    try:
        if unread:
            raise NotRunError(CUSTOM_CODE)
        reading = read_by_running(folder, seconds=run_seconds)
    except NotRunError as error:
        reading = read_config(config, str(error))
    cut = read_object(folder / SENTENCES).get("max_seq_length")
    bounds = limits(config, reading, cut if type(cut) is int and cut > 0 else None)
    longest = min((bound.tokens for bound in bounds if bound.beyond == "breaks"), default=None)
    config_findings = findings(text_part(values), tokenizer, longest, switched=config)
    config_findings += [*refused(why, config_findings), *unread, *unknown_types(config, reading)]
    rows, acceleration = costs(folder, budget=budget) if budget else ([], UNMEASURED)
    return Diagnosis(
        str(fields.values.get("model_type", "")),
        reading,
        bounds,
        (*config_findings, *disagreements(config, reading)),
        no_advice(REFUSED) if why else advise(named, fields, config, reading),
        tuple(rows),
        acceleration,
        description(),
    )
