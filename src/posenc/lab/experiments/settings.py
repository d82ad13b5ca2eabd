"""Settings of a comparison, and their record in its output folder, new or resumed."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Annotated, Any, NoReturn

from filelock import FileLock, Timeout

from posenc.arguments import EXACT, Interval, check, check_fields
from posenc.errors import (
    ArgumentError,
    CheckpointError,
    DataError,
    Interrupted,
    OutputError,
    UnknownNameError,
)
from posenc.lab.codec import restore, to_plain
from posenc.lab.experiments import OF_TASK
from posenc.lab.experiments.recipe import Recipe, Variant
from posenc.lab.experiments.tasks import TASKS, TaskEntry
from posenc.lab.experiments.tasks.common.task import TaskSettings
from posenc.lab.training.machine import require_device
from posenc.storage import make_folder, read_json, unwritable, write_json

TAKEN = ("encodings", "references", "train_length", "width", "layers", "heads", "batch")

NOT_ABOUT_RESULTS = frozenset({"out", "existing", "workers", "minutes"})
"""Fields that may differ between a comparison and its continuation."""


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(TaskSettings):
    """Settings of a comparison.

    The defaults are the task's (``TaskEntry.defaults``), which trains each encoding three times in
    about a minute on two cores.

    Args:
        out: output folder.
        existing: if ``out`` holds something: ``"refuse"``; ``"resume"`` a comparison of the same
            settings; or ``"replace"`` one.
        task: key of the task (``posenc.lab.experiments.tasks.TASKS``).
        options: the task's own options; see ``posenc tasks``.
        text: a file or folder of text, for tasks that read one; None: the task's own data.
        encodings: the candidates, as ``Recipe.parse`` reads them (``t5+sinusoidal``,
            ``sinusoidal@randomized``).
        references: baselines and controls, added unless they are among the encodings: ``nope``, or
            ``rope|window``, the RoPE model with attention cut to the training length.
        train_length: tokens of a training window, or whatever the task counts.
        test_lengths: test lengths; multiples of ``train_length`` by default.
        steps: training steps. Not with ``minutes``.
        minutes: limit of the whole time. The steps are chosen to fit it, by a measurement
            before training; what is not finished when it ends is saved.
        seeds: one run per encoding and seed; a seed decides initial weights and data order.
        width, layers, heads: of the model.
        batch: windows per step.
        learning_rate: peak, reached after a twentieth of the steps, then a cosine to a twentieth;
            by default the task's, less in proportion for models wider than its default.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``.
        precision: as Lightning Fabric reads it.
        workers: parallel processes; one per core on the CPU by default, else one.
        threads: CPU threads per process.

    Raises:
        ArgumentError: for a value out of its domain.
        UnknownNameError: for an unknown task, option or encoding.
    """

    def __post_init__(self) -> None:
        TASKS.require(self.task)
        for name in TAKEN:
            if getattr(self, name) is OF_TASK:
                object.__setattr__(self, name, getattr(self.entry.defaults, name))
        object.__setattr__(self, "out", Path(self.out))
        if self.text is not None:
            object.__setattr__(self, "text", Path(self.text))
        check_fields(self)
        if self.width % self.heads:
            _refuse("width", f"a multiple of heads ({self.heads})", self.width, "Change either.")
        if self.minutes is not None and self.steps is not None:
            _refuse("steps", "steps or minutes", "both", "Leave one out.")
        self._check_task()
        self._check_names()
        self._fill_lengths()
        require_device(self.device)

    def _check_task(self) -> None:
        if self.text is not None and not self.entry.reads_text:
            _refuse("text", f"none: {self.task} has its own data", self.text, "Leave it out.")
        for key, value in self.options.items():
            if key not in self.entry.options:
                raise UnknownNameError.of(f"option of {self.task}", key, self.entry.options)
            kind = type(self.entry.options[key])
            if type(value) is not kind and not (kind is float and type(value) is int):
                _refuse(key, f"a value of type {kind.__name__}", repr(value), "Change it.")
        object.__setattr__(self, "options", {**self.entry.options, **self.options})

    def _check_names(self) -> None:
        if not self.encodings:
            _refuse("encodings", "at least one name", "none", "posenc list shows all.")
        for name in self.encodings:
            Recipe.parse(name, axes=self.entry.axes)
        names = [variant.name for variant in self._references()]
        windows = [name for name in names if "|" in name and not self.entry.windows]
        if windows:
            _refuse("references", f"no window: {self.task} has none", windows[0], "Drop it.")
        for kind, listed in (("encodings", self.encodings), ("references", names)):
            if len(set(listed)) < len(listed):
                _refuse(kind, "each name once", ", ".join(listed), "Drop the repeated ones.")
        if not self.seeds:
            _refuse("seeds", "at least one", "none", "Three give an interval.")
        if len(set(self.seeds)) < len(self.seeds):
            _refuse("seeds", "each once", self.seeds, "Equal seeds would give equal runs.")

    def _fill_lengths(self) -> None:
        if self.test_lengths is None:
            lengths = tuple(self.entry.defaults.test_lengths(self.train_length))
        else:
            longer = Sequence[Annotated[int, Interval(self.train_length, EXACT)]]
            lengths = check("test_lengths", longer, self.test_lengths, None)
        ascending = tuple(sorted({self.train_length, *lengths}))
        object.__setattr__(self, "test_lengths", ascending)

    @property
    def entry(self) -> TaskEntry:
        """The task, as it is listed."""
        return TASKS.require(self.task)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """See ``TaskSettings``."""
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
        defaults = self.entry.defaults
        return defaults.learning_rate * min(1.0, defaults.width / self.width)

    @property
    def planned_steps(self) -> int:
        """Training steps unless a budget decides otherwise."""
        return self.entry.defaults.steps if self.steps is None else self.steps

    def _references(self) -> list[Variant]:
        window, axes = self.train_length, self.entry.axes
        return [Variant.parse(name, window=window, axes=axes) for name in self.references]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return to_plain(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ComparisonSettings:
        """Settings from ``to_json``'s values.

        Raises:
            CheckpointError: when fields are missing or unknown, or a value is out of its domain.
        """
        names = {known_field.name for known_field in fields(cls)}
        if not isinstance(plain, Mapping) or set(plain) != names:
            got = sorted(plain) if isinstance(plain, Mapping) else [type(plain).__name__]
            raise CheckpointError(
                "settings",
                expected=f"the fields {', '.join(sorted(names))}",
                got=", ".join(got) or "none",
                remedy="They come from another version of posenc: compare anew.",
            )
        return restore(cls, plain, "settings", expected="valid values", remedy="Compare anew.")

    def differences(self, other: ComparisonSettings) -> list[str]:
        """Names of the fields that decide results and differ."""
        mine, others = self.to_json(), other.to_json()
        names = set(mine) - NOT_ABOUT_RESULTS - {"steps"}
        different = {name for name in names if mine[name] != others[name]}
        if self.steps is not None and other.steps is not None and self.steps != other.steps:
            different.add("steps")
        return sorted(different)


def _refuse(name: str, expected: str, got: object, remedy: str) -> NoReturn:
    raise ArgumentError(name, expected=expected, got=got, remedy=remedy)


KIND = "posenc comparison"
RECORD = "settings.json"
RUNS = "runs"

LOCK = ".lock"
"""File of the folder that a call locks while it is at work there."""


def stop_file(out: Path) -> Path:
    """The file whose presence makes all jobs of a comparison save and end."""
    return out / "stop"


@dataclass(frozen=True, kw_only=True)
class Record:
    """Settings (with ``steps``, once known) and fingerprint of a comparison, in its folder."""

    settings: ComparisonSettings
    fingerprint: str

    def write(self) -> None:
        """Write it into the folder."""
        plain = {"kind": KIND, "settings": self.settings.to_json(), "data": self.fingerprint}
        write_json(self.settings.out / RECORD, plain)

    def require_unchanged(self) -> None:
        """Refuse to go on in the folder if another comparison has replaced this one.

        Raises:
            ArgumentError, DataError: when it has.
        """
        _require_same(self, Record.read(self.settings.out))

    @classmethod
    def read(cls, out: Path) -> Record:
        """The record in a folder.

        Raises:
            OutputError: when there is no comparison in it.
            CheckpointError: when its record is damaged.
        """
        if not (out / RECORD).is_file():
            raise OutputError(
                "out",
                expected="the folder of a comparison",
                got=f"{out}, which has no {RECORD}",
                remedy="Give the folder that the comparison was written to.",
            )
        plain: Any = read_json(out / RECORD, remedy="Restore it from a copy, or compare anew.")
        described = plain.get("settings") if isinstance(plain, dict) else None
        if not isinstance(described, dict) or plain.get("kind") != KIND or "data" not in plain:
            raise CheckpointError(
                str(out / RECORD),
                expected=f"the record of a {KIND}",
                got="something else",
                remedy="Choose another folder.",
            )
        settings = ComparisonSettings.from_json({**described, "out": str(out)})
        return cls(settings=settings, fingerprint=str(plain["data"]))


def load_settings(out: Path) -> ComparisonSettings:
    """The settings of the comparison in ``out``, ready to resume it.

    Raises:
        OutputError, CheckpointError: as ``Record.read``.
    """
    return replace(Record.read(Path(out)).settings, existing="resume")


def resume_command(out: PurePath) -> str:
    """The command line that continues the comparison in ``out``."""
    return f"posenc compare --resume --out {shlex.quote(str(out))}"


@contextmanager
def open_folder(settings: ComparisonSettings, fingerprint: str) -> Iterator[Record]:
    """Prepare the output folder and lock it; the record of the comparison in it.

    Raises:
        OutputError: when the folder is used by something else or another call, or cannot be made.
        ArgumentError: when a comparison of other settings is to be resumed.
        DataError: when the data is no longer that of the comparison to be resumed.
    """
    out, existing = settings.out, settings.existing
    record = Record(settings=settings, fingerprint=fingerprint)
    occupied = out.is_file() or (out.is_dir() and any(x.name != LOCK for x in out.iterdir()))
    if occupied and existing == "refuse":
        raise OutputError(
            "out",
            expected="a new or empty folder",
            got=f"{out}, which exists",
            remedy="Choose another folder, continue what is in it (--resume), or replace it "
            "(--replace).",
        )
    if occupied or existing == "resume":
        Record.read(out)  # nothing is touched that is not a comparison
    make_folder(out)
    with locked(out / LOCK):
        if existing == "resume":
            record = _resume(record)
        else:
            for job in (out / RUNS).glob("*/.*.lock"):
                with locked(job):  # a cluster's jobs outlive the call that began them
                    pass
            shutil.rmtree(out / RUNS, ignore_errors=True)
            record.write()
        stop_file(out).unlink(missing_ok=True)
        yield record


@contextmanager
def locked(path: Path, *, stop: Callable[[], bool] | None = None) -> Iterator[None]:
    """A file lock, which a process that dies leaves free.

    Args:
        path: the file, made if it is not there.
        stop: another process is waited for until this returns True; None: it is not waited for.

    Raises:
        OutputError: if another process holds it, or the file system refuses.
        Interrupted: when ``stop`` says so.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0 if stop is None else -1, cancel_check=stop or (lambda: False))
    except Timeout as error:
        kind = OutputError if stop is None else Interrupted
        raise kind(
            "out",
            expected="a folder that nothing else is at work in",
            got=f"{path.parent}, in which another call or job is",
            remedy="Wait for its end, stop it, or choose another folder.",
        ) from error
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        yield
    finally:
        lock.release()


def _resume(record: Record) -> Record:
    stored = Record.read(record.settings.out)
    _require_same(record, stored)
    if stored.settings.steps is None:
        return record
    settings = replace(record.settings, steps=stored.settings.steps, minutes=None)
    return replace(record, settings=settings)


def _require_same(record: Record, stored: Record) -> None:
    different = record.settings.differences(stored.settings)
    if different:
        mine, theirs = record.settings.to_json(), stored.settings.to_json()
        raise ArgumentError(
            different[0],
            expected=f"{theirs[different[0]]!r}, as in the comparison to be continued",
            got=repr(mine[different[0]]),
            remedy="Continue with the same settings (or none but the folder), or compare anew.",
        )
    if stored.fingerprint != record.fingerprint:
        kind = "text" if record.settings.entry.reads_text else "data"
        raise DataError(
            kind,
            expected=f"the {kind} that the comparison began with",
            got="another one",
            remedy="Restore it, or compare anew into another folder.",
        )
