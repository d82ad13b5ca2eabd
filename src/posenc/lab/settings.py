"""Everything that decides what a comparison does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from posenc.errors import ArgumentError, CheckpointError, PosencError
from posenc.lab.subjects import Variant, require_encoding

__all__ = ["PRECISIONS", "Settings"]

PRECISIONS = ("32-true", "bf16-mixed")

DEFAULT_STEPS = 600
DEFAULT_WIDTH = 64
DEFAULT_RATE = 1e-2

LARGEST_SEED = 2**31 - 1

NOT_ABOUT_RESULTS = frozenset({"out", "existing", "workers", "budget_minutes"})
"""Fields that may differ between a comparison and its continuation."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One comparison: which encodings, on what, how large, where to.

    The defaults train each encoding three times, for about 15 s each on one core.

    Args:
        out: output folder.
        existing: what to do if ``out`` already has something in it: ``"refuse"``; ``"resume"`` a
            comparison of the same settings; or ``"replace"`` a comparison by a new one.
        task: key of the task (``posenc.lab.tasks.TASKS``).
        text: a file or folder of text; None: the standard library's source.
        encodings: what to compare; names of the registry, joined by ``+`` where wanted.
        references: subjects to judge them by, added unless they are among the encodings: the
            control ``nope``, and ``rope|window``, the RoPE model with attention cut to the
            training length. RoPE is trained for it even if it is not compared. () for none.
        train_length: tokens a training window.
        test_lengths: context lengths to test at; 1, 2, 4 and 8 times ``train_length`` by default.
        steps: training steps; 600 by default. Not with ``budget_minutes``.
        budget_minutes: choose the steps so that the whole takes about this long, by a
            measurement before training.
        seeds: one run an encoding and seed; a seed decides initial weights and data order, both
            the same for all encodings.
        width, layers, heads: of the model.
        batch: windows a step.
        learning_rate: peak, reached after a twentieth of the steps, then a cosine to a twentieth;
            0.01 by default, less in proportion for models wider than 64.
        needle_rows: share of training windows with a needle to remember, so that recall can be
            measured; 0 trains on plain text and measures none.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``.
        precision: one of ``PRECISIONS``.
        workers: processes at a time; one a core on the CPU by default, else one.
        threads: CPU threads a process. Small models gain nothing from a second.

    Raises:
        ArgumentError: on a value out of its domain, each with what was expected.
        UnknownNameError: on an encoding that does not exist.
    """

    out: Path
    existing: Literal["refuse", "resume", "replace"] = "refuse"
    task: str = "language"
    text: Path | None = None
    encodings: Sequence[str] = ("rope", "alibi", "t5", "sinusoidal", "learned", "nope")
    references: Sequence[str] = ("nope", "rope|window")
    train_length: int = 64
    test_lengths: Sequence[int] | None = None
    steps: int | None = None
    budget_minutes: float | None = None
    seeds: Sequence[int] = (0, 1, 2)
    width: int = DEFAULT_WIDTH
    layers: int = 2
    heads: int = 4
    batch: int = 32
    learning_rate: float | None = None
    needle_rows: float = 0.25
    device: str = "cpu"
    precision: str = "32-true"
    workers: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))
        if self.text is not None:
            object.__setattr__(self, "text", Path(self.text))
        for name in ("encodings", "references", "seeds"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        if self.existing not in ("refuse", "resume", "replace"):
            _refuse("existing", "'refuse', 'resume' or 'replace'", self.existing, "Choose one.")
        _least("train_length", self.train_length, 8)
        for name in ("width", "layers", "heads", "batch", "threads"):
            _least(name, getattr(self, name), 1)
        for name in ("steps", "workers"):
            if getattr(self, name) is not None:
                _least(name, getattr(self, name), 1)
        if self.width % self.heads:
            _refuse("width", f"a multiple of heads ({self.heads})", self.width, "Change either.")
        self._check_names()
        self._check_seeds()
        self._check_lengths()
        self._check_rates()
        self._check_device()

    def _check_names(self) -> None:
        if not self.encodings:
            _refuse("encodings", "at least one name", "none", "See posenc.ENCODINGS.")
        for name in self.encodings:
            require_encoding(name)
        names = [variant.name for variant in self._references()]
        for kind, listed in (("encodings", self.encodings), ("references", names)):
            if len(set(listed)) < len(listed):
                _refuse(kind, "each name once", ", ".join(listed), "Drop the repeated ones.")

    def _check_seeds(self) -> None:
        if not self.seeds:
            _refuse("seeds", "at least one", "none", "Three give an interval.")
        for seed in self.seeds:
            _least("seeds", seed, 0)
            if seed > LARGEST_SEED:
                _refuse("seeds", f"at most {LARGEST_SEED}", seed, "Take a smaller one.")
        if len(set(self.seeds)) < len(self.seeds):
            _refuse("seeds", "each once", self.seeds, "Equal seeds would give equal runs.")

    def _check_lengths(self) -> None:
        given = (1, 2, 4, 8) if self.test_lengths is None else _tuple("tests", self.test_lengths)
        if self.test_lengths is None:
            given = tuple(factor * self.train_length for factor in given)
        for length in given:
            _least("test_lengths", length, self.train_length)
        lengths = tuple(sorted({self.train_length, *given}))
        object.__setattr__(self, "test_lengths", lengths)

    def _check_rates(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            _refuse("learning_rate", "a positive number", self.learning_rate, "Try 0.01.")
        if not 0 <= self.needle_rows <= 1:
            _refuse("needle_rows", "a share from 0 to 1", self.needle_rows, "Try 0.25.")
        if self.budget_minutes is None:
            return
        if not (math.isfinite(self.budget_minutes) and self.budget_minutes > 0):
            _refuse("budget_minutes", "a positive number", self.budget_minutes, "Try 5.")
        if self.steps is not None:
            _refuse("steps", "steps or budget_minutes", "both", "Leave one out.")

    def _check_device(self) -> None:
        if self.precision not in PRECISIONS:
            _refuse("precision", " or ".join(PRECISIONS), self.precision, "Choose one.")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            _refuse("device", "cpu, cuda, cuda:N or mps", self.device, "Choose one.")
        if device.type not in ("cpu", "cuda", "mps"):
            _refuse("device", "cpu, cuda, cuda:N or mps", self.device, "Choose one.")
        present = {
            "cpu": 1,
            "cuda": torch.cuda.device_count(),
            "mps": int(torch.backends.mps.is_available()),
        }[device.type]
        if (device.index or 0) >= present:
            _refuse("device", "one that this machine has", self.device, "Use cpu.")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Context lengths to test at, ascending; the first is the training length."""
        assert isinstance(self.test_lengths, tuple)  # __post_init__ made it one
        return self.test_lengths

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All that is measured: the encodings, then the references not among them."""
        variants = [Variant(name) for name in self.encodings]
        return (*variants, *(v for v in self._references() if v not in variants))

    @property
    def trained(self) -> tuple[str, ...]:
        """Encodings that a model is trained with."""
        return tuple(dict.fromkeys(variant.encoding for variant in self.variants))

    @property
    def rate(self) -> float:
        """Peak learning rate."""
        if self.learning_rate is not None:
            return self.learning_rate
        return DEFAULT_RATE * min(1.0, DEFAULT_WIDTH / self.width)

    @property
    def planned_steps(self) -> int:
        """Training steps unless a budget decides otherwise."""
        return DEFAULT_STEPS if self.steps is None else self.steps

    def _references(self) -> list[Variant]:
        return [Variant.parse(name, window=self.train_length) for name in self.references]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        plain = asdict(self)
        for name, value in plain.items():
            if isinstance(value, Path):
                plain[name] = str(value)
            elif isinstance(value, tuple):
                plain[name] = list(value)
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Settings:
        """Settings from ``to_json``'s values.

        Raises:
            CheckpointError: when fields are missing or unknown, or a value is out of its domain.
        """
        known = {field.name for field in fields(cls)}
        if set(plain) != known:
            raise CheckpointError(
                "settings",
                expected=f"the fields {', '.join(sorted(known))}",
                got=", ".join(sorted(plain)) or "none",
                remedy="They come from another version of posenc: compare anew.",
            )
        try:
            return cls(**plain)
        except (PosencError, TypeError) as error:
            raise CheckpointError(
                "settings", expected="valid values", got=error, remedy="Compare anew."
            ) from error

    def differences(self, other: Settings) -> list[str]:
        """Names of the fields that decide results and differ."""
        mine, others = self.to_json(), other.to_json()
        names = set(mine) - NOT_ABOUT_RESULTS - {"steps"}
        different = {name for name in names if mine[name] != others[name]}
        if self.steps is not None and other.steps is not None and self.steps != other.steps:
            different.add("steps")
        return sorted(different)


def _tuple(name: str, value: Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(value, str | int):
        _refuse(name, "a sequence", repr(value), f"Write ({value!r},).")
    return tuple(value)


def _least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        _refuse(name, f"a whole number, {least} or more", value, "Change it.")


def _refuse(name: str, expected: str, got: object, remedy: str) -> NoReturn:
    raise ArgumentError(name, expected=expected, got=got, remedy=remedy)
