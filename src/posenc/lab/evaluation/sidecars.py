"""Sidecar files of an extended model: tokenizer, templates, modules of sentence-transformers."""

from __future__ import annotations

from pathlib import Path

from posenc.storage import write_bytes, write_json
from posenc.transformers.checkpoints.folder import read_object
from posenc.transformers.hub import MODULES, SIDECARS

LIMITS = {"tokenizer_config.json": "model_max_length", "sentence_*_config.json": "max_seq_length"}
"""Names of lengths at which longer texts are cut, by the files that hold them."""


def copy_sidecars(folder: Path, out: Path) -> None:
    """Copy the files that go with a model, and the modules of sentence-transformers after it."""
    sentences = (folder / "modules.json").is_file()
    for pattern in (*SIDECARS, *([MODULES] if sentences else ())):
        for path in folder.glob(pattern):
            copy = out / path.relative_to(folder)
            if path.is_file():
                copy.parent.mkdir(exist_ok=True)
                write_bytes(copy, path.read_bytes())


def raise_limits(folder: Path, longest: int) -> None:
    """Raise the lengths at which tokenizers and sentence-transformers cut texts."""
    for pattern, name in LIMITS.items():
        for path in folder.glob(pattern):
            fields = read_object(path)
            limit = fields.get(name)
            if isinstance(limit, int) and limit < longest:
                write_json(path, fields | {name: longest})
