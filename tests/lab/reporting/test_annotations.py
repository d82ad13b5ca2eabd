"""Names beside lines: as near to their ends as they can be without covering one another."""

from __future__ import annotations

import itertools
import random

import pytest

from posenc.lab.reporting.annotations import LONGEST, broken, distinct, spaced


def test_what_is_far_apart_stays() -> None:
    assert spaced([30.0, 10.0, 20.0], 10.0, 0.0, 100.0) == [30.0, 10.0, 20.0]
    assert spaced([], 10.0, 0.0, 1.0) == []
    assert spaced([7.0], 10.0, 0.0, 1.0) == [1.0]


def test_what_is_close_moves_around_its_middle() -> None:
    assert spaced([50.0, 50.0, 50.0], 10.0, 0.0, 100.0) == [40.0, 50.0, 60.0]
    assert spaced([0.0, 0.0], 10.0, 0.0, 100.0) == [0.0, 10.0]
    assert spaced([98.0, 99.0], 10.0, 0.0, 100.0) == [90.0, 100.0]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("self_extend", ["self_extend"]),
        ("yarn × 4, full_attention", ["yarn × 4,", "full_attention"]),
        ("window 512 (10 layers)", ["window 512", "(10 layers)"]),
        ("self_extend:group=8,window=512", ["self_extend:", "group=8,window=5…"]),
        ("a_name_without_any_place", ["a_name_without_a…"]),
    ],
)
def test_long_names_are_broken_in_two(name: str, lines: list[str]) -> None:
    assert broken(name).split("\n") == lines
    assert max(map(len, lines)) <= LONGEST
    assert "\n" not in broken(name, lines=1)


GROUP = "self_extend:group="


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["yarn", "self_extend:group=8"], ["yarn", "self_extend:grou…"]),
        ([f"{GROUP}8", f"{GROUP}16"], ["self_extend:gro…8", "self_extend:gr…16"]),
        ([f"{GROUP}{n},window=512" for n in "84"], ["self_…8,window=5…", "self_…4,window=5…"]),
        (
            [f"long_rope:search={n},temperature=1.{n}5" for n in (2, 3)] + ["long_rope:search=2"],
            ["long_…2,temperat…", "long_…3,temperat…", "long_rope:searc…2"],
        ),
        (
            [f"transformers 5{end}" for end in (" layer one two", " layer one ten", ", b")],
            ["transformers …two", "transformers …ten", "transformers 5, b"],
        ),
    ],
)
def test_names_of_many_lines_differ(names: list[str], shown: list[str]) -> None:
    found = distinct(names, lines=1)
    assert len(set(found.values())) == len(names)
    assert max(map(len, found.values())) <= LONGEST
    assert list(found.values()) == shown


@pytest.mark.parametrize("seed", range(50))
def test_names_of_any_kind_differ(seed: int) -> None:
    source = random.Random(seed)
    words = ["self_extend", "yarn", "group=8", "group=16", "window=512", "temperature=1.25", "a"]
    names = {":".join(source.choices(words, k=source.randint(1, 6))) for _ in range(20)}
    for lines in (1, 2):
        found = distinct(sorted(names), lines=lines)
        assert len(set(found.values())) == len(names)
        assert max(len(line) for text in found.values() for line in text.split("\n")) <= LONGEST


@pytest.mark.parametrize("seed", range(50))
def test_names_keep_order_distance_and_range(seed: int) -> None:
    source = random.Random(seed)
    low, high = -3.0, 5.0
    wanted = [source.uniform(low, high) for _ in range(source.randint(2, 30))]
    gap = source.uniform(0.05, 0.6)
    placed = spaced(wanted, gap, low, high)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    ascending = [placed[n] for n in order]
    least = min(gap, (high - low) / (len(wanted) - 1))
    steps = [b - a for a, b in itertools.pairwise(ascending)]
    assert min(steps) >= least - 1e-9
    assert low - 1e-9 <= ascending[0] <= ascending[-1] <= high + 1e-9
