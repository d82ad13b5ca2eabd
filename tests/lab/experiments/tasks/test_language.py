"""The byte-level task, and the needles in its windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc.errors import ArgumentError, DataError
from posenc.lab.experiments.results import RefusedMeasurement
from posenc.lab.experiments.tasks.common import needles
from posenc.lab.experiments.tasks.language import LanguageModelling
from posenc.lab.training.loop import seeded_model
from posenc.models import Decoder
from tests.lab.experiments.tasks import small
from tests.lab.experiments.tasks.small import frozen, measured

ROWS, LENGTH = 200, 32


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    words = torch.randint(97, 123, (20_000,), generator=torch.Generator().manual_seed(6))
    path.write_bytes(bytes(words.tolist()))
    return path


def make(text: Path | None, **changes: Any) -> LanguageModelling:
    fields = {"train_length": 16, "test_lengths": (16, 32, 64), "layers": 2, "text": text}
    return small.make("language", text.parent if text else Path(), **{**fields, **changes})


def test_targets_are_the_next_bytes_of_the_text(text: Path) -> None:
    task = make(text, options={"needle_rows": 0.0})
    batch = task.batch(0, 0)
    assert batch["inputs"].shape == batch["targets"].shape == (8, 16)
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    content = text.read_bytes()
    assert all(bytes(row.tolist()) in content for row in batch["inputs"])
    assert not torch.equal(batch["inputs"], task.batch(2**31 - 1, 0)["inputs"])


def test_share_of_rows_with_needles(text: Path) -> None:
    batch = make(text).batch(0, 0)
    assert (batch["inputs"] == needles.QUERY).any(1).sum() == 2
    every = make(text, options={"needle_rows": 1.0}).batch(0, 0)
    assert (every["inputs"] == needles.QUERY).any(1).all()
    with pytest.raises(ArgumentError, match=r"needle_rows: .*0 or more, at most 1"):
        make(text, options={"needle_rows": 1.5})


def test_no_needles_no_recall(text: Path) -> None:
    task = make(text, options={"needle_rows": 0.0})
    assert "recall" not in {metric.key for metric in task.metrics}
    assert "recall" not in {metric for *_, metric, _ in measured(task, "rope")}


def test_own_weights_of_an_encoding_follow_the_seed(text: Path) -> None:
    task = make(text)
    before = torch.get_rng_state()
    first, again, other = (
        dict(seeded_model(task, "learned", seed).named_parameters()) for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator is left alone"
    (name,) = first.keys() - dict(seeded_model(task, "nope", 3).named_parameters()).keys()
    assert torch.equal(first[name], again[name])
    for weight in (name, "embedding.weight"):
        assert not torch.equal(first[weight], other[weight])


def test_window_equals_full_attention_at_the_training_length_only(text: Path) -> None:
    task = make(text)
    found = measured(task, "rope")
    assert task.count("rope") == 16, "two subjects"
    assert sum(key[0] == "loss_by_position" for key in found) == 16
    for metric in ("loss", "recall"):
        assert found["rope|window=16", metric, 16] == pytest.approx(found[metric, 16])
    assert found["rope|window=16", "loss", 64] != pytest.approx(found["loss", 64], abs=1e-4)


def test_learned_table_is_known_by_position_up_to_its_end(text: Path) -> None:
    """Refusals carry no seed."""
    task = make(text)
    found = measured(task, "learned")
    assert isinstance(found["recall", 16], float)
    for key in (("loss", 32), ("loss", 64), ("recall", 64), ("loss_by_position", 64)):
        assert "learned table" in found[key]
    assert isinstance(found["loss_by_position", 2.0], float)
    model = frozen(task, "learned")
    refused = []
    for seed in (0, 1):
        pieces = task.measure(model, "learned", seed, available=None)
        refused.append([x for piece in pieces for x in piece if isinstance(x, RefusedMeasurement)])
    assert refused[0] == refused[1] != []


def test_materialised_scores_need_more_memory() -> None:
    task = make(None, train_length=4000, test_lengths=None)
    task.require_memory(task.build("rope"), 10**9)
    with pytest.raises(ArgumentError, match="that fits into"):
        task.require_memory(task.build("t5"), 10**9)


class Finder(nn.Module):
    """Finds the needle among the last ``reach`` tokens; names 0x10 where it sees none."""

    def __init__(self, model: Decoder, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.config, self.embedding = model.config, model.embedding
        self.encodings = model.encodings

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 256)
        logits[..., needles.FIRST] = 1.0
        seen = tokens[:, -self.reach :]
        for row, window in enumerate(seen):
            for token in window[(window >= needles.FIRST) & (window < needles.FIRST + 16)]:
                logits[row, -1, token] = 2.0
        return logits


def test_recall_is_right_for_models_made_by_hand(text: Path) -> None:
    task = make(text, references=())
    model = frozen(task, "nope")
    far, near = (measured(task, "nope", Finder(model, reach)) for reach in (1000, 24))
    assert [far["recall", x] for x in (16, 32, 64)] == [1.0, 1.0, 1.0]
    assert near["recall", 16] == 1.0
    for x in (32, 64):
        assert near["recall", x] == pytest.approx(needles.CHANCE, abs=0.1)


def test_text_too_short_for_the_lengths(text: Path) -> None:
    with pytest.raises(DataError, match=r"text: .*at length 8000.*shorter test lengths"):
        make(text, test_lengths=(8000,))
    text.write_bytes(b"tiny")
    with pytest.raises(DataError, match="longer text"):
        make(text)


def test_very_long_contexts_are_tested_on_fewer_windows(text: Path) -> None:
    tested = [
        next(metric for metric in task.metrics if metric.key == "loss").description
        for task in (make(text), make(None, test_lengths=(78_000,)))
    ]
    assert [words.split()[2] for words in tested] == [f"{8 * n:,}" for n in (233, 16)]


def test_t5_has_no_bucket_that_training_does_not_reach() -> None:
    for length in (8, 9, 16, 64, 256, 1024):
        task = make(None, train_length=length, test_lengths=(length,))
        score = task.build("t5").encodings[0].score
        reached = score.bucket(-torch.arange(length).float().unsqueeze(-1))
        assert int(reached.max()) == score.table.shape[1] - 1


def test_subjects_say_why_they_are_there(text: Path) -> None:
    subjects = {subject.name: subject for subject in make(text).subjects}
    roles = {"nope": "control", "rope|window=16": "baseline", "rope": "candidate"}
    assert {name: subjects[name].role for name in roles} == roles
    assert "8" in subjects["t5"].note
    assert "16 positions" in subjects["learned"].note


def is_needle(tokens: Tensor) -> Tensor:
    return (tokens >= needles.FIRST) & (tokens < needles.FIRST + needles.KINDS)


def test_each_window_has_one_needle_that_later_queries_ask_for() -> None:
    """All other targets are those of the text."""
    generator = torch.Generator().manual_seed(4)
    whole = torch.randint(32, 127, (ROWS, LENGTH + 1), generator=generator)
    text, following = whole[:, :-1], whole[:, 1:]
    inputs, targets = text.clone(), following.clone()
    needles.hide(inputs, targets, generator)

    assert (is_needle(inputs).sum(1) == 1).all()
    assert is_needle(inputs)[:, : LENGTH // 2].any(1).all()
    assert len(inputs[is_needle(inputs)].unique()) == needles.KINDS

    place = is_needle(inputs).int().argmax(1)
    needle = inputs[torch.arange(ROWS), place]
    queries = inputs == needles.QUERY
    assert queries.any(1).all()
    assert (queries.int().argmax(1) > place).all()
    assert queries[:, -1].any(), "a query may be the last byte"
    for row in range(ROWS):
        assert (targets[row][queries[row]] == needle[row]).all()

    assert torch.equal(is_needle(targets), queries)
    assert torch.equal(targets[~queries], following[~queries])
    assert torch.equal(inputs[~queries & ~is_needle(inputs)], text[~queries & ~is_needle(inputs)])
    assert (~queries).float().mean() > 0.5


def test_haystacks_hide_the_needle_far_back_and_ask_at_the_end() -> None:
    generator = torch.Generator().manual_seed(5)
    windows = torch.randint(256, (ROWS, 64), generator=generator)
    stacks, answers = needles.haystacks(windows, generator)
    assert (stacks[:, -1] == needles.QUERY).all()
    assert ((stacks == needles.QUERY).sum(1) == 1).all()
    assert (is_needle(stacks).sum(1) == 1).all()
    assert is_needle(stacks)[:, :8].any(1).all()
    assert torch.equal(stacks[is_needle(stacks)], answers)
    assert len(answers.unique()) == needles.KINDS
