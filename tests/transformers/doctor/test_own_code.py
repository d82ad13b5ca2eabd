"""Code of a model's folder never runs, whoever answers a question whether it may."""

from __future__ import annotations

import ast
import builtins
import json
from pathlib import Path
from typing import Any

import pytest

import posenc
from posenc.transformers.doctor.diagnosis import diagnose
from tests.support.commands import inspect_here

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "intermediate_size": 16, **SIZES}
CODE = """
import pathlib
pathlib.Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaModel
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaModel):
    config_class = OwnConfig
"""
LOADING = ("from_pretrained", "from_config")
"""Functions of classes of transformers that may load code."""


@pytest.mark.parametrize("model_type", ["own", "llama"])
def test_a_folder_with_code(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "own.py").write_text(CODE.format(mark=str(mark)))
    classes = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    fields = {**LLAMA, "model_type": model_type, "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    inspect_here(monkeypatch)
    found = diagnose(tmp_path, budget=0.01)
    assert found.model_type == model_type
    assert bool(found.costs) == (model_type == "llama")
    assert not mark.exists()


def test_every_call_that_may_load_code_refuses_it() -> None:
    calls = []
    for file in Path(posenc.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in LOADING:
                given = {k.arg: k.value for k in node.keywords}
                refused = given.get("trust_remote_code")
                calls.append((file.name, isinstance(refused, ast.Constant) and not refused.value))
    assert len(calls) >= 6
    assert [name for name, refused in calls if not refused] == []


UNKNOWN: dict[str, dict[str, Any]] = {
    "model type": {"model_type": "of_nobody"},
    "rope type": {"rope_parameters": {"rope_type": "of_nobody", "rope_theta": 1e4}},
    "layer list": {"layer_types": ["full_attention", "of_nobody"]},
    "short layer list": {"layer_types": ["full_attention"]},
}


@pytest.mark.parametrize("fields", UNKNOWN.values(), ids=UNKNOWN)
def test_what_transformers_does_not_know_is_not_measured(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | fields))
    found = diagnose(tmp_path, budget=0.01, run_seconds=0)
    assert found.costs == ()
    assert found.acceleration.startswith("Costs were not measured")
