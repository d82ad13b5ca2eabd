"""SCAN's grammar against the published split, and against the paper's examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from posenc.errors import ArgumentError
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.tasks.scan import commands, meaning, split

PUBLISHED = Path(__file__).parents[5] / "shared" / "data" / "scan"


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
def test_meanings_by_hand(command: str, actions: str) -> None:
    assert meaning(command) == actions.split()


def test_split_has_the_published_sizes() -> None:
    trained, held_out = split()
    assert (len(trained), len(held_out)) == (16_990, 3_920)
    assert len(commands()) == len(set(commands())) == 20_910
    assert max(map(len, trained.values())) == 22
    assert min(map(len, held_out.values())) == 24
    assert max(map(len, held_out.values())) == 48


@pytest.mark.parametrize(("part", "name"), [(0, "train"), (1, "test")])
def test_split_is_the_published_one_line_for_line(part: int, name: str) -> None:
    file = PUBLISHED / f"tasks_{name}_length.txt"
    if not file.exists():
        pytest.skip("needs the published SCAN files, which are not shipped")
    lines = file.read_text().splitlines()
    ours = {f"IN: {command} OUT: {' '.join(told)}" for command, told in split()[part].items()}
    assert len(lines) == len(ours)
    assert set(lines) == ours


def test_lengths_that_scan_does_not_have() -> None:
    for fields, message in (
        ({"train_length": 20}, "22, where SCAN is split"),
        ({"test_lengths": (29,)}, "numbers of actions that commands have: 22, 24"),
    ):
        settings = ComparisonSettings(out=Path("out"), task="scan", **fields)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=message):
            settings.entry.make(settings)
