"""Progress of a study: callbacks, and files that keep measurements across interruptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from posenc.errors import CheckpointError, Interrupted
from posenc.lab.codec import from_plain, to_plain
from posenc.lab.evaluation.results import Findings, StudyReading
from posenc.lab.evaluation.suites.contexts import MeasuredContext
from posenc.lab.training.seeding import fingerprint
from posenc.storage import make_folder, read_json, write_json

Progress = Callable[[str, float, int], None]
"""Called with the current stage, how many models are done, and the number of all."""

PLANNED = "planned: "
"""Beginning of a stage that says what will be done; it stays to be read."""

REMEDY = "Delete it, and all is measured again."

SAME = 1e-3
"""Relative tolerance of a loss that is measured again, on any machine."""

Factors = tuple[float, ...]
"""Divisors of a rope's pairs."""


def silent(stage: str, done: float, total: int) -> None:
    """Report nothing."""


@contextmanager
def kept(state: Path, command: str = "") -> Iterator[None]:
    """Add to an ``Interrupted`` where the work is kept and how to continue.

    After another error the file is removed, unless it is of an earlier run.
    """
    earlier = state.exists()
    try:
        yield
    except Interrupted as error:
        again = command or "call it again with the same arguments."
        error.remedy = f"What was done is kept in {state}. To go on: {again}"
        raise
    except Exception:
        if not earlier:
            state.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Measured:
    """The measured fields of ``Findings``."""

    untuned: StudyReading | None
    tuned: StudyReading | None
    failed: str


@dataclass(frozen=True)
class MeasuredState:
    """Contents of a ``MeasuredFile``: readings and contexts by candidate, and their conditions."""

    conditions: str
    readings: Mapping[str, Measured] = field(default_factory=dict)
    contexts: Mapping[str, tuple[MeasuredContext, ...]] = field(default_factory=dict)


class MeasuredFile:
    """The readings of a study's candidates, in a JSON file.

    Args:
        path: of the file; None keeps nothing.
        weights: of the model before it is extended.
        conditions: all else that readings depend on; readings under others are discarded.

    Raises:
        CheckpointError: if the file is damaged.
    """

    def __init__(self, path: Path | None, weights: Iterable[Tensor], *conditions: object) -> None:
        self.path, self._state = path, MeasuredState("")
        if path is None:
            return
        sums = [float(weight.detach().double().sum()) for weight in weights]
        self._state = MeasuredState(fingerprint(sums, *conditions))
        if not path.exists():
            return
        plain = read_json(path, remedy=REMEDY)
        if not isinstance(plain, dict) or plain.get("conditions") != self._state.conditions:
            return
        try:
            self._state = from_plain(MeasuredState, plain)
        except TypeError as error:
            raise CheckpointError(
                str(path), expected="the readings of a study", got=error, remedy=REMEDY
            ) from error

    def get(self, key: str) -> Measured | None:
        """The readings of a candidate; None if it has not been measured."""
        return self._state.readings.get(key)

    def untuned(self, key: str) -> StudyReading | None:
        """The reading of a candidate before fine-tuning."""
        recorded = self.get(key)
        return None if recorded is None else recorded.untuned

    def add(self, findings: Findings) -> None:
        """Keep the readings of a candidate."""
        if self.path is None or findings.untuned is None:
            return
        measured = Measured(findings.untuned, findings.tuned, findings.failed)
        readings = {**self._state.readings, findings.key: measured}
        self._write(replace(self._state, readings=readings))

    @property
    def contexts(self) -> Mapping[str, Sequence[MeasuredContext]]:
        """The contexts that candidates have read, by key."""
        return self._state.contexts

    def add_contexts(self, key: str, contexts: Sequence[MeasuredContext]) -> None:
        """Keep the contexts that a candidate has read."""
        if self.path is not None:
            kept = {**self._state.contexts, key: tuple(contexts)}
            self._write(replace(self._state, contexts=kept))

    def _write(self, state: MeasuredState) -> None:
        assert self.path is not None  # else nothing is kept
        self._state = state
        make_folder(self.path.parent)
        write_json(self.path, to_plain(state))


class StoredLosses:
    """Losses by factors, in a JSON file from which an interrupted search goes on.

    Args:
        path: of the file.
        measure: the loss of factors.
        conditions: of the search, by name.

    Raises:
        CheckpointError: if the file is damaged, or of another search, model or text, whose first
            loss is another.
    """

    def __init__(
        self, path: Path, measure: Callable[[Factors], float], **conditions: float
    ) -> None:
        self.path, self.measure, self.conditions = path, measure, conditions
        self.losses: dict[Factors, float] = {}
        if path.exists():
            self._read()
        self.stored = len(self.losses)

    def __call__(self, factors: Factors) -> float:
        if factors not in self.losses:
            self.losses[factors] = self._measured(factors)
            known = [None if math.isinf(loss) else loss for loss in self.losses.values()]
            make_folder(self.path.parent)
            plain = self.conditions | {"factors": list(self.losses), "losses": known}
            write_json(self.path, plain)
        return self.losses[factors]

    def _measured(self, factors: Factors) -> float:
        loss = float(self.measure(factors))
        return loss if math.isfinite(loss) else math.inf

    def _read(self) -> None:
        plain = read_json(self.path, expected="the losses of a search", remedy=REMEDY)
        try:
            losses = [math.inf if loss is None else float(loss) for loss in plain["losses"]]
            factors = [tuple(map(float, each)) for each in plain["factors"]]
            self.losses = dict(zip(factors, losses, strict=True))
            same = self.conditions == {name: plain[name] for name in self.conditions}
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise CheckpointError(
                str(self.path), expected="the losses of a search", got=error, remedy=REMEDY
            ) from error
        first = next(iter(self.losses.items()), None)
        if not same or (
            first is not None and not math.isclose(self._measured(first[0]), first[1], rel_tol=SAME)
        ):
            raise CheckpointError(
                str(self.path),
                expected="a search of the same factor on the same model and text",
                got="another",
                remedy=REMEDY,
            )
