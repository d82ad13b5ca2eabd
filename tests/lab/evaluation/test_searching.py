"""LongRoPE's factors, searched on a text: chosen where nothing is measured, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from posenc.errors import ArgumentError, CheckpointError, DataError, Interrupted
from posenc.lab.evaluation.candidates import Method
from posenc.lab.evaluation.checkpoint import Checkpoint, as_llama
from posenc.lab.evaluation.extend import require_search, searched
from posenc.lab.evaluation.settings import Tuning
from posenc.lab.evaluation.study import measure_extensions
from posenc.lab.evaluation.texts import Text, read_ids
from posenc.models import Decoder, DecoderConfig
from posenc.transformers.live import LiveDecoder

LENGTH = 16
LONGROPE = Method.parse("longrope")


def subject(seed: int = 0) -> Checkpoint:
    torch.manual_seed(seed)
    config = DecoderConfig(vocabulary=256, dim=16, layers=1, heads=2, max_length=LENGTH)
    model = as_llama(Decoder(config)).requires_grad_(requires_grad=False)
    return Checkpoint("tiny", "llama", LiveDecoder(model), LENGTH)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    return read_ids(path, encode=None, training=True)


def search(text: Text, state: Path, **changes: Any) -> list[Method]:
    chosen = {"methods": [LONGROPE], "factor": 2.0, "budget": 6} | changes
    return searched(chosen.pop("subject", None) or subject(), text, state=state, **chosen)


def test_the_best_factors_are_used_and_told(text: Text, tmp_path: Path) -> None:
    state = tmp_path / "search.json"
    told: list[tuple[str, int, int]] = []
    plain = Method.parse("yarn")
    yarn, found = search(
        text, state, methods=[plain, LONGROPE], progress=lambda *each: told.append(each)
    )
    assert yarn is plain
    assert found.spec == "longrope"
    factors = found.options["long_factors"]
    assert factors == sorted(factors)
    assert len(factors) == 4
    assert [done for _, done, _ in told] == [1, 2, 3, 4, 5, 6]
    assert told[-1][0].startswith("longrope: searching factors, step 6 of 6, least loss ")
    outcome = measure_extensions(
        subject(), text, [found], factor=2, tuning=Tuning(steps=0), always=True
    )
    advice = outcome.study.findings[-1].advice
    assert "best of 6" in advice[0]
    assert all(f"{each:g}" in advice[0] for each in factors)
    assert outcome.model is not None
    assert outcome.model.model.config.rope_parameters["long_factor"] == factors


def test_stopped_it_goes_on_from_where_it_was(text: Text, tmp_path: Path) -> None:
    state = tmp_path / "search.json"
    with pytest.raises(Interrupted, match="a stop after 1") as stopped:
        search(text, state, stop=lambda: True)
    assert "same command again" in stopped.value.remedy
    told: list[int] = []
    (resumed,) = search(text, state, progress=lambda stage, done, total: told.append(done))
    assert told == [2, 3, 4, 5, 6]
    assert resumed == search(text, tmp_path / "other.json")[0]


def test_another_models_search_is_refused(text: Text, tmp_path: Path) -> None:
    state = tmp_path / "search.json"
    search(text, state, budget=2)
    with pytest.raises(CheckpointError, match="same model and text"):
        search(text, state, subject=subject(seed=1))


def test_given_factors_are_left_alone(text: Text, tmp_path: Path) -> None:
    given = Method.parse("longrope@long_factors=[1,1,2,2]")
    joined = Method.parse("longrope+log_n")
    one, two, three = search(
        text, tmp_path / "search.json", methods=[given, LONGROPE, joined], budget=2
    )
    assert one is given
    assert two.options["long_factors"]
    assert three.options["long_factors"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "search.json",
        "search-longrope+log_n.json",
    }


def test_bad_input(text: Text, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="longrope among the methods"):
        require_search(5, [Method.parse("yarn")])
    require_search(0, [Method.parse("yarn")])
    require_search(5, [Method.parse("longrope+log_n")])
    state = tmp_path / "search.json"
    with pytest.raises(DataError, match="at least 64000 tokens"):
        search(text, state, factor=1000.0)
    assert not state.exists()
