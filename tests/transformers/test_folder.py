"""Folders that are no checkpoint, or not a whole one, are refused by name; nothing is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from posenc.errors import CheckpointError
from posenc.transformers.checkpoints import INDEX, Fields, stored_shapes

NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama in several shards."""
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "in", max_shard_size="4KB")
    return tmp_path / "in"


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def test_shapes_of_shards_and_of_one_file(folder: Path, tmp_path: Path) -> None:
    shapes = stored_shapes(folder)
    assert shapes[NORM] == (16,)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert stored_shapes(tmp_path) == shapes


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Fields.read(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[1]", "null"])
def test_config_that_is_none(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Fields.read(folder)


def test_missing_shard(folder: Path) -> None:
    path = shard_of(folder, NORM)
    path.unlink()
    with pytest.raises(CheckpointError, match=path.name):
        stored_shapes(folder)


def test_damaged_shard(folder: Path) -> None:
    path = shard_of(folder, NORM)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=path.name):
        stored_shapes(folder)


def test_shard_without_a_tensor_of_the_index(folder: Path) -> None:
    path = shard_of(folder, NORM)
    tensors = load_file(path)
    del tensors[NORM]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight according to"):
        stored_shapes(folder)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", 3, "y" * 5000, "\0", "..", "/dev/zero"],
    ids=lambda name: str(name)[:5],
)
def test_index_that_leads_out_of_the_folder(folder: Path, name: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NORM] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        stored_shapes(folder)


def test_pickle_is_never_read(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        stored_shapes(folder)
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which is pickle"):
        stored_shapes(folder)
