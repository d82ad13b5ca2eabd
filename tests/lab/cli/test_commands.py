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

from posenc.lab.bench.passes import Times
from posenc.lab.bench.report import results_table
from posenc.lab.bench.run import BenchReading, BenchReport, BenchSettings
from posenc.lab.cli.app import run
from posenc.lab.cli.console import OUT, print_tables
from posenc.lab.users import is_used_by
from posenc.lab.visualization.catalogue import DocstringSections
from posenc.registry import ENCODINGS
from tests.support.commands import refusal
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


def succeed(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    done = posenc(*arguments)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A tiny comparison: its folder, standard output and standard error."""
    out = tmp_path_factory.mktemp("cli") / "out"
    done = succeed("compare", *QUICK, "--out", out)
    return out, done.stdout, done.stderr


def test_list_names_every_method_whole() -> None:
    for columns in (80, 160):
        done = posenc("list", columns=columns)
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


USERS = {
    "axial_rope": "Wan, flux, Qwen-Image, LTX, CogVideoX, hunyuan video, Mochi, cosmos, Lumina, "
    "dino v3",
    "conv": "Wav2Vec2, wav2vec 2.0",
    "decomposed2d": "SAM",
    "enformer": "ENFORMER, Borzoi",
    "learned": "esm1b, RoBERTa",
    "nope": "Llama-4",
    "residue_offset": "alphafold, AlphaFold3, Boltz",
    "rope": "DeepSeek V2, deepseek_v3, llama4, Ministral3, ESM2, esm-2",
    "rotated_values": "DeepSeek V4, deepseek",
    "time_buckets": "hstu",
}


@pytest.mark.parametrize("encoding", USERS)
def test_encodings_of_models_are_found_however_spelled(encoding: str) -> None:
    assert all(is_used_by(encoding, model) for model in USERS[encoding].split(", "))
    assert not is_used_by(encoding, "SAMBA")


def test_list_knows_who_uses_an_encoding() -> None:
    listed = json.loads(posenc("list", "--used-by", "hunyuan video", "--json").stdout)
    assert [item["name"] for item in listed] == ["axial_rope"]
    assert "HunyuanVideo" in listed[0]["used_by"]


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
        succeed("show", "alibi", "--out", out)
        assert out.read_bytes().lstrip().startswith(start)
    out = tmp_path / "gallery.html"
    told = succeed("gallery", "--encodings", "nope, alibi", "--out", out).stdout
    assert f"Gallery: {out}" in told
    assert out.read_text().count("<article") == 2


def test_show_joins_encodings_and_passes_options() -> None:
    shown = succeed("show", "rope+alibi@base=100", "--option", "gain=2").stdout
    assert shown.count("options and defaults") == 2
    both = json.loads(posenc("show", "rope+alibi", "--json").stdout)
    assert [each["name"] for each in both] == ["rope", "alibi"]
    plain = succeed("show", "rope").stdout
    assert succeed("show", "rope", "--option", "base=100").stdout != plain
    for words in ("By distance", "cite", "beyond training length", "on the CPU"):
        assert words in plain
    said = refusal("show", "yarn")
    assert "posenc.extensions" in said
    assert "Did you mean" not in said


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
    told = succeed("tasks").stdout
    listed = json.loads(posenc("tasks", "--json").stdout)
    for task in listed:
        assert task["name"] in told
        assert task["expected"]
        assert task["defaults"]["test_lengths"][0] == task["defaults"]["train_length"]
    assert {"language", "copy", "scan"} <= {task["name"] for task in listed}
    assert "needle_rows = 0.25" in told


def test_compare_on_another_task(tmp_path: Path) -> None:
    options = ["--encodings", "t5,learned", "--test-lengths", "24", "--option", "symbols=8"]
    size = ["--steps", "3", "--seeds", "1", "--width", "16", "--heads", "2", "--layers", "1"]
    out = tmp_path / "out"
    told = succeed("compare", "--task", "copy", *options, *size, "--out", out).stdout
    assert "Not learned, so no verdict" in told
    assert "sinusoidal (unsorted)" in told.replace("\n", " ")
    record = json.loads((out / "report" / "comparison.json").read_text())
    assert record["task"] == "copy"
    assert record["length_unit"] == "symbols"
    assert record["provenance"]["settings"]["options"] == {"symbols": 8, "distinct": False}
    assert "Kazemnejad" in (out / "report" / "index.html").read_text()
    assert "finished before" in succeed("compare", "--resume", "--out", out).stderr


def test_compare_on_a_text_of_ones_own_that_is_no_utf8(tmp_path: Path) -> None:
    text = tmp_path / "text.bin"
    text.write_bytes(bytes(range(256)) * 400)
    out = ("--text", text, "--out", tmp_path / "out")
    assert "text.bin" in succeed("compare", *QUICK, "--seeds", "1", *out).stderr


def test_resume_of_a_finished_comparison_trains_nothing(finished: tuple[Path, str, str]) -> None:
    assert "6 finished before" in succeed("compare", "--resume", "--out", finished[0]).stderr


def test_generate_continues_a_prompt(finished: tuple[Path, str, str]) -> None:
    run = finished[0] / "runs" / "rope" / "seed-0"
    options = ["--prompt", "def ", "--max-new", "9", "--json"]
    told = json.loads(posenc("generate", run, *options).stdout)
    assert (told["prompt"], told["model"]) == ("def ", "llama")
    assert json.loads(posenc("generate", run / "model", *options).stdout) == told
    cold = succeed("generate", run, "--temperature", "0", "--max-new", "5")
    assert cold.stdout.startswith("def ")


WRONG: list[tuple[Sequence[str], str]] = [
    (["generate", "run", "--temperature", "-1"], "--temperature: expected a finite number, 0 or"),
    (["show", "rope", "--option", "base"], "NAME=VALUE"),
    (["show", "rope", "--option", "base=1"], "base"),
    (["show", "rope", "-o", "base=abc"], "base: expected a finite number"),
    (["show", "alibi", "--out", "alibi.gif"], ".png, .svg, .html"),
    (["gallery", "--encodings", "rope,sinusoidl"], "Did you mean 'sinusoidal'"),
    (["gallery", "--encodings", ","], "at least one name"),
    (["compare", "--encodings", ","], "at least one name"),
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
    (["compare", "--steps", "9", "--minutes", "3"], "both"),
    (["compare", "--width", "30"], "multiple of heads"),
    (["compare", "--device", "cuda:99"], "device"),
    (["compare", "--precision", "8"], "precision"),
    (["compare", "--text", "nowhere.txt"], "nowhere.txt"),
    (["compare", "--resume", "--replace"], "both"),
    (["compare", "--resume"], "settings.json"),
    (["generate", "nowhere", "--prompt", ""], "at least one byte"),
    (["bench", "--encodings", "ropee"], "Did you mean 'rope'"),
    (["bench", "--device", "cuda:99"], "--device"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else " ".join(x)
)
def test_wrong_input_is_one_clear_error(
    arguments: Sequence[str], message: str, tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "out")] if arguments[0] in ("compare", "bench") else []
    assert message in refusal(*arguments, *out)
    assert not (tmp_path / "out").exists()


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in posenc("--debug", "show", "alibbi").stderr


def test_texts_and_folders_that_are_unusable(tmp_path: Path) -> None:
    for name, content in (("empty.txt", b""), ("tiny.txt", b"abc")):
        (tmp_path / name).write_bytes(content)
        refusal("compare", *QUICK, "--text", tmp_path / name, "--out", tmp_path / "out")
    refusal("compare", *QUICK, "--out", tmp_path / "empty.txt" / "out")
    for option in ([], ["--replace"], ["--resume"]):
        refusal("compare", *QUICK, "--out", tmp_path, *option)
    assert {path.name for path in tmp_path.iterdir()} == {"empty.txt", "tiny.txt"}


def test_a_damaged_model_is_named(finished: tuple[Path, str, str], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in (finished[0] / "runs" / "rope" / "seed-0" / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes()[:-20])
    said = refusal("generate", model)
    assert "json" in said or "safetensors" in said


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


# posenc bench

BENCH = ["bench", "--quick", "--encodings", "t5,cope", "--lengths", "16"]
BENCH += ["--heads", "2", "--head-dim", "8", "--rounds", "1", "--threads", "1"]


def test_bench_prints_ratios_and_writes_results(tmp_path: Path) -> None:
    done = succeed(*BENCH, "--out", tmp_path / "bench")
    for words in ("cope", "plain SDPA", "training at 16"):
        assert words in done.stdout
    assert "t5, 16 tokens" in done.stderr
    written = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert written["settings"]["rounds"] == 1


def test_bench_as_json_prints_nothing_else() -> None:
    done = posenc(*BENCH, "--json")
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert set(told["verdicts"]) == {"t5", "cope"}
    assert {r["contender"] for r in told["readings"]} == {"plain SDPA", "posenc"}


@pytest.mark.parametrize(("options", "rounds"), [([], 7), (["--quick"], 3)])
def test_a_quick_bench_has_fewer_rounds(
    options: list[str], rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[BenchSettings] = []

    def bench(settings: BenchSettings, progress: object) -> BenchReport:
        found.append(settings)
        about = {"device": "cpu", "versions": {}}
        return BenchReport(settings=settings, about=about, seconds=0.0, readings=())

    monkeypatch.setattr("posenc.lab.bench.run.bench", bench)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    succeed("bench", *options)
    assert [settings.rounds for settings in found] == [rounds]


def test_nothing_is_cut_off_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OUT, "_width", 80)
    case = {"encoding": "transformer_xl@frozen", "length": 131072, "causal": True}
    case |= {"dtype": "bfloat16", "times": Times(forward_ratio=1.04, both_ratio=123.7)}
    names = ("blockwise", "reference")
    readings = tuple(BenchReading(contender=f"posenc {n}", served_by=n, **case) for n in names)
    settings = BenchSettings(lengths=(131072,), backends=names)
    report = BenchReport(settings=settings, about={}, seconds=1.0, readings=readings)
    print_tables([results_table(report)])
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert printed.count("123.70") == 2
    assert all(printed.count(f"transformer_xl@frozen · {name}") == 1 for name in names)
    assert max(map(len, printed.splitlines())) <= 80
