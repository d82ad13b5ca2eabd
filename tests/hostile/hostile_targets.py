"""Small whole folders of everything that posenc reads, and how each is read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from examples.translation.settings import Settings as TranslatorSettings
from examples.translation.training import load_settings as load_translation
from examples.translation.training import open_folder
from examples.translation.translator import Translator
from torch import nn
from torch.optim import AdamW
from transformers import ViTConfig

import posenc
from posenc.extension import search_factors
from posenc.lab.codec import to_plain
from posenc.lab.evaluation.checkpoint import as_llama
from posenc.lab.evaluation.images import ImageSource
from posenc.lab.evaluation.progress import StoredLosses
from posenc.lab.evaluation.texts import read_tokenizer
from posenc.lab.experiments.corpus import read_text
from posenc.lab.experiments.jobs import Outcome
from posenc.lab.experiments.results import Measurement, RefusedMeasurement, TrainedRun
from posenc.lab.experiments.sequences import Subwords, read_lines
from posenc.lab.experiments.settings import ComparisonSettings, Record, load_settings
from posenc.lab.training.checkpoint import TrainingPlan, TrainingState
from posenc.models import Decoder, DecoderConfig, Swin, SwinConfig, Transformer, TransformerConfig
from posenc.storage import write_json
from posenc.transformers import stretch
from posenc.transformers.checkpoints import FIELD, Fields, require_extension, stored_shapes
from tests.hostile.hostile_files import Target


def make_targets(folder: Path) -> list[Target]:
    """All targets, made below a folder."""
    torch.manual_seed(0)
    makers = (
        *(partial(_saved, encoding) for encoding in ("rope", "alibi", "learned", "t5")),
        _swin,
        *(partial(_llama, shards) for shards in (False, True)),
        *(_vit, _translator, _training, _comparison, _translation, _search, _tokenized, _texts),
    )
    return [maker(folder / str(number)) for number, maker in enumerate(makers)]


def _decoder(encoding: str) -> Decoder:
    sizes = {"vocabulary": 31, "dim": 32, "layers": 2, "heads": 4, "max_length": 64}
    kinds = {"activation": "swiglu", "norm": "rms", "bias": False}
    return Decoder(DecoderConfig(encoding=encoding, **sizes, **kinds))


def _saved(encoding: str, folder: Path) -> Target:
    _decoder(encoding).save(folder)
    return Target(f"Decoder of {encoding}", folder, Decoder.load)


def _swin(folder: Path) -> Target:
    images = {"size": (16, 16), "patch": 2, "channels": 1, "window": 4, "classes": 3}
    Swin(SwinConfig(dim=8, depths=(1, 1), heads=(1, 2), **images)).save(folder)
    return Target("Swin", folder, Swin.load)


def _llama(shards: bool, folder: Path) -> Target:
    model = as_llama(_decoder("rope"))
    if not shards:
        stretch(model, "rerope", factor=2.0, length=64)
    model.save_pretrained(folder, max_shard_size="9KB" if shards else "1GB")

    def read(copy: Path) -> None:
        fields = Fields.read(copy)
        if FIELD in fields.values:
            require_extension(fields)
        stored_shapes(copy)

    return Target("llama in shards" if shards else "stretched llama", folder, read)


def _vit(folder: Path) -> Target:
    ViTConfig().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5], "image_std": [0.5]}')

    def read(copy: Path) -> None:
        ImageSource.of_checkpoint(copy, Fields.read(copy), None)

    return Target("vit", folder, read)


def _translator(folder: Path) -> Target:
    subwords = Subwords.learn(["a few words of text", "and a few more words"], size=30)
    words = {"source_vocabulary": subwords.size, "target_vocabulary": subwords.size}
    sizes = {"dim": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "max_length": 16}
    config = TransformerConfig(shared=True, **words, **sizes)
    Translator(Transformer(config), subwords).save(folder)

    def read(copy: Path) -> None:
        Translator.load(copy).translate(["a few words"], beams=1, drop_unknown=True)

    return Target("translator", folder, read)


def _training(folder: Path) -> Target:
    folder.mkdir()
    plan = TrainingPlan(encoding="rope", seed=0, steps=5, rate=0.1, folder=folder)

    def state(plan: TrainingPlan) -> TrainingState:
        model = nn.Linear(4, 4)
        optimizer = AdamW(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return TrainingState(model, optimizer, plan, "text")

    state(plan).save()

    def read(copy: Path) -> None:
        with torch.random.fork_rng():
            state(replace(plan, folder=copy)).restore()

    return Target("state of a training", folder, read)


def _comparison(folder: Path) -> Target:
    folder.mkdir()
    Record(settings=ComparisonSettings(out=folder), fingerprint="abc").write()
    counts = {"steps": 9, "parameters": 5, "peak_memory_bytes": 1}
    run = TrainedRun(subject="rope", seed=0, tokens_per_second=1.0, train_seconds=1.0, **counts)
    measured = Measurement(subject="rope", seed=0, metric="loss", x=64, value=1.5)
    refused = RefusedMeasurement(subject="rope", metric="loss", x=128, reason="none")
    outcome = Outcome(runs=(run,), measurements=(measured,), refusals=(refused,))
    write_json(folder / "run.json", to_plain(outcome))

    def read(copy: Path) -> None:
        load_settings(copy)
        Outcome.read(copy / "run.json")

    return Target("comparison", folder, read)


def _translation(folder: Path) -> Target:
    settings = TranslatorSettings(text=Path("pairs.tsv"))
    open_folder(settings, folder, "abc", "refuse")
    return Target("translation", folder, load_translation)


def _search(folder: Path) -> Target:
    rope = posenc.create("rope", head_dim=8)

    def search(at: Path, budget: int = 6) -> None:
        losses = StoredLosses(at / "state.json", sum, factor=4, length=64)
        search_factors(rope, losses, factor=4, length=64, budget=budget)

    search(folder)
    return Target("search", folder, search)


def _tokenized(folder: Path) -> Target:
    folder.mkdir()
    text = Subwords.learn(["a few words of text"], size=20).to_json()
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text('{"mask_token": {"content": "a"}}')

    def read(copy: Path) -> None:
        encode = read_tokenizer(copy, 1000).encode
        if encode is not None:
            encode("a few words of text")

    return Target("tokenizer", folder, read)


def _texts(folder: Path) -> Target:
    folder.mkdir()
    (folder / "one.txt").write_text("a text\nof two lines\n" * 50)
    (folder / "two.txt").write_text("another text\n" * 50)

    def read(copy: Path) -> None:
        read_text(copy)
        read_lines(copy / "one.txt")

    return Target("texts", folder, read)
