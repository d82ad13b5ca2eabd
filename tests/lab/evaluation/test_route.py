"""From the command to the first measurement a checkpoint passes through few hands."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import posenc
from posenc.lab.cli import app
from posenc.lab.evaluation.candidates import Candidate
from posenc.lab.evaluation.checkpoint import Checkpoint, as_llama
from posenc.models import Decoder, DecoderConfig
from posenc.transformers.checkpoints import Fields
from posenc.transformers.live import LiveModel

PACKAGE = Path(posenc.__file__).parent
PROGRAM = ("lab/cli/", "lab/evaluation/", "lab/experiments/")
MOST_CALLS, MOST_FILES = 26, 13


class Measuring(Exception):
    """The first measurement begins."""


class Route:
    """The calls that hand a checkpoint on, while it is the profiler of ``sys``.

    A call is one place in the program (cli, evaluation, experiments) that calls a function of
    posenc with the checkpoint as an argument: its folder or a path in it, its ``config.json``, the
    opened object, its model, or a candidate made of it. Calls that library functions make
    themselves do not count.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: dict[tuple[str, str, str], str] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not self._handed(frame):
            return
        caller, called = _caller(frame), _file(frame)
        if called is None or caller is None or not str(_file(caller)).startswith(PROGRAM):
            return
        name = f"{called} {frame.f_code.co_qualname}"
        self.calls.setdefault((f"{_file(caller)}:{caller.f_lineno}", name, called), called)
        if frame.f_code.co_name == "measure":
            sys.setprofile(None)
            raise Measuring

    def _handed(self, frame: FrameType) -> bool:
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = {name: frame.f_locals.get(name) for name in names}
        return any(
            self.folder in (value, *value.parents)
            if isinstance(value, Path)
            else isinstance(value, Checkpoint | Candidate | Fields)
            or (isinstance(value, LiveModel) and name != "self")  # what it tells of itself
            for name, value in values.items()
        )


def _file(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def _caller(frame: FrameType) -> FrameType | None:
    """The nearest frame of posenc above; that of a library counts, so that it is not entered."""
    above = frame.f_back
    while above is not None and _file(above) is None:
        above = above.f_back
    return above


def test_few_calls_in_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(vocabulary=256, dim=16, layers=1, heads=2, max_length=16)
    as_llama(Decoder(config)).save_pretrained(tmp_path / "in")
    (tmp_path / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 60)
    command = ["posenc", "extend", tmp_path / "in", "--text", tmp_path / "text.txt", "--quiet"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in (*command, "--out", tmp_path / "out")])
    route = Route(tmp_path / "in")
    sys.setprofile(route)
    try:
        with pytest.raises(Measuring):
            app.run()
    finally:
        sys.setprofile(None)
    names = [f"{place} -> {name}" for place, name, _ in route.calls]
    assert names[-1].endswith("NextTokenSuite.measure")
    assert len(names) <= MOST_CALLS, "\n".join(names)
    files = {called for _, _, called in route.calls} | {
        place.split(":")[0] for place, _, _ in route.calls
    }
    assert len(files) <= MOST_FILES, sorted(files)
