"""Folders of models that transformers runs, opened by their architecture."""

from __future__ import annotations

from pathlib import Path

from posenc.errors import CheckpointError
from posenc.evaluation.live import LiveDecoder, LiveEncoder, LiveMaskedLM, LiveModel
from posenc.evaluation.live_images import LiveImages
from posenc.integrations.transformers.config import Fields
from posenc.integrations.transformers.stored import StoredTensors

LIVE = (LiveDecoder, LiveMaskedLM, LiveImages, LiveEncoder)


def kind_of(config: Fields) -> type[LiveModel] | None:
    """The class for a config's architecture; None for models that cannot be measured.

    Raises:
        CheckpointError: if transformers is missing.
    """
    try:
        from transformers.models.auto import modeling_auto
    except ImportError as error:
        raise CheckpointError(
            str(config.path),
            expected="transformers, which runs it",
            got="not installed",
            remedy="Install it: pip install 'posenc[extend]'.",
        ) from error
    family, (name, *_) = config.values.get("model_type"), config.values.get("architectures") or [""]
    for kind in LIVE:
        for known, names in getattr(modeling_auto, kind.architectures).items():
            if (
                name in (names if isinstance(names, tuple) else (names,))
                if name
                else known == family
            ):
                return kind
    return None


def open_live(folder: Path, config: Fields, *, device: str) -> LiveModel | None:
    """The model of a folder; None for one that cannot be measured.

    Raises:
        CheckpointError: if transformers is missing, or cannot load it.
    """
    kind = kind_of(config)
    if kind is None:
        return None
    with StoredTensors(folder):  # names what is missing
        opened = kind.open(folder, device=device)
    if isinstance(opened, LiveEncoder) and opened.model.main_input_name == "pixel_values":
        opened = LiveImages(opened.model)
    if isinstance(opened, LiveImages):
        sized = hasattr(opened.config, "patch_size") and hasattr(opened.config, "image_size")
        return opened if sized else None
    return None if opened.model.config.is_encoder_decoder else opened
