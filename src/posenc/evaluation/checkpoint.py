"""A checkpoint to evaluate or to extend."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import nn

from posenc.encodings.embedding.learned import Learned
from posenc.errors import ArgumentError, CheckpointError
from posenc.evaluation.candidates import Method
from posenc.evaluation.images import ImageSource
from posenc.evaluation.live import LiveDecoder, LiveMaskedLM, LiveModel
from posenc.evaluation.results import Study
from posenc.evaluation.texts import Text, read_ids, read_tokenizer
from posenc.integrations.transformers.checkpoint import config_of, load_described
from posenc.integrations.transformers.config import Fields
from posenc.integrations.transformers.extended import FIELD
from posenc.integrations.transformers.families import FAMILIES
from posenc.integrations.transformers.family import family_name
from posenc.integrations.transformers.stretched import save_stretched
from posenc.models import Decoder, Encoder, ImageEncoder, MaskedLM, VisionTransformer
from posenc.models import load as load_saved
from posenc.models.replacing import encodings_of
from posenc.storage import output_folder, write_bytes

OWN_FAMILY = "llama"
"""``model_type`` that models of ``posenc compare`` are written as."""

LONGEST = "max_position_embeddings"
"""Field of ``config.json`` with the trained length."""

COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("*.model", "chat_template*", "generation_config.json", "preprocessor_config.json"),
)
"""Files copied to an extended checkpoint; none depends on positions."""

SEES = (ImageEncoder, VisionTransformer)
CAUSAL = (Decoder, LiveDecoder)
MASKED = (MaskedLM, LiveMaskedLM)
READS = (*CAUSAL, Encoder, *MASKED)
LIVE = {"ForCausalLM": LiveDecoder, "ForMaskedLM": LiveMaskedLM}
"""Models that transformers runs, by the end of the name of their class."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A trained model, and the folder that it was read from.

    Args:
        name: of the folder.
        family: ``model_type``.
        model: in eval mode: a ``Decoder``, or a ``LiveModel`` of any other family; or with a
            learned table of positions an ``Encoder``, a ``MaskedLM``, an ``ImageEncoder`` or a
            ``VisionTransformer``.
        length: the trained length in tokens; of images the longer side in pixels.
        folder: None for a model in memory, which can be measured but not written.
        config: the fields of ``config.json``, which a written checkpoint starts from.
    """

    name: str
    family: str
    model: nn.Module
    length: int
    folder: Path | None = None
    config: Fields | None = None

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        trained_length: int | None = None,
        device: str = "cpu",
        extendable: bool = False,
    ) -> Checkpoint:
        """Read a checkpoint folder of transformers, or a language model of ``posenc compare``.

        Args:
            folder: with ``config.json`` and safetensors, or of a run (``OUT/runs/rope/seed-0``).
            trained_length: overrides ``config.json``.
            device: of the model.
            extendable: refuse checkpoints that cannot be written once extended.

        Raises:
            CheckpointError: if the folder is incomplete, its family is not supported, or
                (``extendable``) it cannot be written.
            ArgumentError: if the trained length is unknown, or not that of the position table.
        """
        if (folder / "model" / "config.json").is_file():
            folder = folder / "model"
        config = Fields.read(folder)
        stated = config.values.get(LONGEST)
        family = str(config.values.get("model_type"))
        model: nn.Module
        if "kind" in config.values and "model_type" not in config.values:
            decoder = load_saved(folder, device=device)
            if not isinstance(decoder, Decoder):
                raise CheckpointError(
                    f"kind in {config.path}",
                    expected="a decoder, which predicts the next token",
                    got=f"a {decoder.kind}",
                    remedy="Name a run of posenc compare --task language.",
                )
            family, stated, model = OWN_FAMILY, decoder.config.max_length, decoder
            if extendable:
                config = _as_transformers(decoder, folder)
        else:
            if extendable:
                require_extendable(config, family)
            live = None if family_name(family) in FAMILIES else _live(config)
            if live is not None:
                model = live.open(folder, device=device)
                stated = model.model.config.get_text_config().to_dict().get(LONGEST, stated)
            else:
                model = load_described(config, device=device)
        if not isinstance(model, SEES + READS):
            raise CheckpointError(
                f"model_type in {config.path}",
                expected="a model that can be measured: a causal or masked language model, a text "
                "encoder (bert, roberta) or one of images (vit)",
                got=repr(family),
                remedy="Name the folder of such a model.",
            )
        length = _trained_length(model, stated, trained_length)
        return cls(folder.resolve().name, family, model, length, folder, config)

    def data(
        self, *, text: Path | None = None, images: Path | None = None, training: bool = False
    ) -> Text | ImageSource:
        """The text by the checkpoint's tokenizer, or the images by its preprocessor.

        Args:
            text: a file or folder; the shipped text by default.
            images: a folder of image files, or a file of arrays.
            training: hold part of the text back for training.

        Raises:
            ArgumentError: for a text of a model of images, or the reverse, or if the tokenizers
                library is missing.
            CheckpointError: if the tokenizer is missing or another model's.
            DataError: if the data are unusable.
        """
        assert self.folder is not None  # only opened checkpoints have files
        assert self.config is not None
        sees = isinstance(self.model, SEES)
        name, other, path = ("text", "images", text) if sees else ("images", "text", images)
        if path is not None:
            raise ArgumentError(
                name,
                expected=f"none, for a {self.family}, which {'sees' if sees else 'reads'} {other}",
                got=path,
                remedy=f"Give --{other}.",
            )
        if sees:
            return ImageSource.of_checkpoint(self.folder, self.config, images)
        if isinstance(self.model, LiveModel):
            vocabulary = self.model.vocabulary
        else:
            assert isinstance(self.model, Decoder | Encoder | MaskedLM)  # no others are opened
            vocabulary = self.model.config.vocabulary
        encode, special = read_tokenizer(self.folder, vocabulary)
        return read_ids(text, encode=encode, training=training, special=special)

    def write(
        self, model: nn.Module, method: Method, out: Path, *, factor: float, study: Study | None
    ) -> bool:
        """Write the extended model, the files that go with it, and the report, atomically.

        Args:
            model: extended, and maybe fine-tuned.
            method: its extension.
            out: new or empty folder.
            factor: extension of the trained length.
            study: reported in ``out/report``; None: no report.

        Returns:
            True if transformers runs the written checkpoint as extended.

        Raises:
            OutputError: if the folder is in use or cannot be written to.
        """
        assert self.folder is not None  # as in ``data``
        assert self.config is not None
        with output_folder(out) as partial:
            if isinstance(model, LiveModel):
                model.write(partial, dtype=_dtype(self.config))
                native = bool(model.served)
            else:
                native = save_stretched(
                    model,
                    partial,
                    like=self.config,
                    originals=encodings_of(self.model),
                    method=method.name,
                    factor=factor,
                    length=self.length,
                    options=method.options,
                )
            for path in sorted(self.folder.iterdir()):
                if path.is_file() and any(fnmatch(path.name, pattern) for pattern in COPIED):
                    write_bytes(partial / path.name, path.read_bytes())
            if study is not None:
                from posenc.evaluation.report import write_study

                write_study(study, partial / "report")
        return native


def _dtype(config: Fields) -> torch.dtype:
    """The dtype of a checkpoint's weights."""
    named = config.values.get("dtype") or config.values.get("torch_dtype") or "float32"
    found = getattr(torch, str(named), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _as_transformers(model: Decoder, folder: Path) -> Fields:
    """The ``config.json`` of a model of ``posenc compare`` as transformers has it."""
    try:
        return config_of(model, family=OWN_FAMILY)
    except ArgumentError as error:
        raise CheckpointError(
            str(folder),
            expected=f"a model that can be written as {OWN_FAMILY}: one trained with rope",
            got=f"one trained with {model.config.encoding}",
            remedy="posenc evaluate measures it as it is; posenc compare --encodings rope "
            "trains one that can be stretched.",
        ) from error


def _live(config: Fields) -> type[LiveModel] | None:
    """The class that runs a language model by transformers."""
    kinds = config.values.get("architectures") or [""]
    return next((kind for end, kind in LIVE.items() if str(kinds[0]).endswith(end)), None)


def require_extendable(config: Fields, family: str) -> None:
    """Refuse checkpoints that cannot be written, before their weights are read."""
    writable = [name for name, family in FAMILIES.items() if family.write is not None]
    named = "model_type" in config.values
    live = family_name(family) not in FAMILIES and _live(config) is not None
    if not live and (not named or family_name(family) not in writable):
        raise CheckpointError(
            f"model_type in {config.path}",
            expected=f"one of {', '.join(writable)}",
            got=repr(family) if named else "none",
            remedy="Models of other families cannot be stretched; the folder was not touched."
            if named
            else "Name a folder written by save_pretrained of transformers.",
        )
    if config.values.get(FIELD) is not None:
        raise CheckpointError(
            f"{FIELD} in {config.path}",
            expected="a checkpoint that posenc has not stretched yet",
            got=f"one stretched by {config.values[FIELD]}",
            remedy="Stretch the one it came from; methods can be joined: rerope+log_n.",
        )


def _trained_length(model: nn.Module, stated: object, given: int | None) -> int:
    """The trained length: of the position table, as given, or by ``config.json``."""
    table = None if isinstance(model, LiveModel) else encodings_of(model)[0].embedding
    held = table.max_length if isinstance(table, Learned) else None
    if isinstance(model, SEES):
        held = max(model.config.size)
    if held is not None and given not in (None, held):
        raise ArgumentError(
            "trained_length",
            expected=f"{held}, which its table of positions has",
            got=given,
            remedy="Leave it out.",
        )
    length = held or given or (stated if isinstance(stated, int) else None)
    if length is None:
        raise ArgumentError(
            "trained_length",
            expected="the length it was trained at",
            got="none, and no max_position_embeddings in config.json",
            remedy="Give it in tokens.",
        )
    return length
