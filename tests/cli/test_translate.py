"""``posenc translate``, as a shell runs it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

TINY = [
    *("--vocabulary", "40", "--max-length", "30", "--width", "16", "--layers", "1", "--heads", "2"),
    *("--batch-tokens", "200", "--steps", "6", "--every", "3", "--threads", "1"),
]


def posenc(*arguments: str | Path, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", "from posenc.cli import main; main()", *map(str, arguments)],
        input=given,
        capture_output=True,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
        check=False,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A folder with pairs and a translator, and what training printed."""
    folder = tmp_path_factory.mktemp("translate")
    source = random.Random(0)
    lines = [" ".join(source.choices(["one", "two", "six"], k=4)) for _ in range(300)]
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line.upper()}é\n" for line in lines))
    done = posenc(
        "translate", "train", "--text", folder / "pairs.tsv", "--out", folder / "out", *TINY
    )
    assert done.returncode == 0, done.stderr.decode()
    return folder, done.stdout


def test_training_prints_scores_and_examples(trained: tuple[Path, bytes]) -> None:
    text = trained[1].decode()
    assert text.startswith("BLEU ")
    assert "chrF" in text
    assert "reference" in text
    assert "posenc translate run" in text


def test_a_file_and_standard_input_give_the_same(trained: tuple[Path, bytes]) -> None:
    folder, _ = trained
    text = b"one two\n\nsix six\n"
    (folder / "in.txt").write_bytes(text)
    piped = posenc("translate", "run", folder / "out", given=text)
    assert piped.returncode == 0, piped.stderr.decode()
    assert piped.stdout.count(b"\n") == 3
    assert piped.stdout.split(b"\n")[1] == b""
    written = posenc(
        *("translate", "run", folder / "out", folder / "in.txt", "-o", folder / "out.txt"),
        *("--reference", folder / "in.txt"),
    )
    assert written.returncode == 0, written.stderr.decode()
    assert written.stdout == b""
    assert (folder / "out.txt").read_bytes() == piped.stdout
    assert b"BLEU" in written.stderr


def test_going_on_needs_nothing_but_the_folder(trained: tuple[Path, bytes]) -> None:
    done = posenc("translate", "train", "--resume", "--out", trained[0] / "out", "--json")
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["steps"] == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"one \xe9\n", b"byte 0xE9 in line 1"),
        ("one\none ŋ\n".encode(), "'ŋ' (U+014B) in line 2".encode()),
        (b"one " * 99, b"in line 1"),
    ],
)
def test_bad_input_is_refused(trained: tuple[Path, bytes], given: bytes, message: bytes) -> None:
    done = posenc("translate", "run", trained[0] / "out", given=given)
    assert done.returncode == 2
    assert message in b" ".join(done.stderr.split())
    assert b"Traceback" not in done.stderr
    assert done.stdout == b""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], b"--text"),
        (["train", "--text", "nowhere.tsv"], b"No such file"),
        (["train", "--resume", "--replace"], b"--resume or --replace"),
        (["run", "nowhere"], b"config.json"),
    ],
)
def test_wrong_usage(arguments: list[str], message: bytes) -> None:
    done = posenc("translate", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert b"Traceback" not in done.stderr
