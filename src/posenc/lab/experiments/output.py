"""The output folder of a comparison, new or resumed."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from posenc.errors import ArgumentError, CheckpointError, DataError, OutputError
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.storage import make_folder, read_json, write_json

KIND = "posenc comparison"
RECORD = "settings.json"
RUNS = "runs"


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
                remedy="Give the folder that the comparison was written to; on another machine, "
                "the path of a file system that both share.",
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


def load_settings(out: Path, existing: Literal["resume", "join"] = "resume") -> ComparisonSettings:
    """The settings of the comparison in ``out``, ready to resume or join it.

    Raises:
        OutputError, CheckpointError: as ``Record.read``.
    """
    return replace(Record.read(Path(out)).settings, existing=existing)


def resume_command(out: Path) -> str:
    """The command line that continues the comparison in ``out``."""
    return f"posenc compare --resume --out {shlex.quote(str(out))}"


def open_folder(settings: ComparisonSettings, fingerprint: str) -> Record:
    """Prepare the output folder; the record of the comparison in it.

    Raises:
        OutputError: when it is in use for something else, or cannot be made.
        ArgumentError: when a comparison of other settings is to be resumed or joined, or one
            whose steps are not yet known is to be joined.
        DataError: when the data is no longer that of the comparison to be resumed.
    """
    out = settings.out
    record = Record(settings=settings, fingerprint=fingerprint)
    if settings.existing in ("resume", "join"):
        return _resume(record)
    occupied = out.is_file() or (out.is_dir() and any(out.iterdir()))
    if occupied and settings.existing == "refuse":
        raise OutputError(
            "out",
            expected="a new or empty folder",
            got=f"{out}, which exists",
            remedy="Choose another folder, continue what is in it (--resume), or replace it "
            "(--replace).",
        )
    if occupied:
        Record.read(out)  # nothing is removed that is not a comparison
        shutil.rmtree(out / RUNS, ignore_errors=True)
    make_folder(out)
    record.write()
    return record


def _resume(record: Record) -> Record:
    stored = Record.read(record.settings.out)
    _require_same(record, stored)
    if stored.settings.steps is not None:
        settings = replace(record.settings, steps=stored.settings.steps, budget_minutes=None)
        return replace(record, settings=settings)
    if record.settings.existing == "join" and stored.settings.budget_minutes is not None:
        raise ArgumentError(
            "join",
            expected="a comparison whose steps are known",
            got="one that is still measuring how many fit its budget",
            remedy="Wait until it tells them; if it has ended, continue it with --resume.",
        )
    return record


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
