"""``python -m examples.translation``."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from examples.translation.__main__ import main, parser
from examples.translation.settings import Settings

ROOT = Path(__file__).parents[2]
TINY = [
    *("--vocabulary", "40", "--max-length", "30", "--width", "16", "--layers", "1", "--heads", "2"),
    *("--batch-tokens", "200", "--steps", "6", "--every", "3", "--threads", "1"),
]


class Done(NamedTuple):
    """Exit code and output of a command."""

    returncode: int
    stdout: bytes
    stderr: bytes


def translation(*arguments: str | Path, given: bytes = b"") -> Done:
    """Run the program in this process."""
    streams = [io.TextIOWrapper(io.BytesIO(content)) for content in (given, b"", b"")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["examples.translation", *map(str, arguments)])
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, stream)
        code = 0
        try:
            main()
        except SystemExit as error:
            code = int(error.code or 0)
        for stream in streams[1:]:
            stream.flush()
    _, out, err = (stream.buffer.getvalue() for stream in streams)
    return Done(code, out, err)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A folder with pairs and a translator, and what training printed."""
    folder = tmp_path_factory.mktemp("translate")
    source = random.Random(0)
    lines = [" ".join(source.choices(["one", "two", "six"], k=4)) for _ in range(300)]
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line.upper()}é\n" for line in lines))
    done = translation("train", "--text", folder / "pairs.tsv", "--out", folder / "out", *TINY)
    assert done.returncode == 0, done.stderr.decode()
    return folder, done.stdout


def test_training_prints_scores_and_examples(trained: tuple[Path, bytes]) -> None:
    text = trained[1].decode()
    assert text.startswith("BLEU ")
    assert "chrF" in text
    assert "reference" in text
    assert "examples.translation run" in text


def test_a_file_and_standard_input_give_the_same(trained: tuple[Path, bytes]) -> None:
    folder, _ = trained
    text = b"one two\n\nsix six\n"
    (folder / "in.txt").write_bytes(text)
    piped = translation("run", folder / "out", given=text)
    assert piped.returncode == 0, piped.stderr.decode()
    assert piped.stdout.count(b"\n") == 3
    assert piped.stdout.split(b"\n")[1] == b""
    written = translation(
        *("run", folder / "out", folder / "in.txt", "-o", folder / "out.txt"),
        *("--reference", folder / "in.txt"),
    )
    assert written.returncode == 0, written.stderr.decode()
    assert written.stdout == b""
    assert (folder / "out.txt").read_bytes() == piped.stdout
    assert b"BLEU" in written.stderr


def test_going_on_needs_nothing_but_the_folder(trained: tuple[Path, bytes]) -> None:
    done = translation("train", "--resume", "--out", trained[0] / "out", "--json")
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["steps"] == 6


@pytest.mark.parametrize(
    ("arguments", "given", "message"),
    [
        (["run", "{out}"], b"one \xe9\n", "byte 0xE9 in line 1"),
        (["run", "{out}"], "one\none ŋ\n".encode(), "'ŋ' (U+014B) in line 2"),
        (["run", "{out}"], b"one " * 99, "in line 1"),
        (["run", "nowhere"], b"", "config.json"),
        (["train"], b"", "--text"),
        (["train", "--text", "nowhere.tsv"], b"", "No such file"),
        (["train", "--resume", "--replace"], b"", "--resume or --replace"),
    ],
)
def test_bad_input_and_wrong_usage_are_refused(
    trained: tuple[Path, bytes], arguments: list[str], given: bytes, message: str
) -> None:
    done = translation(*(x.format(out=trained[0] / "out") for x in arguments), given=given)
    assert (done.returncode, done.stdout) == (2, b"")
    assert message in " ".join(done.stderr.decode().split())
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("option", dataclasses.fields(Settings), ids=lambda option: option.name)
def test_every_option_says_its_default(option: dataclasses.Field[Any]) -> None:
    (commands,) = parser()._subparsers._group_actions  # argparse's
    words = " ".join(commands.choices["train"].format_help().split())
    name = f"--{option.name.replace('_', '-')}"
    assert name in words
    if isinstance(option.default, int | float | str) and not isinstance(option.default, bool):
        shown = re.findall(rf"{name} [A-Z_]+ ([^(]*)\(default: ([^)]*)\)", words)
        assert [default for _, default in shown] == [str(option.default)]


def test_it_runs_from_a_shell() -> None:
    command = [sys.executable, "-m", "examples.translation", "--help"]
    assert b"{train,run}" in subprocess.check_output(command, cwd=ROOT)
