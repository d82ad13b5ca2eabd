"""Models of transformers that programs can run, by the architectures of their configs."""

from __future__ import annotations

from collections.abc import Callable

from posenc.errors import CheckpointError
from posenc.transformers.checkpoints import FIELD, Fields
from posenc.transformers.doctor.config_values import readable
from posenc.transformers.live import LiveDecoder, LiveEncoder, LiveImages, LiveMaskedLM, LiveModel

LIVE = (LiveDecoder, LiveMaskedLM, LiveImages, LiveEncoder)


def require_unstretched(config: Fields) -> None:
    """Refuse checkpoints that posenc has stretched, before their weights are read."""
    if config.values.get(FIELD) is not None:
        raise CheckpointError(
            f"{FIELD} in {config.path}",
            expected="a checkpoint that posenc has not stretched yet",
            got=f"one stretched by {config.values[FIELD]}",
            remedy="Stretch the one it came from; methods can be joined: rerope+log_n.",
        )


def require_transformers(model: str) -> None:
    """Refuse to run a model without transformers, or with one that is too old.

    Raises:
        CheckpointError: if it is missing.
        VersionError: if it is too old.
    """
    try:
        import transformers  # noqa: F401

        from posenc.transformers import versions  # noqa: F401
    except ModuleNotFoundError as error:
        raise CheckpointError(
            model,
            expected="transformers, which runs it",
            got="not installed",
            remedy="Install it: pip install 'posenc[extend]'.",
        ) from error


def kind_of(config: Fields) -> type[LiveModel] | None:
    """The class for a config's architecture; None for models that cannot be measured.

    Raises:
        CheckpointError: if transformers is missing; or as ``readable``.
        VersionError: if it is too old.
    """
    readable(config)
    require_transformers(str(config.path))
    from transformers.models.auto import modeling_auto

    family, (name, *_) = config.values.get("model_type"), config.values.get("architectures") or [""]
    for kind in LIVE:
        for known, names in getattr(modeling_auto, kind.architectures).items():
            classes = names if isinstance(names, tuple) else (names,)
            if name in classes or (not name and known == family):
                return kind
    return None


def open_live(config: Fields, load: Callable[[type[LiveModel]], LiveModel]) -> LiveModel | None:
    """The model of a config; None for one that cannot be measured.

    Args:
        config: of the model.
        load: makes it of the class for its architecture.

    Raises:
        CheckpointError: if transformers cannot load it; or as ``kind_of``.
    """
    kind = kind_of(config)
    if kind is None:
        return None
    opened = load(kind)
    if isinstance(opened, LiveEncoder) and opened.model.main_input_name == "pixel_values":
        opened = LiveImages(opened.model)
    if isinstance(opened, LiveImages):
        sized = hasattr(opened.config, "patch_size") and hasattr(opened.config, "image_size")
        return opened if sized else None
    return None if opened.model.config.is_encoder_decoder else opened
