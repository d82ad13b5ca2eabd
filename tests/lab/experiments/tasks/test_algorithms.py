"""The algorithmic tasks: what they draw, how they score, what they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn

from posenc.errors import ArgumentError
from posenc.lab.experiments.results import Measurement, RefusedMeasurement
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.tasks import TASKS, symbols
from posenc.lab.experiments.tasks.common.algorithm import (
    END,
    IGNORED,
    SEPARATOR,
    SYMBOLS,
    AlgorithmTask,
    RandomlyPlacedDecoder,
)
from posenc.lab.training.loop import seeded_model
from posenc.models import Decoder

ALGORITHMS = ("addition", "copy", "dyck", "parity", "recall", "reverse", "scan", "sorting")


def settings_of(task: str, **changes: object) -> ComparisonSettings:
    settings = ComparisonSettings(out=Path("out"), task=task)
    return replace(settings, width=16, layers=1, heads=2, batch=16, **changes)  # type: ignore[arg-type]


def make(task: str, **changes: object) -> AlgorithmTask:
    made = settings_of(task, **changes).entry.make(settings_of(task, **changes))
    assert isinstance(made, AlgorithmTask)
    return made


def rows(task: AlgorithmTask) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of a batch, without the padding."""
    batch = task.batch(0, 0)
    found = []
    for inputs, targets in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True):
        last = max(place for place, target in enumerate(targets) if target != IGNORED)
        found.append((inputs[: last + 1], targets[: last + 1]))
    return found


def halves(inputs: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
    """The question and its answer, which must be what is asked for, and end."""
    place = inputs.index(SEPARATOR)
    answer = [target for target in targets if target != IGNORED]
    assert answer[-1] == END
    assert targets[:place] == [IGNORED] * place
    assert inputs[place + 1 :] == answer[:-1], "each token is predicted after the right ones"
    return inputs[:place], answer[:-1]


@pytest.mark.parametrize("task", ALGORITHMS)
def test_batches_depend_on_seed_and_step_alone(task: str) -> None:
    first, again = make(task), make(task)
    batch = first.batch(3, 5)
    first.batch(3, 6)
    for name, tensor in again.batch(3, 5).items():
        assert torch.equal(batch[name], tensor), name
    for other in (first.batch(3, 6), first.batch(4, 5)):
        assert not torch.equal(batch["inputs"], other["inputs"])
    assert batch["inputs"].shape == batch["targets"].shape
    assert batch["inputs"].numel() == first.tokens_per_step


@pytest.mark.parametrize(
    ("task", "rule"),
    [("copy", list), ("reverse", lambda symbols: symbols[::-1]), ("sorting", sorted)],
)
def test_answers_are_the_symbols_in_the_asked_order(task: str, rule) -> None:  # type: ignore[no-untyped-def]
    lengths = set()
    for row in rows(make(task)):
        question, answer = halves(*row)
        assert answer == rule(question)
        assert min(question) >= SYMBOLS
        lengths.add(len(question))
    assert max(lengths) <= 16
    assert len(lengths) > 4


def test_distinct_symbols() -> None:
    options = {"symbols": 40, "distinct": True}
    for row in rows(make("copy", options=options, test_lengths=(32,))):
        question, _ = halves(*row)
        assert len(set(question)) == len(question)
    with pytest.raises(ArgumentError, match="symbols: expected at least 256, the longest test"):
        make("copy", options=options)
    with pytest.raises(ArgumentError, match="symbols: expected at least 2"):
        make("sorting", options={"symbols": 1})


@pytest.mark.parametrize("least_first", [True, False])
def test_sums_are_right(least_first: bool) -> None:
    for row in rows(make("addition", options={"least_first": least_first})):
        question, answer = halves(*row)
        plus = question.index(SYMBOLS + 10)
        numbers = []
        for digits in (question[:plus], question[plus + 1 :], answer):
            written = digits[::-1] if least_first else digits
            numbers.append(int("".join(str(digit - SYMBOLS) for digit in written)))
        assert numbers[0] + numbers[1] == numbers[2]
        assert len(answer) == plus + 1


def test_every_key_is_asked_once_for_its_value() -> None:
    for inputs, targets in rows(make("recall")):
        place = inputs.index(SEPARATOR)
        value = dict(zip(inputs[:place:2], inputs[1:place:2], strict=True))
        asked = {key: t for key, t in zip(inputs, targets, strict=True) if t != IGNORED}
        assert asked == value
        assert all(target == IGNORED for target in targets[: place + 1])
    with pytest.raises(ArgumentError, match="the pairs of the longest test"):
        make("recall", options={"keys": 50})
    with pytest.raises(ArgumentError, match="values"):
        make("recall", options={"values": 1})


def test_parity_counts_ones() -> None:
    example = symbols.random_bits(500, Random(1))
    ones = 0
    for token, target in zip(example.inputs, example.targets, strict=True):
        ones += token == symbols.ONE
        assert target == (symbols.ODD if ones % 2 else symbols.EVEN)
    assert 200 < ones < 300


def test_brackets_are_counted_at_even_places() -> None:
    example = symbols.open_brackets(20_000, Random(1))
    depth, asked, still_open = 0, 0, 0
    for place, (token, target) in enumerate(zip(example.inputs, example.targets, strict=True), 1):
        depth += 1 if token == symbols.OPENING else -1
        assert depth >= 0
        assert (target is None) == bool(place % 2)
        if target is not None:
            assert target == (symbols.OPEN if depth else symbols.CLOSED)
            asked, still_open = asked + 1, still_open + target
    assert still_open / asked == pytest.approx(symbols.OPEN_SHARE, abs=0.02)


class Knows(nn.Module):
    """Copies ``reach`` symbols right, and says END from there on."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.decoder = make("copy").build("nope").decoder

    def forward(self, tokens: Tensor, draw: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 66)
        logits[..., END] = 1.0
        for row, line in enumerate(tokens.tolist()):
            place = line.index(SEPARATOR)
            for step, symbol in enumerate(line[:place][: self.reach]):
                logits[row, place + step, symbol] = 2.0
        return logits


def measured(task: AlgorithmTask, model: nn.Module, encoding: str) -> dict[object, float | str]:
    found: dict[object, float | str] = {}
    pieces = list(task.measure(model, encoding, 0, available=None))
    assert len(pieces) == task.count(encoding)
    for piece in pieces:
        for item in piece:
            value = item.value if isinstance(item, Measurement) else item.reason
            found[item.metric, item.x] = value
    return found


def test_accuracies_of_a_model_made_by_hand() -> None:
    found = measured(make("copy"), Knows(24), "nope")
    assert found["accuracy", 24] == found["token_accuracy", 24] == 1.0
    assert found["accuracy", 32] == 0.0
    assert found["token_accuracy", 32] == pytest.approx(25 / 33)
    assert found["token_accuracy", 256] == pytest.approx(25 / 257)


@pytest.mark.parametrize("task", ALGORITHMS)
def test_tasks_are_measured_everywhere(task: str) -> None:
    made = make(task)
    shortest = replace(settings_of(task), test_lengths=settings_of(task).lengths[:2])
    made = shortest.entry.make(shortest)  # type: ignore[assignment]
    model = seeded_model(made, "t5", 0).eval()
    found = measured(made, model, "t5")
    assert {x for _, x in found} == set(shortest.lengths)
    assert {metric for metric, _ in found} == {"token_accuracy", "accuracy"}
    loss = made.loss(model, made.batch(0, 0))
    assert torch.isfinite(loss)
    loss.backward()


def test_learned_table_is_refused_past_training_but_not_when_positions_are_drawn() -> None:
    task = make("copy", test_lengths=(24,))
    found = measured(task, seeded_model(task, "learned", 0).eval(), "learned")
    assert isinstance(found["accuracy", 16], float)
    reason = found["accuracy", 24]
    assert isinstance(reason, str)
    assert "learned table" in reason
    drawn = measured(task, seeded_model(task, "learned@randomized", 0).eval(), "learned@randomized")
    assert all(isinstance(value, float) for value in drawn.values())


def test_too_little_memory_is_a_refusal() -> None:
    task = make("copy", test_lengths=(24,))
    model = task.build("rope")
    for piece in task.measure(model, "rope", 0, available=10):
        for item in piece:
            assert isinstance(item, RefusedMeasurement)
            assert "GB of memory" in item.reason
    with pytest.raises(ArgumentError, match=r"batch: .*for 16 windows of 33"):
        task.require_memory(model, 10)
    task.require_memory(model, 10**12)


def test_trained_decoder_is_left_for_others(tmp_path: Path) -> None:
    task = make("copy")
    model = task.build("shaw@max_distance=3")
    task.save(model, tmp_path)
    loaded = Decoder.load(tmp_path)
    assert loaded.config.options == {"max_distance": 3}
    tokens = torch.randint(66, (2, 9))
    assert torch.equal(loaded(tokens), model(tokens, torch.tensor(0)))


def test_positions_are_drawn_by_the_batch() -> None:
    task = make("copy")
    tokens = task.batch(0, 0)["inputs"]
    one, two = torch.tensor(1), torch.tensor(2)
    plain = seeded_model(task, "sinusoidal", 0)
    assert torch.equal(plain(tokens, one), plain(tokens, two))
    for encoding in ("sinusoidal@randomized", "sinusoidal@unsorted"):
        model = seeded_model(task, encoding, 0)
        assert isinstance(model, RandomlyPlacedDecoder)
        assert torch.equal(model(tokens, one), model(tokens, one))
        assert not torch.allclose(model(tokens, one), model(tokens, two))


def test_roles_and_notes_of_subjects() -> None:
    subjects = {subject.name: subject for subject in make("copy").subjects}
    assert subjects["sinusoidal@unsorted"].role == "control"
    assert subjects["nope"].role == "control"
    assert subjects["sinusoidal@randomized"].role == "candidate"
    assert subjects["sinusoidal@randomized"].label == "sinusoidal (randomized)"
    assert "sorted random sample" in subjects["sinusoidal@randomized"].note


def test_fingerprint_changes_with_what_decides_training() -> None:
    base = make("copy")
    assert make("copy", encodings=("rope",)).fingerprint == base.fingerprint
    for change in ({"options": {"symbols": 8}}, {"train_length": 12}, {"test_lengths": (24,)}):
        assert make("copy", **change).fingerprint != base.fingerprint


@pytest.mark.parametrize("task", list(TASKS))
def test_entries_say_what_they_are(task: str) -> None:
    entry = TASKS[task]
    for text in (entry.summary, entry.data, entry.metric, entry.expectation, entry.length_unit):
        assert text
    assert "20" in entry.expectation, "no year of a source"
    settings = ComparisonSettings(out=Path("out"), task=task)
    assert settings.lengths[0] == settings.train_length == entry.defaults.train_length
    assert settings.options == dict(entry.options)
