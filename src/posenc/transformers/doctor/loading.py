"""A model loaded from its folder, and its rotary frequencies beside its config."""

from __future__ import annotations

from pathlib import Path

from posenc.errors import CheckpointError
from posenc.transformers.checkpoints.fields import Fields
from posenc.transformers.engines import Checked, check
from posenc.transformers.hub import model_folder
from posenc.transformers.kinds import kind_of


def check_source(source: Path | str) -> tuple[Checked, ...]:
    """``check`` of a model as transformers loads it, in the dtype of its weights.

    Args:
        source: a folder with ``config.json`` and safetensors, or a name on the hub.

    Raises:
        CheckpointError: if transformers cannot load it; or as ``HubName.folder``.
    """
    folder = model_folder(source, weights=True)
    config = Fields.read(folder)
    kind = kind_of(config)
    if kind is None:
        raise CheckpointError(
            f"model_type in {config.path}",
            expected="a model of text or images that transformers loads",
            got=repr(config.values.get("model_type", "none")),
            remedy="Read its config alone: leave out --live.",
        )
    return check(kind.open(config, device="cpu", dtype="auto").model)
