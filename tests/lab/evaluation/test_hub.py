"""Models by their names on the hub, without one: a cache as it lays it out, and refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from posenc.errors import CheckpointError
from posenc.lab.evaluation.checkpoint import Checkpoint
from posenc.lab.evaluation.extend import extend_checkpoint
from posenc.transformers.doctor.diagnosis import check_source, diagnose
from posenc.transformers.engines import ENGINES
from posenc.transformers.hub import CONFIGS, HubName, model_folder
from tests.support.commands import inspect_here, printed, refusal
from tests.support.hub import COMMIT, REFUSED, cached, served
from tests.support.tiny_models import tiny_model


def hub_at(address: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(constants, "ENDPOINT", address)
    files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, of a hub that refuses connections."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub_at(REFUSED, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model that reads bytes, with a file of weights that nobody asks for."""
    model = tiny_model("qwen3", vocab_size=256, max_position_embeddings=16)
    model.save_pretrained(tmp_path / "in")
    (tmp_path / "in/tokenizer_config.json").write_text("{}")
    (tmp_path / "in/pytorch_model.bin").write_bytes(b"pickle")
    return tmp_path / "in"


@pytest.mark.parametrize(
    ("source", "repo", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
    ],
)
def test_names(source: str, repo: str, revision: str | None, cache: Path) -> None:
    found = HubName.of(source)
    assert found == HubName.of(Path(source)) == HubName(repo, revision)
    assert str(found) == source


@pytest.mark.parametrize(
    "source", ["name", "/org/name", "../org/name", "../name", "a/b/c", "org/name@", ".", "org/"]
)
def test_what_can_only_be_a_folder(source: str, cache: Path) -> None:
    assert HubName.of(source) is None
    assert model_folder(source, weights=True) == Path(source)


def test_folders_come_first(cache: Path, folder: Path, tmp_path: Path) -> None:
    cached(cache, "org/name", folder)
    (tmp_path / "org/name").mkdir(parents=True)
    assert model_folder("org/name", weights=True) == Path("org/name")


@pytest.mark.parametrize("revision", ["main", "v1"])
def test_a_cached_model_is_read_without_a_connection(
    revision: str, cache: Path, folder: Path
) -> None:
    snapshot = cached(cache, "org/name", folder, revision=revision)
    name = "org/name" if revision == "main" else f"org/name@{revision}"
    assert model_folder(name, weights=False) == snapshot
    opened = Checkpoint.open(name)
    assert (opened.name, opened.folder, opened.length) == (name, snapshot, 16)
    found, own = diagnose(name, budget=0, run_seconds=0), diagnose(folder, budget=0, run_seconds=0)
    assert found.reading == own.reading
    assert found.advice.command == f"posenc extend {name} --method yarn --factor 4"
    assert [one.problem for one in check_source(name)] == [""]


def test_an_extended_model_is_served_by_its_name(cache: Path, folder: Path, tmp_path: Path) -> None:
    cached(cache, "org/name", folder, revision="v1")
    found = extend_checkpoint("org/name@v1", tmp_path / "out", report=False, engine="vllm")
    [serving] = found.serving
    assert serving.original.startswith("vllm serve org/name --revision v1 --hf-overrides '{")
    assert serving.command.startswith(f"vllm serve {tmp_path / 'out'} ")


@pytest.mark.parametrize("weights", [True, False])
def test_no_connection_and_no_copy(weights: bool, cache: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_folder("org/name@v1", weights=weights)
    assert caught.value.argument == "org/name@v1"
    assert caught.value.got.startswith("no such folder, no connection to the hub")
    fetch = ["hf download org/name --revision v1", *(() if weights else CONFIGS)]
    assert caught.value.remedy == f"Where the hub can be reached: {' '.join(fetch)}"


def test_a_copy_without_weights_is_diagnosed_and_not_loaded(cache: Path, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    cached(cache, "org/name", folder)
    assert diagnose("org/name", budget=0, run_seconds=0).model_type == "qwen3"
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open("org/name")
    assert caught.value.got.startswith("no model*.safetensors in ")
    assert "hf download org/name. Pickle is never read." in caught.value.remedy


def test_what_is_fetched(cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagnosis fetches no weights, so that it leaves no model, and nothing fetches pickle."""
    (folder / "vocab.json").write_text("{}")
    (folder / "sentence_bert_config.json").write_text("{}")
    for part, name in (("original", "tokenizer.model"), ("1_Pooling", "config.json")):
        (folder / part).mkdir()
        (folder / part / name).write_text("{}")
    with served("org/name", folder) as (address, asked):
        hub_at(address, monkeypatch)
        diagnose("org/name", budget=0, run_seconds=0)
        assert set(asked) == {*CONFIGS}
        hub_at(REFUSED, monkeypatch)
        with pytest.raises(CheckpointError, match="no complete copy in its cache"):
            Checkpoint.open("org/name")
        hub_at(address, monkeypatch)
        asked.clear()
        opened = Checkpoint.open("org/name")
        assert {"model.safetensors", "vocab.json", "1_Pooling/config.json"} <= set(asked)
        assert "original/tokenizer.model" not in asked
        assert not {"config.json", "pytorch_model.bin"} & set(asked)
        asked.clear()
        Checkpoint.open(f"org/name@{COMMIT}")
        assert asked == []
        with pytest.raises(CheckpointError, match="no such model of the hub"):
            model_folder("org/other", weights=False)
    hub_at(REFUSED, monkeypatch)
    assert opened.folder == model_folder("org/name", weights=True)


def test_without_huggingface_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="huggingface_hub is not installed") as caught:
        model_folder("org/name", weights=False)
    assert caught.value.remedy == "Install it: pip install 'posenc[transformers]'."


def test_a_command_takes_names(cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inspect_here(monkeypatch)
    cached(cache, "org/name", folder)
    command = ("doctor", "--seconds", "0", "--live")
    told = printed(*command, "org/name", "--engine", "all")
    assert "posenc extend org/name --method yarn" in told
    assert told.count("as transformers") == len(ENGINES) - 1
    assert "model.rotary_emb.inv_freq: 8 pairs, gain 1, as its config says." in told
    assert refusal(*command, "org/other").endswith("hf download org/other")


def test_the_cache_is_that_of_the_environment(folder: Path, tmp_path: Path) -> None:
    """As users set it: a home of the cache, and no network."""
    snapshot = cached(tmp_path / "home/hub", "org/name", folder)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": REFUSED}
    environment = {k: v for k, v in environment.items() if not k.startswith("HF_HUB")}
    program = "from posenc.transformers.hub import model_folder; "
    program += "print(model_folder('org/name', weights=True))"
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, env=environment, text=True).strip() == str(snapshot)
