"""Tensors of a checkpoint folder, in one safetensors file or in shards with an index."""

from __future__ import annotations

from pathlib import Path

from posenc.errors import CheckpointError
from posenc.storage import open_tensors
from posenc.transformers.checkpoints.fields import read_json

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

Shapes = dict[str, tuple[int, ...]]


def stored_shapes(folder: Path) -> Shapes:
    """Shapes of all tensors by name, read without executing code.

    Raises:
        CheckpointError: if there are no safetensors, or a shard is missing, damaged or lacks a
            tensor of the index.
    """
    if (folder / INDEX).exists():
        return _of_shards(folder)
    if (folder / WHOLE).exists():
        return _of_file(folder / WHOLE)
    pickled = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in folder.glob(kind))
    raise CheckpointError(
        str(folder),
        expected=f"{WHOLE}, or {INDEX} with its shards",
        got=f"{pickled[0]}, which is pickle" if pickled else "none",
        remedy="Save with save_pretrained of a recent transformers."
        if pickled
        else "Download or save the weights into the folder; nothing was loaded.",
    )


def _of_shards(folder: Path) -> Shapes:
    path = folder / INDEX
    index = read_json(path)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(
        isinstance(file, str) and 0 < len(file.encode()) < 256 and Path(file).name == file
        for file in weights.values()
    ):
        raise CheckpointError(
            str(path),
            expected="a weight_map from tensors to files in this folder",
            got="another value",
            remedy="Download or write the checkpoint again.",
        )
    files = sorted(set(weights.values()))
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise CheckpointError(
            str(folder),
            expected=f"all {len(files)} shards of {INDEX}",
            got=f"no {', '.join(missing)}",
            remedy="Download the missing shards; nothing was loaded.",
        )
    stored = {file: _of_file(folder / file) for file in files}
    for name, file in weights.items():
        if name not in stored[file]:
            raise CheckpointError(
                str(folder / file),
                expected=f"{name} according to {INDEX}",
                got="none",
                remedy="Download this shard again; nothing was loaded.",
            )
    return {name: stored[file][name] for name, file in weights.items()}


def _of_file(path: Path) -> Shapes:
    remedy = "Download or write it again; nothing was loaded."
    with open_tensors(path, expected="a complete safetensors file", remedy=remedy) as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
