"""The output of every command, held to approved transcripts at 80 columns without colour."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from posenc.lab.cli import app
from posenc.lab.evaluation.checkpoint import as_llama
from posenc.models import Decoder
from tests.support.samples import next_token_model, sample

FOLDER = Path(__file__).parent / "transcripts"
APPROVE = "POSENC_APPROVE"
"""This environment variable, if set, makes the tests write the transcripts anew."""

LENGTH = 16

MASKS = {
    "": (
        (r"(?<=Report: )/\S*/(?=out)", "FOLDER/"),
        (r", about [\d.]+ (s|min|h) left", ""),
        (r"(?<=copied) +tokens/s$", "  tokens/s"),
        (r"(?<=%) +(≈ )?[\d,]+$", "  #"),
    ),
    "show": ((r"^(on (?:the CPU|CUDA) +).*", r"\1BACKENDS"),),
    "bench": (
        (r" *\d+\.\d+|\de-\d\d", " #"),
        (r"^nope .*|.*(?:plain attention|28 rounds).*", "VERDICT"),
    ),
}
"""Patterns of text that differs between machines and runs, and their replacements: in all
transcripts, and in those of a command."""

SIZES = "--encodings nope --quick --heads 2 --head-dim 8 --rounds 1 --threads 1"

TRANSCRIPTS: dict[str, Sequence[str]] = {
    "list": ["", "--site score --axes 2", "--site value --extrapolates nowhere"],
    "show": ["rope --option base=100"],
    "gallery": ["--encodings nope,alibi --out gallery.html"],
    "tasks": [""],
    "compare": ["--out out"],
    "extend": [
        "model --method yarn,string --factor 3 --text text.txt --out out",
        "model --method rerope --factor 2 --no-report --out out-unmeasured",
    ],
    "evaluate": [
        "model --text text.txt --lengths 8,16,32 --out out",
        "untrained --text text.txt --lengths 8,16,32 --out out-untrained",
    ],
    "doctor": ["model --seconds 0", "stretched --seconds 0"],
    "engines": ["", "--vectors rotations.json"],
    "generate": ["saved --prompt def --max-new 9"],
    "bench": [f"--lengths 16 --out out {SIZES}"],
    "wrong": re.findall(r"^\$ posenc (.+)", (FOLDER / "wrong.txt").read_text(), re.MULTILINE),
}
"""The commands of each file. But in ``wrong``, whose commands are those that the file has, the
file's name comes before them."""


HELP = ((), *((name,) for name in app.COMMANDS))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that look at the last byte alone, one that knows nothing, and a text."""
    folder = tmp_path_factory.mktemp("given")
    text = b"the quick brown fox jumps over the lazy dog. " * 400
    for name, encoding in (("saved", "rope"), ("alibi", "alibi")):
        next_token_model(text, length=LENGTH, encoding=encoding).save(folder / name)
    as_llama(Decoder.load(folder / "saved")).save_pretrained(folder / "model")
    as_llama(next_token_model(b"\0\1\0", length=LENGTH)).save_pretrained(folder / "untrained")
    (folder / "stretched").mkdir()
    wrong = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 2048}
    wrong |= {"rope_theta": 500000.0, "rope_parameters": {"rope_theta": 10000.0, "factor": 4.0}}
    (folder / "stretched" / "config.json").write_text(json.dumps(wrong))
    (folder / "text.txt").write_bytes(text)
    return folder


@pytest.fixture
def transcript(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: Path, tmp_path: Path
) -> Callable[[Sequence[str]], str]:
    """Runs commands in a folder of their own: what they print, and how they exit.

    Nothing is trained: what is printed of a comparison is of made-up measurements.
    """
    for path in given.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for name, value in (("COLUMNS", "80"), ("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("posenc.lab.experiments.compare.compare", lambda *_, **__: sample())
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)

    def run(commands: Sequence[str]) -> str:
        pieces = []
        for command in commands:
            monkeypatch.setattr(sys, "argv", ["posenc", *command.split()])
            with pytest.raises(SystemExit) as ended:
                app.run()
            printed = capsys.readouterr()
            pieces.append(f"$ posenc {command}\n{printed.out}")
            if printed.err:
                pieces.append(f"[standard error]\n{printed.err}")
            if ended.value.code:
                pieces.append(f"[exit code {ended.value.code}]\n")
        return "".join(pieces)

    return run


def _masked(text: str, name: str) -> str:
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    for pattern, replacement in (*MASKS[""], *MASKS.get(name, ())):
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def _approve(name: str, printed: str) -> None:
    found = _masked(printed, name)
    path = FOLDER / f"{name}.txt"
    if os.environ.get(APPROVE):
        path.write_text(found)
    approved = path.read_text() if path.exists() else ""
    assert found == approved, (
        f"{path.name} differs. If the change is wanted, write it anew, read the difference, "
        f"and commit it: {APPROVE}=1 python -m pytest tests/lab/cli/test_transcripts.py"
    )


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_commands_print_what_is_approved(
    name: str, transcript: Callable[[Sequence[str]], str]
) -> None:
    start = "" if name == "wrong" else f"{name} "
    _approve(name, transcript([f"{start}{command}".strip() for command in TRANSCRIPTS[name]]))


@pytest.mark.parametrize("path", HELP, ids=" ".join)
def test_help_is_what_is_approved(
    path: tuple[str, ...], transcript: Callable[[Sequence[str]], str]
) -> None:
    _approve("-".join(("help", *path)), transcript([" ".join((*path, "--help"))]))


def test_every_transcript_is_of_a_command() -> None:
    names = {*TRANSCRIPTS, *("-".join(("help", *path)) for path in HELP)}
    assert {path.stem for path in FOLDER.glob("*.txt")} == names
