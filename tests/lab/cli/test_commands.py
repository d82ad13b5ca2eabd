"""The commands: what they print, where, and how they exit."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from posenc.lab.cli.app import run
from posenc.lab.visualization.catalogue import DocstringSections
from posenc.registry import ENCODINGS
from tests.support.commands import run_command as posenc

TINY = [
    *("--steps", "3", "--seeds", "2", "--batch", "2", "--train-length", "16"),
    *("--width", "16", "--heads", "2", "--layers", "1"),
]
QUICK = [*TINY, "--test-lengths", "32", "--encodings", "rope,learned"]


PROGRAM = [sys.executable, "-c", "from posenc.lab.cli import main; main()"]


def from_shell(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A tiny comparison: its folder, standard output and standard error."""
    out = tmp_path_factory.mktemp("cli") / "out"
    done = posenc("compare", *QUICK, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout, done.stderr


def test_list_names_every_method_whole() -> None:
    for columns in (80, 160):
        done = posenc("list", columns=columns)
        assert done.returncode == 0
        for name in ENCODINGS:
            assert name in done.stdout
        assert "…" not in done.stdout.replace("max_length…", "")
        assert max(map(len, done.stdout.splitlines())) <= columns


def test_list_as_json_and_by_site() -> None:
    listed = json.loads(posenc("list", "--site", "score", "--json").stdout)
    names = [name for name, entry in ENCODINGS.items() if "score" in entry.claims.sites]
    assert [item["name"] for item in listed] == names
    alibi = next(item for item in listed if item["name"] == "alibi")
    assert alibi["citation"]["year"] == 2021
    assert alibi["options"] == {"learned": False, "asymmetric": False}


@pytest.mark.parametrize("name", ["rope", "sinusoidal", "t5", "nope"])
def test_show_tells_formula_options_and_source(name: str) -> None:
    done = posenc("show", name)
    assert done.returncode == 0
    for words in ("By distance", "cite", "beyond training length", "on the CPU"):
        assert words in done.stdout


@pytest.mark.parametrize(("name", "columns"), [("rope_pp", 80), ("deberta", 60), ("t5", 120)])
def test_show_fills_its_lines(name: str, columns: int) -> None:
    """Docstrings are broken for the source; a terminal that is narrower breaks them anew."""
    shown = posenc("show", name, columns=columns).stdout
    assert max(map(len, shown.splitlines())) <= columns
    printed = [" ".join(block.split()) for block in shown.split("\n\n")]
    body = [part.replace("``", "") for part in DocstringSections.of(ENCODINGS[name].factory).body]
    for paragraph in body:
        if "\n" not in paragraph:
            assert paragraph in printed
            lines = shown.split("\n\n")[printed.index(paragraph)].splitlines()
            assert len(lines) <= len(paragraph) / (0.75 * min(columns, 100)) + 1
    for option in ENCODINGS[name].parameters():
        assert re.search(rf"^{option}\b", shown, re.MULTILINE)


def test_show_draws_pictures(tmp_path: Path) -> None:
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<svg"), ("html", b"<!DOCTYPE html>")):
        out = tmp_path / f"alibi.{kind}"
        assert posenc("show", "alibi", "--out", out).returncode == 0
        assert out.read_bytes().lstrip().startswith(start)
    refused = posenc("show", "alibi", "--out", tmp_path / "alibi.gif")
    assert refused.returncode == 2
    assert ".png, .svg, .html" in refused.stderr


def test_gallery_is_one_page(tmp_path: Path) -> None:
    out = tmp_path / "gallery.html"
    done = posenc("gallery", "--encodings", "nope, alibi", "--out", out)
    assert done.returncode == 0, done.stderr
    assert f"Gallery: {out}" in done.stdout
    assert out.read_text().count("<article") == 2


def test_show_joins_encodings() -> None:
    shown = posenc("show", "rope+alibi@base=100", "--option", "gain=2")
    assert shown.returncode == 0
    assert shown.stdout.count("options and defaults") == 2
    both = json.loads(posenc("show", "rope+alibi", "--json").stdout)
    assert [each["name"] for each in both] == ["rope", "alibi"]
    refused = posenc("show", "yarn")
    assert refused.returncode == 2
    assert "posenc.extensions" in refused.stderr.replace("\n", "")
    assert "Did you mean" not in refused.stderr


def test_show_passes_options() -> None:
    shown = posenc("show", "rope", "--option", "base=100")
    assert shown.returncode == 0
    assert shown.stdout != posenc("show", "rope").stdout
    assert posenc("show", "rope", "--option", "base=1").returncode == 2


def test_compare_ends_in_words_a_table_and_a_report(finished: tuple[Path, str, str]) -> None:
    out, stdout, stderr = finished
    assert (out / "report" / "index.html").exists()
    assert f"Report: {out.resolve()}" in stdout.replace("\n", "")
    assert "could not be tested at 32" in stdout
    assert "Not learned, so no verdict" in stdout
    assert "unlearned" in stdout
    assert "[6/6]" in stderr
    record = json.loads((out / "report" / "comparison.json").read_text())
    assert record["provenance"]["command"].endswith(f"--out {out}")
    assert record["complete"] is True


def test_compare_as_json_is_json_alone(tmp_path: Path) -> None:
    done = posenc("compare", *QUICK, "--seeds", "1", "--out", tmp_path / "out", "--json")
    told = json.loads(done.stdout)
    assert told["complete"] is True
    assert Path(told["report"]).exists()
    assert done.stderr == ""
    first = told["encodings"][0]
    assert first["gate"] == first["verdict"] == "unlearned"
    assert first["lengths"]["32"]["loss"]["n"] == 1
    assert Path(first["models"][0]).is_dir()


def test_tasks_are_listed_with_what_to_expect() -> None:
    done = posenc("tasks")
    assert done.returncode == 0, done.stderr
    listed = json.loads(posenc("tasks", "--json").stdout)
    for task in listed:
        assert task["name"] in done.stdout
        assert task["expected"]
        assert task["defaults"]["test_lengths"][0] == task["defaults"]["train_length"]
    assert {"language", "copy", "scan"} <= {task["name"] for task in listed}
    assert "needle_rows = 0.25" in done.stdout


def test_compare_on_another_task(tmp_path: Path) -> None:
    options = ["--encodings", "t5,learned", "--test-lengths", "24", "--option", "symbols=8"]
    size = ["--steps", "3", "--seeds", "1", "--width", "16", "--heads", "2", "--layers", "1"]
    out = tmp_path / "out"
    done = posenc("compare", "--task", "copy", *options, *size, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "Not learned, so no verdict" in done.stdout
    assert "sinusoidal (unsorted)" in done.stdout.replace("\n", " ")
    record = json.loads((out / "report" / "comparison.json").read_text())
    assert record["task"] == "copy"
    assert record["length_unit"] == "symbols"
    assert record["provenance"]["settings"]["options"] == {"symbols": 8, "distinct": False}
    assert "Kazemnejad" in (out / "report" / "index.html").read_text()
    again = posenc("compare", "--resume", "--out", out)
    assert again.returncode == 0, again.stderr
    assert "finished before" in again.stderr


def test_compare_on_a_text_of_ones_own_that_is_no_utf8(tmp_path: Path) -> None:
    text = tmp_path / "text.bin"
    text.write_bytes(bytes(range(256)) * 400)
    done = posenc("compare", *QUICK, "--seeds", "1", "--text", text, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "text.bin" in done.stderr


def test_resume_of_a_finished_comparison_trains_nothing(finished: tuple[Path, str, str]) -> None:
    out, _, _ = finished
    done = posenc("compare", "--resume", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "6 finished before" in done.stderr


def test_generate_continues_a_prompt(finished: tuple[Path, str, str]) -> None:
    run = finished[0] / "runs" / "rope" / "seed-0"
    options = ["--prompt", "def ", "--max-new", "9", "--json"]
    told = json.loads(posenc("generate", run, *options).stdout)
    assert told["prompt"] == "def "
    assert told["model"] == "llama"
    again = json.loads(posenc("generate", run / "model", *options).stdout)
    assert again == told
    cold = posenc("generate", run, "--temperature", "0", "--max-new", "5")
    assert cold.returncode == 0
    assert cold.stdout.startswith("def ")


WRONG: list[tuple[Sequence[str], str]] = [
    (["show", "alibbi"], "Did you mean 'alibi'"),
    (
        ["generate", "run", "--temperature", "-1"],
        "--temperature: expected a finite number, 0 or more, got -1",
    ),
    (["show", "rope", "--option", "bas=3"], "Did you mean 'base'"),
    (["show", "rope", "--option", "base"], "NAME=VALUE"),
    (["gallery", "--encodings", "rope,sinusoidl"], "Did you mean 'sinusoidal'"),
    (["gallery", "--encodings", ","], "at least one name"),
    (["gallery", "--out", "gallery.png"], ".html"),
    (["compare", "--encodings", "rope,sinusoidl"], "Did you mean 'sinusoidal'"),
    (["compare", "--encodings", ","], "at least one name"),
    (["compare", "--task", "copi"], "Did you mean 'copy'"),
    (["compare", "--task", "copy", "--option", "symbol=3"], "Did you mean 'symbols'"),
    (["compare", "--task", "copy", "--option", "symbols"], "NAME=VALUE"),
    (["compare", "--task", "copy", "--option", "symbols=many"], "a whole number"),
    (["compare", "--task", "copy", "--text", "a.txt"], "copy has its own data"),
    (["compare", "--task", "copy", "--encodings", "rope@random"], "Did you mean 'randomized'"),
    (["compare", "--task", "scan", "--train-length", "20"], "where SCAN is split"),
    (["compare", "--encodings", "rope@randomized"], "plain positions"),
    (["compare", "--test-lengths", "64,x"], "a whole number, 1 or more"),
    (["compare", "--test-lengths", "8"], "64 or more"),
    (["compare", "--seeds", "0"], "--seeds"),
    (["compare", "--steps", "0"], "steps"),
    (["compare", "--steps", "9", "--budget-minutes", "3"], "both"),
    (["compare", "--width", "30"], "multiple of heads"),
    (["compare", "--device", "cuda:99"], "device"),
    (["compare", "--precision", "8"], "precision"),
    (["compare", "--text", "nowhere.txt"], "nowhere.txt"),
    (["compare", "--resume", "--replace"], "both"),
    (["compare", "--resume"], "settings.json"),
    (["generate", "nowhere"], "config.json"),
    (["generate", "nowhere", "--prompt", ""], "at least one byte"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else " ".join(x)
)
def test_wrong_input_is_one_clear_error(
    arguments: Sequence[str], message: str, tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "out")] if arguments[0] == "compare" else []
    done = posenc(*arguments, *out)
    assert done.returncode == 2
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in posenc("--debug", "show", "alibbi").stderr


def test_texts_that_are_unusable(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "tiny.txt").write_bytes(b"abc")
    for name in ("empty.txt", "tiny.txt"):
        done = posenc("compare", *QUICK, "--text", tmp_path / name, "--out", tmp_path / "out")
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for option in ([], ["--replace"], ["--resume"]):
        done = posenc("compare", *QUICK, "--out", tmp_path, *option)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = posenc("compare", *QUICK, "--out", tmp_path / "file" / "out")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_damaged_model_is_named(finished: tuple[Path, str, str], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in (finished[0] / "runs" / "rope" / "seed-0" / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes()[:-20])
    done = posenc("generate", model)
    assert done.returncode == 2
    assert "json" in done.stderr or "safetensors" in done.stderr


@pytest.mark.long
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = [*QUICK, "--steps", "5000", "--seeds", "1", "--workers", "1", "--out", str(out)]
    running = subprocess.Popen(
        [*PROGRAM, "compare", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(out.glob("runs/*/*/*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert f"posenc compare --resume --out {out}" in stderr.replace("\n", " ")
    assert (out / "report" / "index.html").exists()


def test_a_shell_gets_output_errors_and_exit_codes() -> None:
    version = from_shell("--version")
    assert version.stdout.startswith("posenc 0.")
    assert (version.returncode, version.stderr) == (0, "")
    wrong = from_shell("show", "alibbi")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "Did you mean 'alibi'" in wrong.stderr
    assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_outputs_in_an_encoding_without_all_characters(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(*arguments: str) -> str:
        written = io.BytesIO()
        monkeypatch.setattr(sys, "argv", ["posenc", *arguments])
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
        with pytest.raises(SystemExit, match=r"^0$"):
            run()
        sys.stdout.flush()
        return written.getvalue().decode(encoding)

    assert ("θ_t" if encoding == "utf-8" else "?_t") in printed("show", "rope")
    assert json.loads(printed("list", "--json")) == json.loads(posenc("list", "--json").stdout)


def test_version_and_help() -> None:
    assert posenc("--version").stdout.startswith("posenc 0.")
    for command in ("list", "show", "gallery", "tasks", "compare", "generate"):
        told = posenc(command, "--help").stdout
        assert "Examples:" in told
        assert f"posenc {command}" in told


def test_options_of_the_wrong_type_are_refused_in_words() -> None:
    done = posenc("show", "rope", "-o", "base=abc")
    assert done.returncode != 0
    assert "base: expected a finite number" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
