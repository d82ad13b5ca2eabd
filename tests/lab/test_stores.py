"""Folders on object stores: commands work in them as in local ones."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from posenc.errors import CheckpointError, OutputError
from posenc.lab import stores
from posenc.lab.stores import StorePath, local_folder, working_folder
from posenc.models import Decoder
from tests.lab.cli.test_commands import TINY
from tests.support.commands import printed_json, refusal, run_command
from tests.support.samples import next_token_model

COMPARE = ("compare", *TINY, "--test-lengths", "32", "--encodings", "rope,nope")
TEXT = b"the quick brown fox jumps over the lazy dog. " * 400


@pytest.fixture
def memory() -> Iterator[Any]:
    """An empty store in memory."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


@pytest.mark.parametrize(
    "url", ["s3://bucket/folder", "memory://a/b", "file:///tmp/a", "gs://b/é ü"]
)
def test_a_path_on_a_store_is_its_url(url: str) -> None:
    path = StorePath(url)
    assert str(path) == url
    assert str(path / "runs" / "x") == f"{url}/runs/x"
    assert str(path.parent / path.name) == url


def test_a_folder_is_fetched_kept_up_to_date_and_left_as_it_ends(memory: Any) -> None:
    """With what a command keeps beside it, but no file of another's or one being written."""
    memory.pipe({"/b/other/x": b"1", "/b/run/old": b"2", "/b/run-measured.json": b"{}"})
    memory.pipe({"/b/run-2/x": b"3"})
    with working_folder(StorePath("memory://b/run")) as folder:
        home = folder.parent
        assert sorted(path.name for path in home.iterdir()) == ["run", "run-measured.json"]
        assert (folder / "old").read_bytes() == b"2"
        (folder / "old").unlink()
        (home / "run-measured.json").unlink()
        (folder / "model").mkdir()
        (folder / "model" / "new").write_bytes(b"4")
        (folder / ".new.partial").write_bytes(b"5")
    assert not home.exists()
    assert sorted(memory.find("/b")) == ["/b/other/x", "/b/run-2/x", "/b/run/model/new"]


def test_what_says_that_a_run_is_finished_comes_last(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it replaces is deleted after that."""
    changed: list[tuple[str, str]] = []
    put, remove = memory.put_file, memory.rm_file
    for name, method in (("put_file", put), ("rm_file", remove)):

        def noting(*paths: str, name: str = name, method: Any = method, **more: Any) -> None:
            changed.append((name, paths[-1].rpartition("/")[2]))
            method(*paths, **more)

        monkeypatch.setattr(type(memory), name, staticmethod(noting))
    memory.pipe("/b/run/checkpoint", b"0")
    with working_folder(StorePath("memory://b/run")) as folder:
        (folder / "model").mkdir()
        for number, name in enumerate(("model/z", "model/a", "run.json")):
            (folder / name).write_bytes(b"1")
            os.utime(folder / name, ns=(number, number))
        (folder / "checkpoint").unlink()
    assert changed[1:] == [
        ("put_file", "z"), ("put_file", "a"), ("put_file", "run.json"), ("rm_file", "checkpoint"),
    ]  # fmt: skip


def test_files_are_copied_while_the_work_goes_on(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "PAUSE", 0.01)
    with working_folder(StorePath("memory://b/run")) as folder:
        folder.mkdir()
        (folder / "x").write_bytes(b"1")
        deadline = time.monotonic() + 60
        while not memory.exists("/b/run/x") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert memory.exists("/b/run/x")


def test_after_an_error_the_work_is_on_the_store(memory: Any) -> None:
    """Which is named in the error in place of the copy."""

    def work() -> None:
        with working_folder(StorePath("memory://b/run")) as folder:
            folder.mkdir()
            (folder / "x").write_bytes(b"1")
            raise CheckpointError(str(folder / "x"), expected="it whole", got="half", remedy="")

    with pytest.raises(CheckpointError, match="memory://b/run/x: expected it whole, got half"):
        work()
    assert memory.cat("/b/run/x") == b"1"


def test_a_store_that_fails_at_the_end_loses_nothing(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: str, **more: Any) -> None:
        raise PermissionError("expired")

    homes: list[Path] = []

    def work() -> None:
        with working_folder(StorePath("memory://b/run")) as folder:
            homes.append(folder.parent)
            folder.mkdir()
            (folder / "x").write_bytes(b"1")
            monkeypatch.setattr(type(memory), "put_file", refuse)

    with pytest.raises(OutputError, match="PermissionError: expired") as raised:
        work()
    (home,) = homes
    assert f"What it lacks is in {home}." in raised.value.remedy
    assert (home / "run" / "x").read_bytes() == b"1"
    shutil.rmtree(home)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (FileNotFoundError("no such bucket"), "Make the bucket"),
        (PermissionError("denied"), "Check the credentials"),
        (RuntimeError("Unable to locate credentials"), "Check the credentials"),
        (ConnectionError("no answer"), "Check the address"),
        (ImportError("Install s3fs"), "posenc[remote]"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_before_any_work(
    error: Exception, remedy: str, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(type(memory), "pipe_file", refuse)
    url = "memory://b/run"
    if isinstance(error, ImportError):
        monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
        url = "s3://b/run"
    for command in (COMPARE, ("evaluate", "nowhere"), ("extend", "nowhere")):
        told = refusal(*command, "--out", url)
        assert f"{url}, got" in told
        assert str(error) in told
        assert remedy in told


def test_a_cluster_does_not_see_a_store(memory: Any) -> None:
    told = refusal(*COMPARE, "--launch", "ray", "--out", "memory://b/run")
    assert "--launch: expected none, for memory://b/run" in told


def test_a_comparison_on_a_store_is_resumed_and_extended(memory: Any, tmp_path: Path) -> None:
    """Its folder is as a local one; what it prints leads to the store."""
    out = "memory://b/run"
    told = printed_json(*COMPARE, "--quiet", "--out", out)
    assert told["report"] == f"{out}/report/index.html"
    assert memory.exists("/b/run/report/index.html")
    models = [model for each in told["encodings"] for model in each["models"]]
    assert f"{out}/runs/rope/seed-0/model" in models
    with local_folder(StorePath(models[0])) as model:
        assert Decoder.load(model).config.layers == 1
    again = run_command("compare", "--resume", "--out", out)
    assert again.returncode == 0, again.stderr
    assert "4 finished before" in again.stderr
    assert f"Report: {out}/report/index.html" in again.stdout.replace("\n", "")
    continued = printed_json("generate", f"{out}/runs/rope/seed-0", "--max-new", "3")
    assert len(continued["continuation"]) > 0
    assert "got nothing there" in refusal("generate", "memory://b/none")
    assert "memory://b/run, which exists" in refusal(*COMPARE, "--out", out)


def test_a_checkpoint_on_a_store_is_evaluated_and_extended_there(
    memory: Any, tmp_path: Path
) -> None:
    next_token_model(TEXT, length=16, encoding="rope").save(tmp_path / "model")
    (tmp_path / "text.txt").write_bytes(TEXT)
    memory.put(str(tmp_path / "model"), "/b/model", recursive=True)
    text = ("--text", tmp_path / "text.txt", "--quiet")
    lengths = ("--lengths", "8,16", "--out", "memory://b/evaluated")
    assert printed_json("evaluate", "memory://b/model", *text, *lengths)["length"] == 16
    assert memory.exists("/b/evaluated/index.html")
    extended = ("--method", "ntk", "--factor", "2", "--no-report", "--out", "memory://b/longer")
    assert (
        printed_json("extend", "memory://b/model", *text, *extended)["out"] == "memory://b/longer"
    )
    assert json.loads(memory.cat("/b/longer/config.json"))["model_type"] == "llama"
    assert not [path for path in memory.find("/b") if path.endswith("-measured.json")]
