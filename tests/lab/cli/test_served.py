"""posenc evaluate --endpoint: its report, where a key goes, and inputs that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posenc.lab.evaluation import endpoint
from posenc.lab.evaluation.endpoint import KEY
from tests.support.commands import refusal, run_command
from tests.support.serving import Answer, Finder, Reply, reply, serving

SECRET = "sk-it-is-never-shown-0123456789"

ASKED = ("--tasks", "niah_single_1", "--questions", "8", "--trained-length", "400", "--quiet")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PAUSES", ())
    monkeypatch.delenv(KEY, raising=False)


def test_a_report_without_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)
    with serving(Finder(9000)) as server:
        given = ("evaluate", "--endpoint", server.url, "--model", "finder", *ASKED)
        done = run_command(*given, "--out", tmp_path / "out")
        listed = run_command(*given, "--json", "--out", tmp_path / "json")
    assert (done.returncode, listed.returncode) == (0, 0), done.stderr + listed.stderr
    assert {headers["Authorization"] for _, _, headers in server.requests} == {f"Bearer {SECRET}"}
    assert "finder reads at least 800 tokens" in done.stdout
    study = json.loads(listed.stdout)
    assert study["effective"]["length"] == 800
    assert study["findings"][0]["untuned"]["right"] == {"400": 1.0, "800": 1.0}
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"index.html", "study.json", "measurements.csv"} <= {path.name for path in written}
    page = (tmp_path / "out/index.html").read_text()
    assert f"served at {server.url}" in page
    assert "Questions answered right, by task" in page
    assert "memory" not in (tmp_path / "out/measurements.csv").read_text()
    printed = done.stdout + done.stderr + listed.stdout + listed.stderr
    assert SECRET.encode() not in b"".join(path.read_bytes() for path in written)
    assert SECRET not in printed


def refused(tmp_path: Path, *given: object) -> str:
    """The words of a command that leaves nothing."""
    said = refusal("evaluate", *given, *ASKED, "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert SECRET not in said
    return said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("folder", "--endpoint", "http://a/v1", "--model", "m"), "or an endpoint, got both."),
        ((), "checkpoint: expected a checkpoint or an endpoint, got neither."),
        (("folder", "--endpoint", f"http://u:{SECRET}@a/v1", "--model", "m"), "got both."),
        (("--endpoint", f"http://u:{SECRET}@a/v1"), "--model: expected the name of a model that"),
        (("folder", "--model", "m"), "--model: expected none, without --endpoint, got m."),
        (("folder", "--tokenizer", "t"), "--tokenizer: expected none, without --endpoint, got t."),
        (("--endpoint", "http://a/v1"), "--model: expected the name of a model that --endpoint"),
        (("--endpoint", "a:8000", "--model", "m"), "--endpoint: expected an address such as"),
        (("--endpoint", "https://a:80000/v1", "--model", "m"), "got a port that is none."),
        (("--endpoint", f"http://u:{SECRET}@a/v1", "--model", "m"), "got one with a user, a query"),
        (("--endpoint", "http://a/v1", "--model", "m", "--dtype", "float32"), "--dtype: expected"),
        (
            ("--endpoint", "http://a/v1", "--model", "m", "--short-context", "64"),
            "--short-context: expected none",
        ),
        (("--endpoint", "http://a/v1", "--model", "m", "--timeout", "0"), "--timeout: expected"),
        (("--endpoint", "http://a/v1", "--model", "m", "--concurrency", "0"), "--concurrency: exp"),
        (("--endpoint", "http://a/v1", "--model", "m", "--thinking", "-1"), "--thinking: exp"),
        (("--endpoint", "http://127.0.0.1:9/v1", "--model", "m"), "expected a server that answers"),
    ],
)
def test_wrong_options(given: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert said in refused(tmp_path, *given)


def always(answered: Reply) -> Answer:
    return lambda path, body: answered


QUOTING = {"error": {"message": f"Incorrect API key provided: {SECRET}"}}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (always(reply(QUOTING, 401)), f"got 401 Unauthorized for /completions: Incorrect API key "
         f"provided: …. Set {KEY} to a key"),
        (always(reply({}, 403)), "expected a key that the server takes from http://127.0.0.1:"),
        (Finder(9, name="other"), "--model: expected a model and a path that http://127.0.0.1:"),
        (always(reply({"detail": "Not Found"}, 404)), "Does its address end in /v1?"),
        (always((200, {}, b"<html>")), "no JSON: <html>. Is it the address of such a server"),
        (always(reply({"choices": []})), "an answer without choices"),
        (always(reply({"choices": [{"text": ""}]})), "--tokenizer: expected a folder with its"),
        (Finder(9, limit=100), "got 400 Bad Request for /completions: maximum context length is"),
        (always(reply({}, 307, Location="http://elsewhere/v1")), "a redirect, which is not"),
        (always(reply({}, 500)), "got 500 Internal Server Error"),
        (always((0, {}, b"")), "got a connection that breaks"),
    ],
)  # fmt: skip
def test_wrong_servers(
    answer: Answer, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, SECRET)
    with serving(answer) as server:
        told = refused(tmp_path, "--endpoint", server.url, "--model", "m", "--style", "base")
        if isinstance(answer, Finder) and answer.name != "other":
            told = refused(tmp_path, "--endpoint", server.url, "--model", answer.name)
    assert said in told


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    given: tuple[Any, ...] = ("--model", "finder", "--tokenizer", "nowhere")
    with serving(Finder(9)) as server:
        told = refused(tmp_path, "--endpoint", server.url, *given)
    assert "expected a tokenizer for a vocabulary of" in told
    assert server.requests == []
