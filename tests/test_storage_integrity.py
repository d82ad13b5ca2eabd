"""Files that were changed, cut or made to mislead are refused, and what is kept stays."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import AdamW

from posenc import storage
from posenc.errors import CheckpointError, OutputError
from posenc.lab.training.checkpoint import TrainingPlan, TrainingState
from posenc.models import Decoder, DecoderConfig
from posenc.storage import load_tensors, parse_json, read_bytes, save_tensors, write_bytes

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.int32)}


def _changed(**changes: torch.Tensor) -> None:
    """A file whose tensors were changed, but not its checksum, is refused."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        save_tensors(path, TENSORS, {"n": 1})
        with storage.open_tensors(path) as file:
            header = file.metadata()
        save_file({**load_file(path), **changes}, path, metadata=header)
        with pytest.raises(CheckpointError, match="checksum"):
            load_tensors(path)


def test_checksums_have_values() -> None:
    _changed(a=torch.arange(6.0).reshape(2, 3) + 1)


def test_checksums_have_shapes() -> None:
    _changed(a=torch.arange(6.0).reshape(3, 2))


def test_checksums_have_dtypes() -> None:
    _changed(b=torch.arange(4, dtype=torch.int32).view(torch.float32))


def test_checksums_have_names() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.ones(2)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        save_tensors(path, tensors, {})
        with storage.open_tensors(path) as file:
            header = file.metadata()
        save_file({"a": torch.zeros(2), "c": torch.ones(2)}, path, metadata=header)
        with pytest.raises(CheckpointError, match="checksum"):
            load_tensors(path)


def test_checksums_have_meta() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        save_tensors(path, TENSORS, {"n": 1})
        with storage.open_tensors(path) as file:
            header = file.metadata()
        save_file(load_file(path), path, metadata=header | {"meta": '{"n": 2}'})
        with pytest.raises(CheckpointError, match="checksum"):
            load_tensors(path)


def test_only_regular_files_are_read() -> None:
    with pytest.raises(OSError, match="device, pipe or socket"):
        read_bytes("/dev/null", most=10)


def test_large_files_are_not_read() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(bytes(11))
        with pytest.raises(OSError, match="more than 10 bytes"):
            read_bytes(path, most=10)
    with pytest.raises(OSError, match="more than 10 bytes"):  # said to be empty, and is not
        read_bytes("/proc/self/status", most=10)


def test_nothing_is_no_number() -> None:
    for text in ("NaN", "[Infinity]", "1e999", '"\\ud800"', "[" * 100_000):
        with pytest.raises(ValueError, match=r"not a number|too large|surrogates|too deeply"):
            parse_json(text)


def test_failures_keep_the_old() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(b"old")

        def full(handle: int) -> None:
            raise OSError(28, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OutputError, match="No space"):
                write_bytes(path, b"new")
        assert path.read_bytes() == b"old"
        assert [one.name for one in path.parent.iterdir()] == ["file"]


def test_headers_are_bounded() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes((1 << 24).to_bytes(8, "little") + bytes(100))
        with pytest.raises(CheckpointError, match="a header of 16,777,216 bytes"):
            load_tensors(path)


def _decoder(folder: Path) -> None:
    config = DecoderConfig(vocabulary=9, dim=8, layers=1, heads=2, encoding="rope")
    Decoder(config).save(folder)


def test_configurations_are_summed() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _decoder(Path(folder))
        path = Path(folder) / "config.json"
        path.write_text(path.read_text().replace('"heads": 2', '"heads": 4'))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            Decoder.load(folder)


def test_layers_are_counted() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _decoder(Path(folder))
        path = Path(folder) / "config.json"
        described = json.loads(path.read_text())
        described["config"]["layers"] = 300
        path.write_text(json.dumps(described))
        tensors = load_file(Path(folder) / "model.safetensors")
        save_tensors(Path(folder) / "model.safetensors", tensors, described)
        with pytest.raises(CheckpointError, match=r"layers in .*at most"):
            Decoder.load(folder)


def test_states_have_shapes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plan = TrainingPlan(encoding="rope", seed=0, steps=5, rate=0.1, folder=Path(folder))
        for wide in (1, 4):  # that of one row would be copied into four
            model = nn.Linear(4, wide, bias=False)
            state = TrainingState(model, AdamW(model.parameters()), plan, "text")
            if wide == 1:
                state.save()
            else:
                with pytest.raises(CheckpointError, match=r"model\.weight of shape"):
                    state.restore()
