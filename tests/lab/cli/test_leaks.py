"""posenc doctor --live --batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import printed, printed_json, refusal
from tests.support.tiny_models import VOCABULARY, tiny_model

IDS, PLACES = [[5, 6, 7, 8, 9, 5, 7]], [[0, 1, 2, 0, 1, 2, 3]]
GIVEN = ("--seconds", "0", "--live", "--batch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(made)
    return made


def written(path: Path, **batch: Any) -> Path:
    path.write_text(json.dumps({"input_ids": IDS, **batch}))
    return path


def test_what_is_printed(folder: Path, tmp_path: Path) -> None:
    batch = written(tmp_path / "batch.json", position_ids=PLACES)
    words = " ".join(printed("doctor", folder, *GIVEN, batch).split())
    assert "2 documents of 3 to 4 tokens, number 1 changed:" in words
    assert "training: no other document moves. evaluation: no other document moves." in words
    assert "evaluation with a cache: 1 other document moved, by up to" in words
    assert "what stops it: use_cache=False." in words


def test_json(folder: Path, tmp_path: Path) -> None:
    mask = [[1] * len(IDS[0])]
    batch = written(tmp_path / "batch.json", position_ids=PLACES, attention_mask=mask)
    answer = printed_json("doctor", folder, *GIVEN, batch)
    assert len(answer["live"]) == 1
    assert answer["batch"]["lengths"] == [3, 4]
    assert [(one["mode"], one["documents"]) for one in answer["batch"]["modes"]] == [
        ("training", [1]),
        ("evaluation", [1]),
        ("evaluation with a cache", [1]),
    ]
    assert answer["batch"]["modes"][0]["remedy"] == "no attention_mask"


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda path: None, "no such file"),
    "a folder": (lambda path: path.mkdir(), "no such file"),
    "no JSON": (lambda path: path.write_text("{"), "invalid JSON"),
    "a list": (lambda path: path.write_text("[1]"), "mapping"),
    "no tokens": (lambda path: path.write_text("{}"), "input_ids"),
    "one document": (lambda path: written(path), "where documents begin"),
    "other rows": (lambda path: written(path, position_ids=[[0]]), "position_ids"),
    "words": (lambda path: written(path, document_ids=[["a"]]), "document_ids"),
    "two answers": (
        lambda path: written(path, position_ids=PLACES, cu_seq_lens_q=[0, 2, 7]),
        "same documents",
    ),
    "another vocabulary": (
        lambda path: written(path, input_ids=[[VOCABULARY] * 7], position_ids=PLACES),
        "vocabulary",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_batches(name: str, folder: Path, tmp_path: Path) -> None:
    make, words = WRONG[name]
    path = tmp_path / "batch.json"
    make(path)
    assert words in refusal("doctor", folder, *GIVEN, path)


def test_a_batch_without_a_loaded_model(folder: Path, tmp_path: Path) -> None:
    batch = written(tmp_path / "batch.json", position_ids=PLACES)
    assert "--live" in refusal("doctor", folder, "--seconds", "0", "--batch", batch)
