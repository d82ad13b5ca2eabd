"""Models that ``posenc compare`` has trained, for the commands that stretch and measure models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from posenc.errors import ArgumentError, CheckpointError

if TYPE_CHECKING:
    from posenc.models import Decoder

__all__ = ["FAMILY", "as_checkpoint", "lab_folder", "lab_model"]

FAMILY = "llama"
"""What they are written as: with RoPE they are of that shape."""


def lab_folder(folder: Path) -> Path:
    """The folder of the model in a run's folder (``OUT/runs/rope/seed-0``), or the same."""
    return folder / "model" if (folder / "model" / "config.json").is_file() else folder


def lab_model(folder: Path, *, device: str) -> Decoder:
    """The language model that ``posenc compare`` saved into a folder.

    Raises:
        CheckpointError: when it is damaged, or of another task.
    """
    from posenc.models import Decoder

    return Decoder.load(folder, device=device)


@contextmanager
def as_checkpoint(model: Decoder, folder: Path) -> Iterator[Path]:
    """A temporary folder with the model as transformers has it.

    Args:
        model: loaded from ``folder``.
        folder: for messages.

    Raises:
        CheckpointError: when transformers has no such model.
    """
    from posenc.integrations.transformers import save

    with TemporaryDirectory(prefix="posenc-") as place:
        like = Path(place) / "model"
        try:
            save(model, like, family=FAMILY)
        except ArgumentError as error:
            raise CheckpointError(
                str(folder),
                expected=f"a model that can be written as {FAMILY}: one trained with rope",
                got=f"one trained with {model.config.encoding}",
                remedy="posenc evaluate measures it as it is; posenc compare --encodings rope "
                "trains one that can be stretched.",
            ) from error
        yield like
