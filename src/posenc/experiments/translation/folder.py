"""The output folder of a translator in training: opened for a new one, or for one that goes on."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posenc.errors import ArgumentError, CheckpointError, DataError, OutputError
from posenc.experiments.translation.settings import TranslatorSettings
from posenc.storage import make_folder, read_json, write_json

__all__ = ["KIND", "load_settings", "open_folder"]

KIND, RECORD = "posenc translator", "settings.json"


def load_settings(out: Path) -> TranslatorSettings:
    """The settings of the training in ``out``, ready to resume it.

    Raises:
        OutputError: when there is none.
        CheckpointError: when its record is damaged.
    """
    plain = _record(Path(out))
    return replace(TranslatorSettings.from_json(plain["settings"]), out=out, existing="resume")


def _record(out: Path) -> dict[str, Any]:
    if not (out / RECORD).is_file():
        raise OutputError(
            "out",
            expected="the folder of a translator in training",
            got=f"{out}, which has no {RECORD}",
            remedy="Give the folder that posenc translate train has written.",
        )
    plain: dict[str, Any] = read_json(out / RECORD, remedy="Restore it from a copy, or train anew.")
    known = isinstance(plain, dict) and {"kind", "settings", "data"} <= plain.keys()
    if not known or plain["kind"] != KIND or not isinstance(plain["settings"], dict):
        raise CheckpointError(
            str(out / RECORD),
            expected=f"the record of a {KIND}",
            got="something else",
            remedy="Choose another folder.",
        )
    return plain


def open_folder(settings: TranslatorSettings, fingerprint: str, *, replaced: Sequence[str]) -> None:
    """Make the output folder ready.

    Args:
        settings: of the training.
        fingerprint: of its text.
        replaced: files and folders of an earlier training, which a new one removes.

    Raises:
        OutputError: when it is in use, or cannot be made.
        ArgumentError: when a training of other settings is to be resumed.
        DataError: when the text is no longer that of the training to be resumed.
        CheckpointError: when its record is damaged.
    """
    out = settings.out
    if settings.existing == "resume":
        found = _record(out)
        theirs = TranslatorSettings.from_json(found["settings"]).decisive()
        mine = settings.decisive()
        different = sorted(name for name in mine if mine[name] != theirs[name])
        if different:
            raise ArgumentError(
                different[0],
                expected=f"{theirs[different[0]]!r}, as in the training to be resumed",
                got=repr(mine[different[0]]),
                remedy="Resume with the same settings (or none but --out), or train anew.",
            )
        if found["data"] != fingerprint:
            raise DataError(
                "text",
                expected="the text that training began with",
                got="another one",
                remedy="Restore it, or train anew into another folder.",
            )
        return
    occupied = out.is_file() or (out.is_dir() and any(out.iterdir()))
    if occupied and settings.existing == "refuse":
        raise OutputError(
            "out",
            expected="a new or empty folder",
            got=f"{out}, which exists",
            remedy="Choose another, go on with what is in it (--resume), or replace it "
            "(--replace).",
        )
    if occupied:
        _record(out)  # nothing is removed that is not a translator
        for name in replaced:
            if (out / name).is_dir():
                shutil.rmtree(out / name)
            else:
                (out / name).unlink(missing_ok=True)
    make_folder(out)
    plain = {"kind": KIND, "settings": settings.to_json(), "data": fingerprint}
    write_json(out / RECORD, plain)
