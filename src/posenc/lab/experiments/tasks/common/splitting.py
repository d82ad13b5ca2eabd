"""Division of examples into those to train on and those to test on at each length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

from posenc.errors import DataError
from posenc.lab.experiments.results import Corpus
from posenc.lab.experiments.sequences import drawn

MOST, FEWEST = 512, 16
"""Examples tested at a length, and how many there must be for a number to mean something."""


class NamedExample(Protocol):
    """An example of a task.

    Attributes:
        name: decides by its hash whether it is held out.
        length: in symbols or words.
    """

    @property
    def name(self) -> str: ...
    @property
    def length(self) -> int: ...


E = TypeVar("E", bound=NamedExample)


@dataclass(frozen=True)
class Split(Generic[E]):
    """Examples to train on, and to test on at each length.

    Args:
        train: of the training length at most.
        tests: length to examples, ascending; the first is the training length.
    """

    train: Sequence[E]
    tests: Mapping[int, Sequence[E]]

    @classmethod
    def of(
        cls,
        examples: Sequence[E],
        lengths: Sequence[int],
        *,
        held_out: float,
        most: int = MOST,
        unit: str = "symbols",
    ) -> Split[E]:
        """The split by the hashes of the examples' names.

        At each length but the first are tested those that are longer than the length before.

        Args:
            examples: all of them; those of one name fall into one part.
            lengths: ascending, the training length first.
            held_out: share of the short ones that is not trained on.
            most: number of examples tested at a length, at most.
            unit: of the lengths, for the error.

        Raises:
            DataError: when there is nothing to train on, or to test on at the training length.
        """
        place = {example.name: drawn(example.name) for example in examples}
        ranked = sorted(examples, key=lambda example: (place[example.name], example.name))
        short = [example for example in ranked if example.length <= lengths[0]]
        train = [example for example in short if place[example.name] >= held_out]
        tests = {lengths[0]: [e for e in short if place[e.name] < held_out][:most]}
        for before, length in pairwise(lengths):
            tests[length] = [e for e in ranked if before < e.length <= length][:most]
        if len(train) < FEWEST or len(tests[lengths[0]]) < FEWEST:
            raise DataError(
                "text",
                expected=f"at least {FEWEST} examples of at most {lengths[0]} {unit} to train on, "
                f"and {FEWEST} held out",
                got=f"{len(train)} and {len(tests[lengths[0]])}",
                remedy="Give more text, or a longer train_length.",
            )
        return cls(train, tests)

    def corpus(self, *, name: str, sha256: str, files: int, unit: str) -> Corpus:
        """The record of the data, with the numbers of examples."""
        return Corpus(
            name=name,
            sha256=sha256,
            files=files,
            train_bytes=len(self.train),
            held_out_bytes=sum(map(len, self.tests.values())),
            unit=unit,
        )
