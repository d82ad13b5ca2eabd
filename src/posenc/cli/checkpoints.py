"""Checkpoint folders for the commands that stretch and measure models."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, cast

from posenc.cli.lab_models import FAMILY, as_checkpoint, lab_folder, lab_model
from posenc.errors import ArgumentError, CheckpointError, OutputError

if TYPE_CHECKING:
    from torch import nn

    from posenc.evaluation.candidates import Method
    from posenc.evaluation.results import Study
    from posenc.models import Decoder

__all__ = ["Opened", "open_checkpoint", "require_free", "write_checkpoint", "write_report"]

BESIDE = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("*.model", "chat_template*", "generation_config.json", "preprocessor_config.json"),
)
"""Files that go with a model and say nothing of its positions."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A checkpoint that has been read.

    Args:
        folder: where it is.
        family: ``model_type``.
        model: in eval mode.
        length: it was trained at, in tokens (images: pixels of the longer side).
        from_lab: it was trained by ``posenc compare``, and is not in transformers' form.
    """

    folder: Path
    family: str
    model: nn.Module
    length: int
    from_lab: bool = False


def open_checkpoint(
    folder: Path, *, trained_length: int | None, device: str, to_write: bool
) -> Opened:
    """Read a checkpoint folder of transformers, or a language model of ``posenc compare``.

    Args:
        folder: with ``config.json`` and safetensors; of ``posenc compare`` also a run's.
        trained_length: instead of what ``config.json`` says.
        device: where the model goes.
        to_write: the stretched model is to be written.

    Raises:
        CheckpointError: when it is none, is incomplete, or of a family that cannot be read or,
            if that is wanted, written.
        ArgumentError: when its length is unknown, or another one than its table's.
    """
    from posenc.integrations.transformers import FAMILIES, load
    from posenc.integrations.transformers.config import Fields
    from posenc.integrations.transformers.extended import FIELD
    from posenc.integrations.transformers.family import family_name
    from posenc.models import Decoder, Encoder, ImageEncoder, MaskedLM, VisionTransformer

    folder = lab_folder(folder)
    fields = Fields.read(folder)
    if fields.values.get("kind") is not None and "model_type" not in fields.values:
        return _open_lab_model(folder, trained_length, device=device, to_write=to_write)
    family = str(fields.values.get("model_type"))
    written = [name for name, known in FAMILIES.items() if known.write is not None]
    if to_write and family_name(family) not in written:
        raise CheckpointError(
            f"model_type in {fields.path}",
            expected=f"one of {', '.join(written)}",
            got=repr(fields.values.get("model_type")),
            remedy="Models of other families cannot be stretched; the folder was not touched.",
        )
    stretched = fields.values.get(FIELD)
    if to_write and stretched is not None:
        raise CheckpointError(
            f"{FIELD} in {fields.path}",
            expected="a checkpoint that posenc has not stretched yet",
            got=f"one stretched by {stretched}",
            remedy="Stretch the one it came from; methods can be joined: rerope+log_n.",
        )
    model = load(folder, device=device)
    if not isinstance(model, Decoder | Encoder | MaskedLM | ImageEncoder | VisionTransformer):
        raise CheckpointError(
            f"model_type in {fields.path}",
            expected="a model that can be measured: of the next token (llama, mistral, qwen2, "
            "gpt_neox, bloom), a text encoder (bert, roberta) or of images (vit)",
            got=repr(family),
            remedy="Name the folder of such a model.",
        )
    held = _held(model)
    if held is not None and trained_length not in (None, held):
        raise ArgumentError(
            "--trained-length",
            expected=f"{held}, which its table of positions has",
            got=trained_length,
            remedy="Leave it out.",
        )
    stated = fields.values.get("max_position_embeddings")
    length = trained_length or held or (stated if isinstance(stated, int) else None)
    if length is None:
        raise ArgumentError(
            "--trained-length",
            expected="the length it was trained at",
            got="none, and no max_position_embeddings in config.json",
            remedy="Give it in tokens.",
        )
    return Opened(folder, family, model, length)


def _open_lab_model(
    folder: Path, trained_length: int | None, *, device: str, to_write: bool
) -> Opened:
    """A language model of ``posenc compare``."""
    model = lab_model(folder, device=device)
    length = model.config.max_length or trained_length
    if length is None or trained_length not in (None, length):
        raise ArgumentError(
            "--trained-length",
            expected="the length it was trained at" + (f", {length}" if length else ""),
            got=trained_length,
            remedy="Leave it out." if length else "Give it in bytes.",
        )
    if to_write:
        with as_checkpoint(model, folder):  # refused here rather than after the work
            pass
    return Opened(folder, FAMILY, model, length, from_lab=True)


def require_free(out: Path) -> None:
    """Refuse an output folder that holds something, before any work is done.

    Raises:
        OutputError: naming it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(
            "--out",
            expected="a new or empty folder",
            got=f"{out}, which is in use",
            remedy="Choose another one; it was not touched.",
        )


def write_checkpoint(
    opened: Opened,
    model: nn.Module,
    method: Method,
    *,
    factor: float,
    out: Path,
    study: Study | None,
) -> bool:
    """Write a stretched model, what goes with it and the report; the folder is whole or absent.

    Returns:
        Whether transformers runs the model as stretched.

    Raises:
        OutputError: when that is impossible; then nothing is left behind.
    """
    from posenc.evaluation.report.page import write_study
    from posenc.integrations.transformers.stretched import save_stretched
    from posenc.models.replacing import encodings_of
    from posenc.storage import make_folder, write_bytes

    require_free(out)
    make_folder(out.parent)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        with _like(opened) as like:
            known = save_stretched(
                model,
                partial,
                like=like,
                originals=encodings_of(opened.model),
                method=method.name,
                factor=factor,
                length=opened.length,
                options=method.options,
            )
        for path in sorted(opened.folder.iterdir()):
            if path.is_file() and any(fnmatch(path.name, pattern) for pattern in BESIDE):
                write_bytes(partial / path.name, path.read_bytes())
        if study is not None:
            write_study(study, partial / "report")
        publish(partial, out)
    except OutputError as error:
        error.remedy = "Free some space or choose another folder (--out); nothing was left behind."
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return known


def write_report(study: Study, out: Path) -> None:
    """Write a report without a checkpoint into a new folder, whole or not at all.

    Raises:
        OutputError: when that is impossible; then nothing is left behind.
    """
    from posenc.evaluation.report.page import write_study
    from posenc.storage import make_folder

    require_free(out)
    make_folder(out.parent)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        write_study(study, partial / "report")
        publish(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _like(opened: Opened) -> AbstractContextManager[Path]:
    """The checkpoint in transformers' form, which what is written begins from."""
    if opened.from_lab:
        return as_checkpoint(cast("Decoder", opened.model), opened.folder)
    return nullcontext(opened.folder)


def publish(partial: Path, out: Path) -> None:
    """Give a finished folder its name.

    Raises:
        OutputError: when that is impossible.
    """
    try:
        partial.replace(out)
    except OSError as error:
        raise OutputError(
            "--out",
            expected=f"to give {partial} the name {out.name}",
            got=error.strerror or error,
            remedy="Choose another folder.",
        ) from error


def _held(model: nn.Module) -> int | None:
    """The length that a model's learned table of positions says; None: it has none."""
    from posenc.encodings.embedding.learned import Learned
    from posenc.models import ImageEncoder, VisionTransformer
    from posenc.models.replacing import encodings_of

    if isinstance(model, ImageEncoder | VisionTransformer):
        return max(model.config.size)
    records = encodings_of(model)
    table = records[0].embedding if records else None
    return table.max_length if isinstance(table, Learned) else None
