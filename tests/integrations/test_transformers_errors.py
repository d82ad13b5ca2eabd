"""Folders that are no checkpoint, or not a whole one, are refused by name; nothing is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from posenc.errors import ArgumentError, CheckpointError, OutputError, UnknownNameError
from posenc.integrations.transformers import load, save
from posenc.models import Decoder, DecoderConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama in several shards."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "in", max_shard_size="4KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()
    return tmp_path / "in"


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def change(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def store(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def test_the_folder_is_whole(folder: Path) -> None:
    assert isinstance(load(folder), Decoder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[1]", "null"])
def test_config_that_is_none(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(folder)


@pytest.mark.parametrize("kind", ["gemma", None, 3])
def test_other_families_are_named_with_those_there_are(folder: Path, kind: object) -> None:
    change(folder, model_type=kind)
    with pytest.raises(CheckpointError, match=rf"bloom.*gpt_neox.*llama.*{kind or 'none'}"):
        load(folder)


def test_weights_of_another_family(folder: Path) -> None:
    change(folder, model_type="bloom")
    with pytest.raises(CheckpointError, match=r"transformer\.word_embeddings\.weight, got none"):
        load(folder)


def test_missing_shard(folder: Path) -> None:
    path = shard_of(folder, "model.norm.weight")
    path.unlink()
    with pytest.raises(CheckpointError, match=path.name):
        load(folder)


def test_damaged_shard(folder: Path) -> None:
    path = shard_of(folder, "model.norm.weight")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=path.name):
        load(folder)


def test_shard_without_a_tensor_of_the_index(folder: Path) -> None:
    path = shard_of(folder, "model.norm.weight")
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    store(path, tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight according to"):
        load(folder)


@pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/passwd", 3])
def test_index_that_leads_out_of_the_folder(folder: Path, place: object) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = place
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="weight_map"):
        load(folder)


def test_missing_tensor(folder: Path) -> None:
    change(folder, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.\S+, got none"):
        load(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_a_bare_model_has_no_output_layer(tmp_path: Path, tied: bool) -> None:
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=tied)
    transformers.LlamaModel(config).save_pretrained(tmp_path)
    if tied:
        assert isinstance(load(tmp_path), Decoder), "its output layer is the embedding"
        return
    with pytest.raises(CheckpointError, match=r"output layer .*, got one without") as refused:
        load(tmp_path)
    assert "AutoModelForCausalLM" in refused.value.remedy


def test_unknown_tensor(folder: Path) -> None:
    change(folder, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.\S+ and 8 more"):
        load(folder)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("vocab_size", r"embed_tokens\.weight of shape \[32, 16\], got \[31, 16\]"),
        ("intermediate_size", r"gate_proj\.weight of shape \[32, 16\], got \[24, 16\]"),
        ("head_dim", r"q_proj\.weight of shape \[64, 16\], got \[16, 16\]"),
    ],
)
def test_shape_mismatch(folder: Path, field: str, message: str) -> None:
    change(folder, **{field: 32})
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_quantised_tensor(folder: Path) -> None:
    path = shard_of(folder, "model.norm.weight")
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    store(path, tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight in float32"):
        load(folder)


def test_pickle_is_never_read(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which is pickle"):
        load(folder)


def test_no_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)


BAD_FIELDS: list[dict[str, Any]] = [
    {"hidden_size": None},
    {"hidden_size": "16"},
    {"num_hidden_layers": 0},
    {"num_attention_heads": True},
    {"rms_norm_eps": "small"},
    {"hidden_act": "gelu"},
    {"tie_word_embeddings": 1},
    {"rope_parameters": {"rope_type": "mystery", "rope_theta": 1e4}},
    {"rope_parameters": [1]},
    {"quantization_config": {"bits": 4}},
]


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=str)
def test_bad_field(folder: Path, fields: dict[str, Any]) -> None:
    change(folder, **fields)
    name = "rope_type" if isinstance(fields.get("rope_parameters"), dict) else next(iter(fields))
    with pytest.raises(CheckpointError, match=f"{name} in "):
        load(folder)


def test_missing_field(folder: Path) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    del fields["intermediate_size"]
    path.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"intermediate_size in .* got none"):
        load(folder)


def test_fields_that_make_no_model(folder: Path) -> None:
    change(folder, num_key_value_heads=3)
    with pytest.raises(CheckpointError, match="kv_heads"):
        load(folder)


def decoder(**changes: Any) -> Decoder:
    return Decoder(DecoderConfig(**{"vocabulary": 9, "dim": 16, "layers": 1, "heads": 2} | changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"encoding": "alibi"}, "Alibi"),
        ({"encoding": "nope"}, "no encoding"),
        ({"encoding": "rope+alibi"}, "Rope and Alibi"),
        ({"options": {"pairing": "adjacent"}}, "pairing='adjacent'"),
        ({"options": {"learned": True}}, "learned=True"),
        ({"norm": "layer"}, "norm='layer'"),
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"merged": True}, "merged=True"),
        ({"attention_bias": "inputs"}, "biases='inputs'"),
        ({"window": 4}, "window=4"),
    ],
)
def test_what_is_no_llama_is_not_written(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ArgumentError, match=named):
        save(decoder(**changes), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_families_that_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="llama"):
        save(decoder(), tmp_path / "out", family="lama")
    with pytest.raises(UnknownNameError, match="llama"):
        save(decoder(), tmp_path / "out", family="bloom")


def test_folder_in_use_is_untouched(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(OutputError, match="in use"):
        save(decoder(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_nothing_is_left_of_a_save_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OutputError("out", expected="space", got="none", remedy="Free some.")

    monkeypatch.setattr("posenc.integrations.transformers.checkpoints.folder.write_json", fail)
    with pytest.raises(OutputError):
        save(decoder(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["y" * 5000, "\0", "..", "/dev/zero"], ids=lambda name: name[:5])
def test_an_index_with_names_that_are_none(folder: Path, name: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        load(folder)
