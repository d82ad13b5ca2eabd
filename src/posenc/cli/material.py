"""What a checkpoint is measured on: a text by its tokenizer, or images as it takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posenc.cli.checkpoints import Opened
from posenc.errors import ArgumentError, CheckpointError
from posenc.storage import panics_as_errors, read_bytes, read_json

if TYPE_CHECKING:
    from posenc.evaluation.images import ImageSource
    from posenc.evaluation.stretching import Material
    from posenc.evaluation.texts import Marks

__all__ = ["material_of"]

BYTES = 256

MASKS = ("[MASK]", "<mask>")
"""What hides a token, where the folder does not say."""

AGAIN = "Save it again; nothing was loaded."

MOST_TOKENIZER = 1 << 26
"""Bytes of a tokenizer.json; those of 256,000 tokens have half of it."""

Encode = Callable[[str], Sequence[int]]


def material_of(
    opened: Opened, *, text: Path | None, images: Path | None, training: bool
) -> Material:
    """What a checkpoint is measured on.

    Args:
        opened: the checkpoint.
        text: a file or folder; the shipped text by default.
        images: a folder of image files, or a file of arrays.
        training: whether anything is to be trained on the text.

    Raises:
        ArgumentError: when a model that sees images is given a text, or the reverse, or the
            tokenizers library is missing.
        CheckpointError: when its tokenizer is missing or not its own.
        DataError: when the text is unusable.
    """
    from posenc.evaluation.texts import read_ids
    from posenc.models import Decoder, Encoder, ImageEncoder, MaskedLM, VisionTransformer

    model = opened.model
    sees = isinstance(model, ImageEncoder | VisionTransformer)
    wrong, right, given = ("--text", "--images", text) if sees else ("--images", "--text", images)
    if given is not None:
        what = "sees images" if sees else "reads text"
        raise ArgumentError(
            wrong,
            expected=f"none, for a {opened.family}, which {what}",
            got=str(given),
            remedy=f"Give {right}.",
        )
    if sees:
        return _image_source(opened.folder, images)
    assert isinstance(model, Decoder | Encoder | MaskedLM)  # no others are opened
    encode, marks = _tokenizer(opened.folder, model.config.vocabulary)
    return read_ids(text, encode=encode, training=training, marks=marks)


def _image_source(folder: Path, images: Path | None) -> ImageSource:
    """Images as ``preprocessor_config.json`` says the model takes them, else as ViT does."""
    from posenc.evaluation.images import ImageSource
    from posenc.integrations.transformers.config import Fields

    labels = _read_json(folder / "config.json").get("label2id") or {}
    if not isinstance(labels, dict) or not all(type(each) is int for each in labels.values()):
        raise CheckpointError(
            f"label2id in {folder / 'config.json'}",
            expected="numbers of classes by their names",
            got=str(labels)[:80],
            remedy=AGAIN,
        )
    path = folder / "preprocessor_config.json"
    fields = Fields({"do_rescale": True, "do_normalize": True} | _read_json(path), path)
    normalised = fields.flag("do_normalize")
    mean = fields.numbers("image_mean") if normalised and "image_mean" in fields.values else [0.5]
    std = fields.numbers("image_std") if normalised and "image_std" in fields.values else [0.5]
    for name, values in (("image_mean", mean), ("image_std", std)):
        if len(values) not in (1, 3) or (values is std and min(map(abs, values)) == 0):
            raise fields.wrong(name, "a number a channel, none of them 0 for image_std", values)
    return ImageSource(
        images,
        classes=labels,
        scale=fields.number("rescale_factor", 1 / 255) if fields.flag("do_rescale") else 1,
        mean=mean if normalised else [0.0],
        std=std if normalised else [1.0],
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The fields of a file; none where there is no file.

    Raises:
        CheckpointError: when it is no JSON object.
    """
    if not path.exists():
        return {}
    fields = read_json(path, expected="a JSON object", remedy=AGAIN)
    if not isinstance(fields, dict):
        raise CheckpointError(
            str(path), expected="a JSON object", got=type(fields).__name__, remedy=AGAIN
        )
    return fields


def _no_tokenizer(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(str(path), expected="a tokenizer", got=error, remedy=AGAIN)


def _tokenizer(folder: Path, vocabulary: int) -> tuple[Encode | None, Marks]:
    """The tokenizer in a folder, and what it adds to a text; None where ids are bytes."""
    from posenc.evaluation.texts import Marks

    path = folder / "tokenizer.json"
    if not path.exists():
        if vocabulary in (BYTES, BYTES + 1):
            return None, Marks(mask=BYTES if vocabulary > BYTES else None)
        raise CheckpointError(
            str(path),
            expected=f"a tokenizer for a vocabulary of {vocabulary}",
            got="no such file",
            remedy="Save the fast tokenizer into the folder. Only models of 256 bytes (and a mask) "
            "need none.",
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ArgumentError(
            "checkpoint",
            expected="the tokenizers library, which reads its tokenizer.json",
            got="none installed",
            remedy="pip install 'posenc[extend]'",
        ) from error
    try:
        with panics_as_errors():
            tokenizer = Tokenizer.from_buffer(read_bytes(path, most=MOST_TOKENIZER))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            around = tokenizer.encode("").ids
    except Exception as error:  # the library raises nothing narrower
        raise _no_tokenizer(path, error) from error

    def encode(text: str) -> list[int]:
        try:
            with panics_as_errors():
                ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:
            raise _no_tokenizer(path, error) from error
        if ids and max(ids) >= vocabulary:
            raise CheckpointError(
                str(path),
                expected=f"ids below {vocabulary}, the model's vocabulary",
                got=max(ids),
                remedy="Model and tokenizer do not belong together.",
            )
        return ids

    named = _read_json(folder / "tokenizer_config.json").get("mask_token")
    named = named.get("content") if isinstance(named, dict) else named
    masks = [tokenizer.token_to_id(name) for name in (named, *MASKS) if isinstance(name, str)]
    mask = next((number for number in masks if number is not None), None)
    half = len(around) // 2
    return encode, Marks(tuple(around[:half]), tuple(around[half:]), mask)
