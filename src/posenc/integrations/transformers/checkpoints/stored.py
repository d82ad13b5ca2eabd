"""Tensors of a checkpoint folder, in one safetensors file or in shards with an index."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from posenc.errors import CheckpointError
from posenc.integrations.transformers.checkpoints.fields import read_json
from posenc.storage import open_tensors

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

READABLE = ("F64", "F32", "F16", "BF16")
"""Supported dtypes by their names in safetensors."""


class StoredTensors:
    """Tensors by name, read one at a time without executing code, with all ``shapes``.

    Raises:
        CheckpointError: for entering, when there are no safetensors, or a shard is missing, damaged
            or lacks a tensor of the index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> StoredTensors:
        try:
            if (self.folder / INDEX).exists():
                self._open_shards()
            else:
                self._open_single()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def path(self, name: str) -> Path:
        """The file of a tensor."""
        return self.folder / self._file_of[name]

    def require(self, name: str, shape: Sequence[int]) -> None:
        """Require a floating-point tensor of this shape, without reading it.

        Raises:
            CheckpointError: for another shape or dtype.
        """
        if self.shapes[name] != tuple(shape):
            raise CheckpointError(
                str(self.path(name)),
                expected=f"{name} of shape {list(shape)}",
                got=list(self.shapes[name]),
                remedy="Weights and config.json do not match; nothing was loaded.",
            )
        dtype = self._files[self._file_of[name]].get_slice(name).get_dtype()
        if dtype not in READABLE:
            raise CheckpointError(
                str(self.path(name)),
                expected=f"{name} in float32, float16, bfloat16 or float64",
                got=dtype,
                remedy="Quantised checkpoints are not supported; save unquantised weights.",
            )

    def read(self, name: str) -> Tensor:
        """Read a tensor."""
        return self._files[self._file_of[name]].get_tensor(name)

    def _open_single(self) -> None:
        if not (self.folder / WHOLE).exists():
            pickled = sorted(
                p.name for kind in ("*.bin", "*.pt", "*.pth") for p in self.folder.glob(kind)
            )
            raise CheckpointError(
                str(self.folder),
                expected=f"{WHOLE}, or {INDEX} with its shards",
                got=f"{pickled[0]}, which is pickle" if pickled else "none",
                remedy="Save with save_pretrained of a recent transformers."
                if pickled
                else "Download or save the weights into the folder; nothing was loaded.",
            )
        self._file_of = dict.fromkeys(self._open(WHOLE), WHOLE)

    def _open_shards(self) -> None:
        path = self.folder / INDEX
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
        missing = [file for file in files if not (self.folder / file).exists()]
        if missing:
            raise CheckpointError(
                str(self.folder),
                expected=f"all {len(files)} shards of {INDEX}",
                got=f"no {', '.join(missing)}",
                remedy="Download the missing shards; nothing was loaded.",
            )
        held = {file: self._open(file) for file in files}
        for name, file in weights.items():
            if name not in held[file]:
                raise CheckpointError(
                    str(self.folder / file),
                    expected=f"{name} according to {INDEX}",
                    got="none",
                    remedy="Download this shard again; nothing was loaded.",
                )
        self._file_of = weights
        self.shapes = {name: self.shapes[name] for name in weights}

    def _open(self, file: str) -> set[str]:
        path = self.folder / file
        remedy = "Download or write it again; nothing was loaded."
        opened = self._stack.enter_context(
            open_tensors(path, expected="a complete safetensors file", remedy=remedy)
        )
        self._files[file] = opened
        names = set(opened.keys())
        self.shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        return names
