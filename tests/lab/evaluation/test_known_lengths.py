"""``posenc evaluate`` on models whose length is known by construction.

``python -m tests.lab.evaluation.test_known_lengths 20`` repeats it with so many seeds, ``5 10``
with those from 5 to 9.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from torch import nn

from posenc.lab.evaluation.checkpoint import Checkpoint
from posenc.lab.evaluation.choosing import require_learned
from posenc.lab.evaluation.evaluate import evaluate
from posenc.lab.evaluation.results import Effective, Study
from posenc.lab.evaluation.summary import answer, headline
from posenc.lab.evaluation.texts import Text, read_ids
from tests.support.known_lengths import TRAINED, breaking, holding, unlearned, words_text

CLAIMED = 2 * TRAINED
"""Length that the config of the model that breaks may overstate."""


class Subjects(NamedTuple):
    """Models of a seed, and held-out text."""

    text: Text
    models: dict[str, nn.Module]


def subjects(seed: int, folder: Path) -> Subjects:
    text = words_text(seed, size=60_000)
    half = len(text) // 2
    path = folder / f"text-{seed}.txt"
    path.write_bytes(text[half:])
    held = holding(text[:half], seed)
    models = {"holds": held, "breaks": breaking(held), "nothing": unlearned(seed)}
    return Subjects(read_ids(path, encode=None, training=False), models)


def measured(given: Subjects, name: str, *, length: int = TRAINED, seed: int = 0) -> Study:
    checkpoint = Checkpoint(name, "decoder", given.models[name], length)
    return evaluate(checkpoint, given.text, seed=seed)


def as_known(given: Subjects, seed: int) -> dict[str, bool]:
    """Whether each answer is the known one, its interval around it."""
    studies = {name: measured(given, name, seed=seed) for name in given.models}
    studies["lies"] = measured(given, "breaks", length=CLAIMED, seed=seed)
    held, broken, lying = (studies[name].effective for name in ("holds", "breaks", "lies"))
    return {
        "holds": held is not None and held.end is None and held.length == CLAIMED and held.honest,
        "breaks": around_the_trained(broken) and broken.honest,
        "nothing": bool(studies["nothing"].gate) and studies["nothing"].effective is None,
        "lies": around_the_trained(lying) and not lying.honest,
    }


def around_the_trained(found: Effective | None) -> bool:
    return found is not None and found.end is not None and found.low <= TRAINED < found.end


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    return subjects(0, tmp_path_factory.mktemp("known"))


def test_one_that_holds_reads_all_that_was_measured(given: Subjects) -> None:
    study = measured(given, "holds")
    assert (study.effective.length, study.effective.end) == (CLAIMED, None)
    assert study.effective.honest
    assert study.rise is None
    assert study.effective.unlearned == ("recall",), "it was never taught to find needles"
    assert answer(study)[0].startswith("Effective length: at least 128 bytes, the longest measured")


def test_one_that_breaks_reads_as_far_as_it_was_trained(given: Subjects) -> None:
    study = measured(given, "breaks")
    assert study.effective.low <= TRAINED < study.effective.end <= 1.25 * TRAINED
    assert study.effective.limited_by == "loss"
    assert answer(study)[0].startswith("Effective length: 64 bytes (between ")
    assert "loss left that margin first" in answer(study)[0]


def test_nothing_is_said_of_one_that_has_learned_nothing(given: Subjects) -> None:
    study = measured(given, "nothing")
    assert study.effective is None
    assert answer(study) == [study.gate]
    with pytest.raises(Exception, match="byte frequencies alone"):
        require_learned(study)


def test_a_config_that_overstates_the_length_is_told(given: Subjects) -> None:
    study = measured(given, "breaks", length=CLAIMED)
    assert not study.effective.honest
    assert around_the_trained(study.effective)
    assert study.rise.position == TRAINED
    assert "does not read the 128 bytes that it is said to be trained at" in answer(study)[0]
    assert "before position 64" in answer(study)[0]
    assert headline(study).endswith("bytes, not the 128 that are stated")


if __name__ == "__main__":
    right: dict[str, int] = {}
    for seed in range(*map(int, sys.argv[1:])):
        with TemporaryDirectory() as folder:
            known = as_known(subjects(seed, Path(folder)), seed)
        right = {name: right.get(name, 0) + known[name] for name in known}
        print(f"seed {seed}: {known}, so far {right}", flush=True)  # noqa: T201
