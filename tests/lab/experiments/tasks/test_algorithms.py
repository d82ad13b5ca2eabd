"""The algorithmic tasks: what they draw, how they score, what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn

from posenc.errors import ArgumentError
from posenc.lab.experiments.tasks import symbols
from posenc.lab.experiments.tasks.common import algorithm
from posenc.lab.experiments.tasks.scan import commands, meaning, split
from posenc.lab.training.loop import seeded_model
from posenc.models import Decoder
from tests.lab.experiments.tasks import small
from tests.lab.experiments.tasks.small import measured

PUBLISHED = Path(__file__).parents[5] / "shared" / "data" / "scan"


def make(task: str, **changes: object) -> algorithm.AlgorithmTask:
    return small.make(task, Path(), **{"batch": 16, **changes})


def rows(task: algorithm.AlgorithmTask) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of a batch, without the padding."""
    batch = task.batch(0, 0)
    assert batch["inputs"].shape == batch["targets"].shape
    assert batch["inputs"].numel() == task.tokens_per_step
    found = []
    for inputs, targets in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True):
        last = max(place for place, target in enumerate(targets) if target != algorithm.IGNORED)
        found.append((inputs[: last + 1], targets[: last + 1]))
    return found


def halves(inputs: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
    """The question and its answer, which must be what is asked for, and end."""
    place = inputs.index(algorithm.SEPARATOR)
    answer = [target for target in targets if target != algorithm.IGNORED]
    assert answer[-1] == algorithm.END
    assert targets[:place] == [algorithm.IGNORED] * place
    assert inputs[place + 1 :] == answer[:-1], "each token is predicted after the right ones"
    return inputs[:place], answer[:-1]


@pytest.mark.parametrize(
    ("task", "rule"),
    [("copy", list), ("reverse", lambda symbols: symbols[::-1]), ("sorting", sorted)],
)
def test_answers_are_the_symbols_in_the_asked_order(
    task: str, rule: Callable[[list[int]], list[int]]
) -> None:
    lengths = set()
    for row in rows(make(task)):
        question, answer = halves(*row)
        assert answer == rule(question)
        assert min(question) >= algorithm.SYMBOLS
        lengths.add(len(question))
    assert max(lengths) <= 16
    assert len(lengths) > 4


@pytest.mark.parametrize("least_first", [True, False])
def test_sums_are_right(least_first: bool) -> None:
    for row in rows(make("addition", options={"least_first": least_first})):
        question, answer = halves(*row)
        plus = question.index(algorithm.SYMBOLS + 10)
        numbers = []
        for digits in (question[:plus], question[plus + 1 :], answer):
            written = digits[::-1] if least_first else digits
            numbers.append(int("".join(str(digit - algorithm.SYMBOLS) for digit in written)))
        assert numbers[0] + numbers[1] == numbers[2]
        assert len(answer) == plus + 1


def test_every_key_is_asked_once_for_its_value() -> None:
    for inputs, targets in rows(make("recall")):
        place = inputs.index(algorithm.SEPARATOR)
        value = dict(zip(inputs[:place:2], inputs[1:place:2], strict=True))
        asked = {key: t for key, t in zip(inputs, targets, strict=True) if t != algorithm.IGNORED}
        assert asked == value
        assert all(target == algorithm.IGNORED for target in targets[: place + 1])


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


def test_distinct_symbols() -> None:
    for row in rows(make("copy", options={"symbols": 40, "distinct": True}, test_lengths=(32,))):
        question, _ = halves(*row)
        assert len(set(question)) == len(question)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("copy", {"options": {"symbols": 40, "distinct": True}}, "at least 256, the longest test"),
        ("sorting", {"options": {"symbols": 1}}, "symbols: expected at least 2"),
        ("recall", {"options": {"keys": 50}}, "the pairs of the longest test"),
        ("recall", {"options": {"values": 1}}, "values"),
        ("scan", {"train_length": 20}, "22, where SCAN is split"),
        ("scan", {"test_lengths": (29,)}, "numbers of actions that commands have: 22, 24"),
    ],
)
def test_options_and_lengths_that_a_task_does_not_have(
    task: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        make(task, **changes)


class Knows(nn.Module):
    """Copies ``reach`` symbols right, and says END from there on."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.decoder = make("copy").build("nope").decoder

    def forward(self, tokens: Tensor, draw: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 66)
        logits[..., algorithm.END] = 1.0
        for row, line in enumerate(tokens.tolist()):
            place = line.index(algorithm.SEPARATOR)
            for step, symbol in enumerate(line[:place][: self.reach]):
                logits[row, place + step, symbol] = 2.0
        return logits


def test_accuracies_of_a_model_made_by_hand() -> None:
    found = measured(make("copy"), "nope", Knows(24))
    assert found["accuracy", 24] == found["token_accuracy", 24] == 1.0
    assert found["accuracy", 32] == 0.0
    assert found["token_accuracy", 32] == pytest.approx(25 / 33)
    assert found["token_accuracy", 256] == pytest.approx(25 / 257)


def test_trained_decoder_is_left_for_others(tmp_path: Path) -> None:
    task = make("copy")
    model = task.build("shaw@max_distance=3")
    task.save(model, tmp_path)
    loaded = Decoder.load(tmp_path)
    assert loaded.config.options == {"max_distance": 3}
    tokens = torch.randint(66, (2, 9))
    assert torch.equal(loaded(tokens), model(tokens, torch.tensor(0)))


def test_positions_are_drawn_by_the_batch() -> None:
    """A learned table then has room for longer sequences."""
    task = make("copy", test_lengths=(24,))
    tokens = task.batch(0, 0)["inputs"]
    one, two = torch.tensor(1), torch.tensor(2)
    plain = seeded_model(task, "sinusoidal", 0)
    assert torch.equal(plain(tokens, one), plain(tokens, two))
    for encoding in ("sinusoidal@randomized", "sinusoidal@unsorted"):
        model = seeded_model(task, encoding, 0)
        assert torch.equal(model(tokens, one), model(tokens, one))
        assert not torch.allclose(model(tokens, one), model(tokens, two))
    drawn = measured(task, "learned@randomized")
    assert all(isinstance(value, float) for value in drawn.values())


def test_positions_that_are_drawn() -> None:
    def positions(length: int, kind: str, seed: int, max_length: int = 100) -> Tensor:
        return algorithm.random_layout(
            length, kind, max_length=max_length, seed=seed
        ).positions.flatten()

    assert positions(5, "plain", 3, 9).tolist() == [0, 1, 2, 3, 4]
    drawn = positions(20, "randomized", 3)
    assert (drawn.diff() > 0).all()
    assert 40 < drawn.max() < 100
    assert not torch.equal(drawn, positions(20, "randomized", 4))
    unsorted = positions(20, "unsorted", 3)
    assert not (unsorted.diff() > 0).all()
    assert len(unsorted.unique()) == 20
    assert (algorithm.random_layout(20, "unsorted", max_length=100, seed=3).order.diff() > 0).all()
    assert positions(9, "randomized", 0, 4).tolist() == list(range(9)), "more tokens than reach"


def test_roles_and_notes_of_subjects() -> None:
    subjects = {subject.name: subject for subject in make("copy").subjects}
    assert subjects["sinusoidal@unsorted"].role == subjects["nope"].role == "control"
    drawn = subjects["sinusoidal@randomized"]
    assert (drawn.role, drawn.label) == ("candidate", "sinusoidal (randomized)")
    assert "sorted random sample" in drawn.note


@pytest.mark.parametrize(
    ("command", "actions"),
    [
        ("jump", "I_JUMP"),
        ("turn left", "I_TURN_LEFT"),
        ("jump left", "I_TURN_LEFT I_JUMP"),
        ("jump opposite left", "I_TURN_LEFT I_TURN_LEFT I_JUMP"),
        ("turn opposite right", "I_TURN_RIGHT I_TURN_RIGHT"),
        ("turn around right", "I_TURN_RIGHT I_TURN_RIGHT I_TURN_RIGHT I_TURN_RIGHT"),
        ("walk around left", "I_TURN_LEFT I_WALK " * 4),
        ("run right twice", "I_TURN_RIGHT I_RUN I_TURN_RIGHT I_RUN"),
        ("look and walk thrice", "I_LOOK I_WALK I_WALK I_WALK"),
        ("look after walk twice", "I_WALK I_WALK I_LOOK"),
    ],
)
def test_meanings_of_scan_by_hand(command: str, actions: str) -> None:
    """The paper's examples among them."""
    assert meaning(command) == actions.split()


def test_split_of_scan_has_the_published_sizes() -> None:
    trained, held_out = split()
    assert (len(trained), len(held_out)) == (16_990, 3_920)
    assert len(commands()) == len(set(commands())) == 20_910
    assert max(map(len, trained.values())) == 22
    assert min(map(len, held_out.values())) == 24
    assert max(map(len, held_out.values())) == 48


@pytest.mark.parametrize(("part", "name"), [(0, "train"), (1, "test")])
def test_split_of_scan_is_the_published_one_line_for_line(part: int, name: str) -> None:
    file = PUBLISHED / f"tasks_{name}_length.txt"
    if not file.exists():
        pytest.skip("needs the published SCAN files, which are not shipped")
    lines = file.read_text().splitlines()
    ours = {f"IN: {command} OUT: {' '.join(told)}" for command, told in split()[part].items()}
    assert len(lines) == len(ours)
    assert set(lines) == ours
