"""The byte-level task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from posenc.errors import ArgumentError, DataError
from posenc.lab.experiments.results import Measurement, RefusedMeasurement
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.tasks.common import needles
from posenc.lab.experiments.tasks.language import LanguageModelling
from posenc.lab.training.loop import seeded_model
from posenc.models import Decoder

ENCODINGS = ("nope", "sinusoidal", "learned", "rope", "alibi", "t5", "shaw", "rope+alibi")


@pytest.fixture
def settings(tmp_path: Path) -> ComparisonSettings:
    text = tmp_path / "text.txt"
    words = torch.randint(97, 123, (20_000,), generator=torch.Generator().manual_seed(6))
    text.write_bytes(bytes(words.tolist()))
    return ComparisonSettings(
        out=tmp_path / "out",
        text=text,
        encodings=ENCODINGS,
        train_length=16,
        test_lengths=(16, 32, 64),
        width=16,
        layers=2,
        heads=2,
        batch=8,
    )


def measured(
    task: LanguageModelling, model: nn.Module, encoding: str, available: int | None = None
) -> dict[tuple[str, str, float], float | str]:
    found: dict[tuple[str, str, float], float | str] = {}
    for piece in task.measure(model, encoding, 0, available=available):
        for item in piece:
            value = item.value if isinstance(item, Measurement) else item.reason
            found[item.subject, item.metric, item.x] = value
    return found


def frozen(task: LanguageModelling, encoding: str) -> Decoder:
    model = seeded_model(task, encoding, 0)
    assert isinstance(model, Decoder)
    return model.requires_grad_(requires_grad=False).eval()


def test_batches_depend_on_seed_and_step_alone(settings: ComparisonSettings) -> None:
    task, again = LanguageModelling(settings), LanguageModelling(settings)
    first = task.batch(0, 5)
    task.batch(1, 7)
    for name, tensor in again.batch(0, 5).items():
        assert torch.equal(first[name], tensor)
    others = [task.batch(0, 6), task.batch(1, 5), task.batch(2**31 - 1, 5)]
    assert not any(torch.equal(first["inputs"], other["inputs"]) for other in others)


def test_targets_are_the_next_bytes_of_the_text(settings: ComparisonSettings) -> None:
    task = LanguageModelling(replace(settings, options={"needle_rows": 0.0}))
    batch = task.batch(0, 0)
    assert batch["inputs"].shape == batch["targets"].shape == (8, 16)
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert settings.text is not None
    text = settings.text.read_bytes()
    for row in batch["inputs"]:
        assert bytes(row.tolist()) in text


def test_share_of_rows_with_needles(settings: ComparisonSettings) -> None:
    batch = LanguageModelling(settings).batch(0, 0)
    assert (batch["inputs"] == needles.QUERY).any(1).sum() == 2
    every = LanguageModelling(replace(settings, options={"needle_rows": 1.0})).batch(0, 0)
    assert (every["inputs"] == needles.QUERY).any(1).all()


def test_all_encodings_start_from_the_same_weights(settings: ComparisonSettings) -> None:
    task = LanguageModelling(settings)
    control = dict(seeded_model(task, "nope", 3).named_parameters())
    for encoding in ENCODINGS:
        parameters = dict(seeded_model(task, encoding, 3).named_parameters())
        assert control.keys() <= parameters.keys()
        for name, parameter in control.items():
            assert torch.equal(parameters[name], parameter), f"{encoding} {name}"
    other = dict(seeded_model(task, "nope", 4).named_parameters())
    assert not torch.equal(other["embedding.weight"], control["embedding.weight"])


def test_own_weights_of_an_encoding_follow_the_seed(settings: ComparisonSettings) -> None:
    task = LanguageModelling(settings)
    first, again, other = (
        dict(seeded_model(task, "learned", seed).named_parameters()) for seed in (3, 3, 4)
    )
    (name,) = first.keys() - dict(seeded_model(task, "nope", 3).named_parameters()).keys()
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_seeding_a_model_leaves_the_callers_generator(settings: ComparisonSettings) -> None:
    task = LanguageModelling(settings)
    before = torch.get_rng_state()
    seeded_model(task, "t5", 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_metric_is_measured_as_often_as_promised(settings: ComparisonSettings) -> None:
    task = LanguageModelling(settings)
    model = frozen(task, "rope")
    pieces = list(task.measure(model, "rope", 0, available=None))
    assert len(pieces) == task.count("rope") == 16  # two subjects
    keys = {item.metric for piece in pieces for item in piece}
    assert keys == {metric.key for metric in task.metrics} - {"training_loss"}
    assert sum(metric.headline for metric in task.metrics) == 1
    found = measured(task, model, "rope")
    positions = [
        x for subject, metric, x in found if (subject, metric) == ("rope", "loss_by_position")
    ]
    assert len(positions) == 16


def test_needle_rows_are_a_share(settings: ComparisonSettings) -> None:
    with pytest.raises(ArgumentError, match=r"needle_rows: .*0 or more, at most 1"):
        LanguageModelling(replace(settings, options={"needle_rows": 1.5}))


def test_no_needles_no_recall(settings: ComparisonSettings) -> None:
    task = LanguageModelling(replace(settings, options={"needle_rows": 0.0}))
    assert "recall" not in {metric.key for metric in task.metrics}
    found = measured(task, frozen(task, "rope"), "rope")
    assert "recall" not in {metric for _, metric, _ in found}


def test_window_equals_full_attention_at_the_training_length_only(
    settings: ComparisonSettings,
) -> None:
    task = LanguageModelling(settings)
    found = measured(task, frozen(task, "rope"), "rope")
    for metric in ("loss", "recall"):
        assert found["rope|window=16", metric, 16] == pytest.approx(found["rope", metric, 16])
    assert found["rope|window=16", "loss", 64] != pytest.approx(found["rope", "loss", 64], abs=1e-4)


def test_learned_table_is_refused_beyond_its_end(settings: ComparisonSettings) -> None:
    task = LanguageModelling(settings)
    found = measured(task, frozen(task, "learned"), "learned")
    assert isinstance(found["learned", "loss", 16], float)
    assert isinstance(found["learned", "recall", 16], float)
    for metric, x in (("loss", 32), ("loss", 64), ("recall", 64), ("loss_by_position", 64)):
        reason = found["learned", metric, x]
        assert isinstance(reason, str)
        assert "learned table" in reason
    # Within the table its loss by position is known all the same.
    assert isinstance(found["learned", "loss_by_position", 2.0], float)


def test_length_above_memory_is_refused_before_it_is_tried(
    settings: ComparisonSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = LanguageModelling(settings)
    model = frozen(task, "rope")

    def fail(tokens: Tensor) -> Tensor:
        raise AssertionError("tried")

    monkeypatch.setattr(Decoder, "forward", lambda self, tokens: fail(tokens))
    found = measured(task, model, "rope", available=0)
    reason = found["rope", "loss", 64]
    assert isinstance(reason, str)
    assert "memory" in reason


def test_training_step_above_memory_is_refused(settings: ComparisonSettings) -> None:
    task = LanguageModelling(settings)
    with pytest.raises(ArgumentError, match=r"batch: .*GB for 8 windows of 16"):
        task.require_memory(task.build("rope"), 10)
    task.require_memory(task.build("rope"), 10**12)


def test_materialised_scores_need_more_memory(settings: ComparisonSettings) -> None:
    task = LanguageModelling(replace(settings, train_length=4000, test_lengths=None, text=None))
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

    def require_position(self, position: int) -> None:
        return None

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 256)
        logits[..., needles.FIRST] = 1.0
        seen = tokens[:, -self.reach :]
        for row, window in enumerate(seen):
            for token in window[(window >= needles.FIRST) & (window < needles.FIRST + 16)]:
                logits[row, -1, token] = 2.0
        return logits


def test_recall_is_right_for_models_made_by_hand(settings: ComparisonSettings) -> None:
    task = LanguageModelling(replace(settings, references=()))
    model = frozen(task, "nope")
    far = measured(task, Finder(model, 1000), "nope")
    near = measured(task, Finder(model, 24), "nope")
    assert [far["nope", "recall", x] for x in (16, 32, 64)] == [1.0, 1.0, 1.0]
    assert near["nope", "recall", 16] == 1.0
    for x in (32, 64):
        value = near["nope", "recall", x]
        assert isinstance(value, float)
        assert abs(value - needles.CHANCE) < 0.1


def test_text_too_short_for_the_lengths(settings: ComparisonSettings) -> None:
    with pytest.raises(DataError, match=r"text: .*at length 8000.*shorter test lengths"):
        LanguageModelling(replace(settings, test_lengths=(8000,)))
    assert settings.text is not None
    settings.text.write_bytes(b"tiny")
    with pytest.raises(DataError, match="longer text"):
        LanguageModelling(settings)


def test_very_long_contexts_are_tested_on_fewer_windows(settings: ComparisonSettings) -> None:
    long = LanguageModelling(replace(settings, test_lengths=(78_000,), text=None))
    short = LanguageModelling(settings)
    tested = [
        next(m for m in task.metrics if m.key == "loss").description for task in (short, long)
    ]
    assert [text.split()[2] for text in tested] == [f"{8 * n:,}" for n in (233, 16)]


def test_t5_has_no_bucket_that_training_does_not_reach(settings: ComparisonSettings) -> None:
    for length in (8, 9, 16, 64, 256, 1024):
        task = LanguageModelling(
            replace(settings, train_length=length, test_lengths=(length,), text=None)
        )
        score = task.build("t5").encodings[0].score
        assert score is not None
        reached = score.bucket(-torch.arange(length).float().unsqueeze(-1))  # type: ignore[operator]
        assert int(reached.max()) == score.table.shape[1] - 1  # type: ignore[union-attr,index]


def test_subjects_say_why_they_are_there(settings: ComparisonSettings) -> None:
    subjects = {subject.name: subject for subject in LanguageModelling(settings).subjects}
    assert subjects["nope"].role == "control"
    assert subjects["rope|window=16"].role == "baseline"
    assert subjects["rope"].role == "candidate"
    assert "8" in subjects["t5"].note
    assert "16 positions" in subjects["learned"].note


def test_fingerprint_changes_with_what_decides_training(settings: ComparisonSettings) -> None:
    same = LanguageModelling(replace(settings, encodings=("rope",), test_lengths=(32,)))
    assert same.fingerprint == LanguageModelling(settings).fingerprint
    for change in ({"batch": 4}, {"width": 32}, {"options": {"needle_rows": 0.0}}, {"text": None}):
        other = LanguageModelling(replace(settings, **change))
        assert other.fingerprint != same.fingerprint


def test_refusals_carry_no_seed(settings: ComparisonSettings) -> None:
    task = LanguageModelling(settings)
    model = frozen(task, "learned")
    first, second = (
        [
            item
            for piece in task.measure(model, "learned", seed, available=None)
            for item in piece
            if isinstance(item, RefusedMeasurement)
        ]
        for seed in (0, 1)
    )
    assert first == second
