"""Saved models come back bit by bit, and damaged ones are refused by name."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from posenc import models
from posenc.errors import ArgumentError, CheckpointError, OutputError
from posenc.models import Decoder, DecoderConfig
from posenc.models.checkpoint import meta_init, stored_tensors
from posenc.storage import save_tensors
from tests.models.text_encodings import TEXT_ENCODINGS, one_of_each_kind

TEXT = torch.arange(20).remainder(17).unsqueeze(0)


def make(encoding: str = "t5", **changes: object) -> Decoder:
    torch.manual_seed(0)
    fields = {"vocabulary": 17, "dim": 32, "layers": 2, "heads": 4, "max_length": 20} | changes
    return Decoder(DecoderConfig(encoding=encoding, **fields)).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", [*one_of_each_kind(TEXT_ENCODINGS), "t5+sinusoidal"])
def test_round_trip_is_exact(encoding: str, tmp_path: Path) -> None:
    model = make(encoding)
    model.save(tmp_path / "model")
    assert torch.equal(Decoder.load(tmp_path / "model")(TEXT), model(TEXT))
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


WORDS: dict[str, Any] = {"vocabulary": 17, "dim": 32, "layers": 2, "heads": 4, "max_length": 20}
TARGETS: dict[str, Any] = {"source_vocabulary": 17, "target_vocabulary": 17, "dim": 32, "heads": 4}
CLASSES: dict[str, Any] = {"vocabulary": 17, "classes": 3, "dim": 8, "hidden": 8}
IMAGES: dict[str, Any] = {"size": (8, 8), "patch": 2, "channels": 1, "classes": 3, "dim": 8}
PIXELS = torch.arange(64.0).view(1, 1, 8, 8)

KINDS: list[tuple[type[Any], Any, list[Tensor]]] = [
    (models.Encoder, models.EncoderConfig(types=2, **WORDS), [TEXT]),
    (models.MaskedLM, models.EncoderConfig(encoding="t5", **WORDS), [TEXT]),
    (models.TextClassifier, models.EncoderConfig(classes=3, **WORDS), [TEXT]),
    (models.Deberta, models.DebertaConfig(**WORDS), [TEXT]),
    *(
        (models.SequenceClassifier, models.ClassifierConfig(body=body, **CLASSES), [TEXT])
        for body in ("fasttext", "lstm", "cnn", "transformer")
    ),
    (
        models.Transformer,
        models.TransformerConfig(encoder_layers=1, decoder_layers=2, norm="batch", **TARGETS),
        [TEXT, TEXT],
    ),
    (models.VisionTransformer, models.ImageConfig(layers=1, heads=2, **IMAGES), [PIXELS]),
    (models.Swin, models.SwinConfig(depths=(1, 1), heads=(1, 2), window=3, **IMAGES), [PIXELS]),
]


@pytest.mark.parametrize(("kind", "config", "inputs"), KINDS)
def test_every_kind_comes_back(
    kind: type[Any], config: Any, inputs: list[Tensor], tmp_path: Path
) -> None:
    model = kind(config).eval()
    model.save(tmp_path)
    again = models.load(tmp_path)
    assert again.config == config
    assert torch.equal(again(*inputs), model(*inputs))
    with pytest.raises(CheckpointError, match=f"configuration of a decoder.*{kind.kind}"):
        Decoder.load(tmp_path)


def test_options_come_back(tmp_path: Path) -> None:
    make("t5", options={"buckets": 8, "max_distance": 20}).save(tmp_path)
    score = Decoder.load(tmp_path).encodings[1].score
    assert score is not None
    assert score.table.shape == (4, 8)


def test_shared_tables_are_written_once_and_stay_shared(tmp_path: Path) -> None:
    make("t5").save(tmp_path)
    first, second = (encoding.score for encoding in Decoder.load(tmp_path).encodings)
    assert first is second


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    make().save(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Decoder.load(tmp_path)


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    make().save(tmp_path)
    file = tmp_path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        Decoder.load(tmp_path)


def change_config(folder: Path, **changes: object) -> None:
    """Another configuration, with which the tensors were saved, as far as their file says."""
    described = json.loads((folder / "config.json").read_text())
    described["config"] |= changes
    (folder / "config.json").write_text(json.dumps(described))
    tensors = load_file(folder / "model.safetensors")
    save_tensors(folder / "model.safetensors", tensors, described)


def test_a_changed_configuration_is_refused(tmp_path: Path) -> None:
    make("rope").save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"heads": 4', '"heads": 2'))
    with pytest.raises(CheckpointError, match=r"config\.json.*another one"):
        Decoder.load(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 20_000},
        {"vocabulary": 10**9},
        {"dim": 10**6, "heads": 10**6},
        {"hidden": 10**9},
        {"options": {"max_length": 10**9}},
    ],
    ids=str,
)
def test_a_model_larger_than_its_weights_takes_neither_time_nor_memory(
    tmp_path: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("learned").save(tmp_path)
    change_config(tmp_path, **changes)
    monkeypatch.setattr(nn.Linear, "__init__", _counted(nn.Linear.__init__, 100))
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Decoder.load(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began < 100_000  # kilobytes


def _counted(function: Callable[..., None], most: int) -> Callable[..., None]:
    """A function that may be called so many times."""
    calls = 0

    def counted(*arguments: object, **named: object) -> None:
        nonlocal calls
        calls += 1
        assert calls <= most
        function(*arguments, **named)

    return counted


@pytest.mark.parametrize("encoding", TEXT_ENCODINGS)
def test_every_encoding_is_made_without_memory(encoding: str) -> None:
    def made() -> Decoder:
        return make(encoding)

    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(made()).items()}
    empty = stored_tensors(meta_init(made))
    assert {name: tuple(tensor.shape) for name, tensor in empty.items()} == shapes
    assert all(tensor.is_meta for tensor in empty.values())


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    make("rope").save(tmp_path)
    change_config(tmp_path, layers=3)
    with pytest.raises(CheckpointError, match=r"no blocks\.2\."):
        Decoder.load(tmp_path)
    change_config(tmp_path, layers=1)
    with pytest.raises(CheckpointError, match=r"unknown blocks\.1\."):
        Decoder.load(tmp_path)
    change_config(tmp_path, layers=2, vocabulary=18)
    with pytest.raises(CheckpointError, match=r"embedding\.weight of shape \[18, 32\]"):
        Decoder.load(tmp_path)


@pytest.mark.parametrize("changes", [{"encoding": "nonsense"}, {"colour": 1}, {"dim": -1}])
def test_a_configuration_that_means_nothing(tmp_path: Path, changes: dict[str, object]) -> None:
    make().save(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Decoder.load(tmp_path)


def test_missing_files_and_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Decoder.load(tmp_path / "nowhere")
    make().save(tmp_path)
    (tmp_path / "config.json").write_text('{"kind": "vision", "config": {}}')
    with pytest.raises(CheckpointError, match="vision"):
        Decoder.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        Decoder.load(tmp_path)


def test_records_cannot_be_saved(tmp_path: Path) -> None:
    model = make("alibi")
    nameless = Decoder(model.config, encodings=model.encodings)
    with pytest.raises(ArgumentError, match="by name"):
        nameless.save(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        make().save(tmp_path / "file" / "model")
