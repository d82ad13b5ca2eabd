"""Releases of engines that their rules were run with, and releases installed here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from posenc.transformers.engines.config import Engine

RUNS = Path(__file__).with_name("runs.json")
"""Releases by engine, written by ``make engines``."""


@dataclass(frozen=True)
class Run:
    """Small checkpoints of many families and scalings, computed by an engine as its rules predict.

    Args:
        release: of the engine.
        date: of the run.
        cells: number of checkpoints.
    """

    release: str
    date: str
    cells: int


def run_of(engine: Engine) -> Run | None:
    """The last run that held an engine to its rules; None if there was none."""
    found = json.loads(RUNS.read_text()).get(engine.name)
    return None if found is None else Run(**found)


def installed(engine: Engine) -> str:
    """The release of an engine that is installed beside posenc; "" if there is none."""
    for package in engine.packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def newer(engine: Engine) -> str:
    """The installed release, if its numbers are higher than those that the rules are known for.

    Returns:
        "" if they are not, or if none is installed.
    """
    here, run = installed(engine), run_of(engine)
    known = [engine.release, *([] if run is None else [run.release])]
    return here if here and _numbers(here) > max(map(_numbers, known)) else ""


def _numbers(release: str) -> tuple[int, ...]:
    """The numbers of a release, those of ``1.2.3`` for ``1.2.3+cpu`` and ``1.2.3rc1``."""
    start = re.match(r"\d+(\.\d+)*", release)
    return tuple(map(int, start[0].split("."))) if start else ()
