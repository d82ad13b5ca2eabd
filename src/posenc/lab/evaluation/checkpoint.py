"""A checkpoint to evaluate or to extend; a decoder of posenc becomes a Llama of transformers."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError, CheckpointError
from posenc.lab.evaluation.images import ImageSource
from posenc.lab.evaluation.results import Study
from posenc.lab.evaluation.suites.reading import in_fastest_dtype
from posenc.lab.evaluation.texts import Text, TokenizerFile, read_ids, read_tokenizer
from posenc.lab.folders import output_folder
from posenc.lab.training.machine import require_device
from posenc.models import Decoder
from posenc.models import load as load_saved
from posenc.storage import as_path, write_bytes, write_json
from posenc.transformers.checkpoints import Fields, parameters_of, read_object
from posenc.transformers.engines import for_engines
from posenc.transformers.hub import MODULES, SIDECARS, HubName
from posenc.transformers.kinds import open_live, require_transformers, require_unstretched
from posenc.transformers.live import LiveDecoder, LiveImages, LiveModel, evaluation_copy

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

OWN_FAMILY = "llama"
"""``model_type`` of models of ``posenc compare``, once transformers runs them."""

LONGEST = "max_position_embeddings"
"""Field of ``config.json`` with the trained length."""

SHORTEST = 2
"""Tokens of the shortest trained length."""

AUTO = "auto"
"""The dtype that a trial chooses."""

CAUSAL = (Decoder, LiveDecoder)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A trained model, and the folder that it was read from.

    Args:
        name: of the folder, or on the hub.
        family: ``model_type``.
        model: in eval mode: one of transformers, or a ``Decoder`` of ``posenc compare``.
        length: the trained length in tokens; of images the longer side in pixels.
        folder: None for a model made in memory.
        config: the fields of ``config.json``, which a written checkpoint starts from.
        hub: the name on the hub, of a model that is from there.
    """

    name: str
    family: str
    model: nn.Module
    length: int
    folder: Path | None = None
    config: Fields | None = None
    hub: HubName | None = None

    @classmethod
    def open(
        cls,
        source: Path | str,
        *,
        trained_length: int | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        extendable: bool = False,
    ) -> Checkpoint:
        """Read a checkpoint folder of transformers, or a language model of ``posenc compare``.

        Args:
            source: a folder with ``config.json`` and safetensors, or of a run
                (``OUT/runs/rope/seed-0``); or a name on the hub, ``org/name@revision``.
            trained_length: overrides ``config.json``.
            device, dtype: of the model, ``auto`` see ``in_fastest_dtype``; models of ``posenc
                compare`` are float32.
            extendable: refuse checkpoints that cannot be written once extended.

        Raises:
            CheckpointError: if the folder is incomplete, its family is not supported, or
                (``extendable``) it cannot be written; or as ``HubName.folder``.
            ArgumentError: if the trained length is unknown, or not that of the position table, or
                this machine has no such device.
        """
        require_device(device)
        folder = source if isinstance(source, Path) else as_path(source)
        hub = None if folder.exists() else HubName.of(folder)
        if hub is not None:
            folder = hub.folder(weights=True)
        if (folder / "model" / "config.json").is_file():
            folder = folder / "model"
        config = Fields.read(folder)
        if "kind" in config.values and "model_type" not in config.values:
            opened = cls._of_compare(folder, config, device=device)
            if extendable:
                opened = opened._as_transformers(folder, device=device)
        else:
            if extendable:  # before its weights are read
                require_unstretched(config)
            opened = cls._of_transformers(
                folder,
                config,
                lambda kind: kind.open(
                    config, device=device, dtype=getattr(torch, dtype.replace(AUTO, "float32"))
                ),
            )
        length = _trained_length(opened.model, opened.length or None, trained_length)
        name = str(hub or folder.resolve().name)
        return replace(opened, name=name, length=length, hub=hub)

    @classmethod
    def of_model(
        cls, model: Any, *, trained_length: int | None = None, extendable: bool = False
    ) -> Checkpoint:
        """A loaded model of transformers, which shares its weights and is not changed.

        Its tokenizer or preprocessor is read from the folder that it was loaded from.

        Args:
            model: as ``from_pretrained`` answers it, on its device and in its dtype.
            trained_length, extendable: see ``open``.

        Raises: as ``open``.
        """
        folder, twin = Path(model.name_or_path), evaluation_copy(model).eval()
        values = {"architectures": [type(model).__name__], "dtype": str(model.dtype)[6:]}
        name = folder.name or type(model).__name__
        config = Fields(model.config.to_dict() | values, folder / "config.json")
        if extendable:
            require_unstretched(config)
        opened = cls._of_transformers(
            folder if folder.name else None, config, lambda kind: kind(twin)
        )
        length = _trained_length(opened.model, opened.length or None, trained_length)
        return replace(opened, name=name, length=length)

    @classmethod
    def _of_compare(cls, folder: Path, config: Fields, *, device: str) -> Checkpoint:
        """A language model of ``posenc compare``."""
        decoder = load_saved(folder, device=device)
        if not isinstance(decoder, Decoder):
            raise CheckpointError(
                f"kind in {config.path}",
                expected="a decoder, which predicts the next token",
                got=f"a {decoder.kind}",
                remedy="Name a run of posenc compare --task language.",
            )
        length = decoder.config.max_length or 0
        return cls("", OWN_FAMILY, decoder, length, folder, config)

    @classmethod
    def _of_transformers(
        cls, folder: Path | None, config: Fields, load: Callable[[type[LiveModel]], LiveModel]
    ) -> Checkpoint:
        """A model that transformers loads."""
        model = open_live(config, load)
        family = str(config.values.get("model_type"))
        if model is None:
            (named, *_) = config.values.get("architectures") or [family]
            raise CheckpointError(
                f"model_type in {config.path}",
                expected="a model that can be measured: a causal or masked language model, a text "
                "encoder, or one of images in patches",
                got=repr(named) if "model_type" in config.values else "none",
                remedy="Take the whole model, adapters merged, as its save_pretrained writes it.",
            )
        stated = model.model.config.get_text_config().to_dict().get(LONGEST)
        return cls("", family, model, stated if isinstance(stated, int) else 0, folder, config)

    def _as_transformers(self, folder: Path, *, device: str) -> Checkpoint:
        """A model of ``posenc compare`` as transformers has it.

        Raises:
            CheckpointError: if it has none such.
        """
        assert isinstance(self.model, Decoder)  # as ``_of_compare`` opens it
        require_transformers(str(folder))
        try:
            llama = as_llama(self.model)
        except ArgumentError as error:
            raise CheckpointError(
                str(folder),
                expected=f"a model that can be written as {OWN_FAMILY}: one trained with rope",
                got=f"one trained with {self.model.config.encoding}",
                remedy="posenc evaluate measures it as it is; posenc compare --encodings rope "
                "trains one that can be stretched.",
            ) from error
        config = Fields(llama.config.to_dict(), folder / OWN_FAMILY / "config.json")
        return replace(self, model=LiveDecoder(llama.to(device)), config=config)

    @property
    def words(self) -> str:
        """The model as command lines of engines name it; "" if only posenc reads it."""
        if self.hub:
            return self.hub.words
        read = self.folder and self.config and self.config.path.parent == self.folder
        return shlex.quote(str(self.folder)) if read else ""

    def tokenizer(self) -> TokenizerFile:
        """The tokenizer of a model of text.

        Raises: as ``read_tokenizer``.
        """
        assert self.folder is not None  # ``data`` refuses models without one
        if isinstance(self.model, LiveModel):
            return read_tokenizer(self.folder, self.model.vocabulary)
        assert isinstance(self.model, Decoder)  # no others are opened
        return read_tokenizer(self.folder, self.model.config.vocabulary)

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
        assert self.config is not None  # only opened checkpoints have data
        if self.folder is None or not self.folder.is_dir():
            raise CheckpointError(
                str(self.folder or self.name),
                expected="the folder that the model was loaded from, with its tokenizer",
                got="a model made in memory" if self.folder is None else "no such folder",
                remedy="Save model and tokenizer by save_pretrained, and load it from there.",
            )
        sees = isinstance(self.model, LiveImages)
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
        tokenizer = self.tokenizer()
        read = read_ids(text, encode=tokenizer.encode, training=training, special=tokenizer.special)
        return replace(read, tokenizer=tokenizer)

    def in_fastest_dtype(self, data: Text | ImageSource) -> None:
        """Run a causal model in the dtype of its stored weights, where a trial finds that better.

        Args:
            data: from ``data``.
        """
        stored = torch.float32 if self.config is None else _dtype(self.config)
        if isinstance(self.model, LiveDecoder) and isinstance(data, Text) and stored.itemsize == 2:
            in_fastest_dtype(self.model, stored, data.measured)

    def write(self, model: LiveModel, out: Path, *, longest: int, study: Study | None) -> bool:
        """Write the extended model, the files that go with it, and the report, atomically.

        Args:
            model: extended, and maybe fine-tuned.
            out: new or empty folder.
            longest: tokens of a text that it is extended to.
            study: reported in ``out/report``; None: no report.

        Returns:
            True if transformers runs the written checkpoint as extended.

        Raises:
            OutputError: if the folder is in use or cannot be written to.
        """
        assert self.config is not None  # as in ``data``
        with output_folder(out) as partial:
            model.write(partial, dtype=_dtype(self.config))
            if model.served:
                _name_for_engines(partial)
            if self.folder is not None:
                _copy_sidecars(self.folder, partial)
            # of a method that transformers lacks, the model is stretched once it is loaded
            if model.served and not isinstance(model, LiveImages):
                _raise_limits(partial, longest)
            if study is not None:
                from posenc.lab.evaluation.report import write_study

                write_study(study, partial / "report")
        return bool(model.served)


def _dtype(config: Fields) -> torch.dtype:
    """The dtype of a checkpoint's weights."""
    named = config.values.get("dtype") or config.values.get("torch_dtype") or "float32"
    found = getattr(torch, str(named), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _name_for_engines(folder: Path) -> None:
    """Write the rotation of a ``config.json`` under the names that other programs read too."""
    fields = Fields.read(folder)
    write_json(fields.path, for_engines(fields.values))


def _trained_length(model: nn.Module, stated: int | None, given: int | None) -> int:
    """The trained length: of the position table, as given, or by ``config.json``."""
    held = model.most if isinstance(model, LiveModel) else None
    if isinstance(model, LiveImages):
        held = model.patch * max(model.cells)
    if held is not None and given not in (None, held):
        raise ArgumentError(
            "trained_length",
            expected=f"{held}, which its table of positions has",
            got=given,
            remedy="Leave it out.",
        )
    length = held or given or stated
    if length is None or length < SHORTEST:
        got = "no max_position_embeddings" if length is None else f"{LONGEST} {length}"
        raise ArgumentError(
            "trained_length",
            expected=f"the length it was trained at, {SHORTEST} or more",
            got=str(given) if given is not None else f"{got} in config.json",
            remedy="Give it in tokens.",
        )
    return length


LIMITS = {"tokenizer_config.json": "model_max_length", "sentence_*_config.json": "max_seq_length"}
"""Names of lengths at which longer texts are cut, by the files that hold them."""


def _copy_sidecars(folder: Path, out: Path) -> None:
    """Copy the files that go with a model, and the modules of sentence-transformers after it."""
    sentences = (folder / "modules.json").is_file()
    for pattern in (*SIDECARS, *([MODULES] if sentences else ())):
        for path in folder.glob(pattern):
            copy = out / path.relative_to(folder)
            if path.is_file():
                copy.parent.mkdir(exist_ok=True)
                write_bytes(copy, path.read_bytes())


def _raise_limits(folder: Path, longest: int) -> None:
    """Raise the lengths at which tokenizers and sentence-transformers cut texts."""
    for pattern, name in LIMITS.items():
        for path in folder.glob(pattern):
            fields = read_object(path)
            limit = fields.get(name)
            if isinstance(limit, int) and limit < longest:
                write_json(path, fields | {name: longest})


DESCRIBED = {
    "activation": ("swiglu",),
    "norm": ("rms",),
    "norm_first": (True,),
    "parallel": (False,),
    "merged": (False,),
    "embedding_norm": (False,),
    "scale": (None,),
    "sinks": (False,),
    "softcap": (None,),
    "window": (None,),
    "biases": ("all", "none"),
}
"""Fields of a decoder's configuration with the values that a Llama has."""

NAMES = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.input": "mlp.gate_proj mlp.up_proj",
    "feed_forward.output": "mlp.down_proj",
}
"""Layers of a block by their names in a Llama's, where the gated input layer is two."""


def as_llama(decoder: Decoder) -> LlamaForCausalLM:
    """A Llama with the weights and the rotation of a decoder, in eval mode, on the CPU.

    A factor of the embedding (√C) is multiplied into its weights, which unties the output layer.

    Raises:
        ArgumentError: for a decoder that is no Llama.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = decoder.config
    for name, values in DESCRIBED.items():
        if getattr(config, name) not in values:
            raise _other(f"{name}={values[0]!r}", f"{name}={getattr(config, name)!r}")
    part = decoder.encodings[0].query_key
    ropes = [parameters_of(encoding, config.max_length) for encoding in decoder.encodings]
    if any(rope != ropes[0] for rope in ropes):
        raise _other("one encoding for all layers", "several")
    if not isinstance(part, Rope):
        raise _other("frequencies for texts of any length", type(part).__name__)
    if ropes[0].pop("partial_rotary_factor") != 1:
        raise _other("rope with fraction=1", f"fraction={part.fraction:g}")
    tied = config.tied and config.embedding_factor == 1
    lengths = {} if config.max_length is None else {"max_position_embeddings": config.max_length}
    with torch.random.fork_rng(devices=[]):
        llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocabulary,
                hidden_size=config.dim,
                intermediate_size=config.feed_forward_width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads or config.heads,
                head_dim=config.head_dim or config.dim // config.heads,
                rms_norm_eps=1e-6 if config.norm_eps is None else config.norm_eps,
                attention_bias=config.biases == "all",
                mlp_bias=config.bias,
                tie_word_embeddings=tied,
                rope_parameters=ropes[0],
                bos_token_id=None,
                eos_token_id=None,
                **lengths,
            )
        )
    embedding = decoder.embedding.weight
    weights = {
        "model.embed_tokens.weight": embedding * config.embedding_factor,
        "model.norm.weight": decoder.norm.weight,
        "lm_head.weight": embedding if decoder.output is None else decoder.output.weight,
    }
    for index, block in enumerate(decoder.blocks):
        for ours, theirs in NAMES.items():
            names = [f"model.layers.{index}.{name}" for name in theirs.split()]
            for kind, tensor in block.get_submodule(ours).named_parameters():
                parts = zip(names, tensor.chunk(len(names)), strict=True)
                weights |= {f"{name}.{kind}": part for name, part in parts}
    llama.load_state_dict(weights, strict=True)
    return llama.eval()


def _other(expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        "model",
        expected=f"a Llama, with {expected}",
        got=got,
        remedy="Save it by model.save(folder), which supports every decoder.",
    )
