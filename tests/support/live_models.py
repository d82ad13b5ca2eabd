"""Small models of posenc as transformers runs them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from posenc.evaluation.kinds import open_live
from posenc.evaluation.live import LiveModel
from posenc.integrations.transformers import save
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.models import SavedModel


def live(model: SavedModel, family: str = "llama") -> LiveModel:
    """The model, written for transformers and opened by it, without gradients."""
    with TemporaryDirectory() as folder:
        written = Path(folder) / "model"
        save(model, written, family=family)
        fields = Fields.read(written)
        opened = open_live(fields, lambda kind: kind.open(fields, device="cpu"))
    assert opened is not None
    return opened.requires_grad_(requires_grad=False)
