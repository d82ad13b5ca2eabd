"""Settings that start a server, and those that start none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posenc.errors import ArgumentError, CheckpointError, PosencError
from posenc.transformers.served.settings import launches
from tests.transformers.engines.test_loaded import made

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("model")
    made(rope_theta=5e5, max_position_embeddings=128).save_pretrained(at)
    return at


@pytest.mark.parametrize(
    ("command", "engine"),
    [
        ("vllm serve {}", "vLLM"),
        ("CUDA_VISIBLE_DEVICES=0 vllm serve {} --port 8000 \\\n  --max-model-len=64", "vLLM"),
        ("python -m vllm.entrypoints.openai.api_server --model {} --max_model_len 64", "vLLM"),
        ("docker run --gpus all vllm/vllm-openai:v0.33.0 --model {} --max-model-len 64", "vLLM"),
        ("trl vllm-serve --model {} --max_model_len 64", "vLLM"),
        ("python3 -m sglang.launch_server --model-path {} --context-length 64", "SGLang"),
        ("mlx_lm.server --model {}", "mlx-lm"),
        ("cd /somewhere && vllm serve {} --max-model-len 64 # a comment", "vLLM"),
    ],
)
def test_commands_of_servers(folder: Path, tmp_path: Path, command: str, engine: str) -> None:
    [launch] = launches(command.format(folder))
    assert launch.engine.name == engine
    assert launch.longest == (64 if "64" in command else None if engine == "mlx-lm" else 128)
    assert launch.ropes[""].base == (1e4 if engine == "mlx-lm" else 5e5), "read beside, by mlx-lm"
    (tmp_path / "serve.sh").write_text("#!/bin/sh\n" + command.format(folder) + "\n")
    assert launches(tmp_path / "serve.sh") == [launch]


@pytest.mark.parametrize(
    ("text", "tokens"), [("64", 64), ("0.1k", 100), ("1K", 1024), ("auto", 128), ("-1", 128)]
)
def test_lengths_as_vllm_reads_them(folder: Path, text: str, tokens: int) -> None:
    [launch] = launches(f"vllm serve {folder} --max-model-len {text}")
    assert launch.longest == tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout": {"engine_kwargs": {"vllm": {"hf_overrides": {"a": 1}, "max_model_len": 64}}}},
        {"model": {"path": "FOLDER"}, "rollout": {"max_model_len": 64}},
        {"policy": {"model_name": "FOLDER", "hf_config_overrides": {}}, "max_model_len": "64"},
        {"use_vllm": True, "vllm_max_model_length": 64},
    ],
)
def test_settings_of_trainers(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """verl, NeMo-RL and TRL; the model is the loaded one where none is named."""
    settings = json.loads(json.dumps(settings).replace("FOLDER", str(folder)))
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings))
    for given in (settings, path, str(path)):
        [launch] = launches(given, model=str(folder))
        assert (launch.engine.name, launch.longest, launch.refusals) == ("vLLM", 64, ())


@pytest.mark.parametrize("where", ["--rope-scaling '{}'", "--rope-theta 7"])
def test_options_that_vllm_has_no_longer(folder: Path, where: str) -> None:
    [launch] = launches(f"vllm serve {folder} {where}")
    name = where.split()[0]
    assert launch.refusals == (f"does not start: it has no {name} since vLLM 0.11.1",)
    [launch] = launches(
        {"rope_scaling": {"rope_type": "yarn"}, "max_model_len": 64}, model=str(folder)
    )
    assert "it has no rope_scaling since" in launch.refusals[0]


WRONG: list[tuple[object, str]] = [
    ("no-such-file", "'no-such-file', which is no file"),
    ("python train.py --lr 1", "which starts no known server"),
    ("vllm serve", "expected a model in the command, got none"),
    ("vllm serve 'FOLDER", "a command line with an open quote"),
    ("vllm serve FOLDER --max-model-len many", "expected a number of tokens as --max-model-len"),
    ("vllm serve FOLDER --max-model-len 0", "got '0'"),
    ("vllm serve FOLDER --hf-overrides {rope_theta:1}", "expected JSON in --hf-overrides"),
    ("vllm serve FOLDER --hf-overrides [1]", "expected a JSON object in --hf-overrides, got list"),
    ({"learning_rate": 1e-6}, "got settings of none of vLLM or SGLang"),
    ({"max_model_len": 1, "context_length": 1}, "got settings of SGLang and vLLM"),
    ({"hf_overrides": 3, "model": "FOLDER"}, "expected a dict as hf_overrides, got int"),
    (7, "got int"),
    ("llama-server -m /no/such.gguf -c 64", "got no such file"),
    ("vllm serve /no/such/folder --port 1", "got no folder /no/such/folder"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=range(len(WRONG)))
def test_settings_that_start_no_server(folder: Path, settings: Any, message: str) -> None:
    if isinstance(settings, str):
        settings = settings.replace("FOLDER", str(folder))
    elif isinstance(settings, dict):
        settings = {k: str(folder) if v == "FOLDER" else v for k, v in settings.items()}
    with pytest.raises(PosencError) as caught:
        launches(settings, model=str(folder))
    assert message in str(caught.value)
    assert isinstance(caught.value, ArgumentError | CheckpointError)


def test_files_that_are_no_settings(tmp_path: Path) -> None:
    for name, content, message in (
        ("verl.yaml", b"a: 1", "which is YAML"),
        ("weights.bin", b"\xff\xfe\x00", "which is no text"),
        ("settings.json", b"{", "expected JSON in"),
        ("model.gguf", b"PK12", "expected a GGUF file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(PosencError, match=message):
            launches(tmp_path / name)
