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
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "in", max_shard_size="4KB")
    return tmp_path / "in"


def test_shapes_of_shards_and_of_one_file(folder: Path, tmp_path: Path) -> None:
    shapes = stored_shapes(folder)
    assert shapes[NORM] == (16,)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert stored_shapes(tmp_path) == shapes


@pytest.mark.parametrize("text", [None, "{", "[1]", "null"])
def test_config_that_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Fields.read(tmp_path)


@pytest.mark.parametrize("left", [None, "cut", "without"])
def test_shards_that_are_not_whole(folder: Path, left: str | None) -> None:
    path = folder / json.loads((folder / INDEX).read_text())["weight_map"][NORM]
    content, tensors = path.read_bytes(), load_file(path)
    path.unlink()
    if left == "cut":
        path.write_bytes(content[:-10])
    elif left == "without":
        save_file({name: x for name, x in tensors.items() if name != NORM}, path)
    message = r"model\.norm\.weight according to" if left == "without" else path.name
    with pytest.raises(CheckpointError, match=message):
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
