"""Addresses of running servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posenc.errors import ArgumentError
from posenc.lab.doctor.served import launch_at
from tests.support.commands import printed, printed_json, refusal
from tests.support.serving import Reply, reply, serving
from tests.transformers.engines.test_loaded import made
from tests.transformers.served.gguf_files import LLAMA, write_gguf
from tests.transformers.served.test_checking import LONG, WHOLE, trained

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("model")
    made(rope_theta=5e5, max_position_embeddings=128).save_pretrained(at)
    return at


def answering(**by_path: Any) -> Callable[[str, dict[str, Any]], Reply]:
    """Answers by path; others are unknown."""

    def answer(path: str, body: dict[str, Any]) -> Reply:
        name = path.strip("/")
        return reply(by_path[name]) if name in by_path else reply({"error": "unknown"}, 404)

    return answer


def test_vllm_tells_folder_and_longest_text(folder: Path) -> None:
    models = {"data": [{"id": "x", "owned_by": "vllm", "root": str(folder), "max_model_len": 64}]}
    with serving(answering(models=models)) as server:
        launch = launch_at(server.url)
    assert (launch.engine.name, launch.longest, launch.ropes[""].base) == ("vLLM", 64, 5e5)
    assert "hf_overrides" in launch.unread[0]


def test_sglang_tells_its_options(folder: Path) -> None:
    given = {"rope_parameters": WHOLE, "max_position_embeddings": LONG}
    info = {"model_path": str(folder), "json_model_override_args": json.dumps(given)}
    models = {"data": [{"id": "x", "owned_by": "sglang", "root": str(folder)}]}
    for name in ("get_server_info", "server_info"):
        with serving(answering(models=models, **{name: info | {"context_length": 256}})) as server:
            launch = launch_at(server.url)
        assert (launch.engine.name, launch.longest) == ("SGLang", 256)
        assert launch.ropes[""].kind == "yarn"


def test_llama_cpp_tells_file_and_context(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", LLAMA)
    props = {"model_path": str(path), "default_generation_settings": {"n_ctx": 96}}
    models = {"data": [{"id": "x", "owned_by": "llamacpp"}]}
    with serving(answering(models=models, props=props)) as server:
        launch = launch_at(server.url)
    assert (launch.engine.name, launch.longest) == ("llama.cpp", 96)
    assert launch.unread


@pytest.mark.parametrize("models", [{"data": []}, {}, {"data": [{"id": "x"}]}, {"data": ["x"]}])
def test_servers_that_tell_nothing(models: dict[str, Any]) -> None:
    told = pytest.raises(ArgumentError, match="neither folder nor file")
    with serving(answering(models=models)) as server, told:
        launch_at(server.url)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    trained().save_pretrained(tmp_path)
    given = ("doctor", tmp_path, "--seconds", "0", "--live", "--against")
    command = f"vllm serve {tmp_path} --max-model-len {LONG}"
    assert "vLLM, texts of up to 512 tokens: computes the same." in printed(*given, command)
    words = printed(*given, f"vllm serve {folder}")
    assert "vLLM: scaling: yarn by 4 in training, none served: 15 of 16 pairs differ," in words
    assert '--hf-overrides \'{"rope_parameters": {' in words
    models = {
        "data": [{"id": "x", "owned_by": "vllm", "root": str(tmp_path), "max_model_len": 512}]
    }
    with serving(answering(models=models)) as server:
        [one] = printed_json(*given, server.url)["against"]
    assert (one["engine"], one["same"], one["mismatches"], one["longest"]) == (
        "vLLM",
        True,
        [],
        512,
    )
    assert one["unread"] == ["hf_overrides, which vLLM does not tell"]
    [one] = printed_json(*given, str(tmp_path), "--engine", "sglang")["against"]
    assert (one["engine"], one["same"]) == ("SGLang", True)


@pytest.mark.parametrize(
    ("against", "message"),
    [
        ("nothing", "settings: expected a server's command line"),
        ("http://127.0.0.1:1/v1", "Start the server, or correct the address"),
        ("vllm serve", "expected a model in the command, got none"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, against: str, message: str) -> None:
    trained().save_pretrained(tmp_path)
    said = refusal("doctor", tmp_path, "--seconds", "0", "--live", "--against", against)
    assert message in said


def test_the_model_is_needed(folder: Path) -> None:
    said = refusal("doctor", folder, "--against", "vllm serve x")
    assert (
        "--against: expected --live beside it, got none. It is tried on the loaded model." in said
    )
