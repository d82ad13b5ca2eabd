"""``posenc bench``: what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posenc.errors import ArgumentError, UnknownNameError
from posenc.lab.bench.passes import Times
from posenc.lab.bench.run import BenchReading, BenchReport, BenchSettings
from posenc.lab.cli import bench as command
from posenc.lab.cli.app import app
from posenc.lab.cli.console import OUT

TINY = [
    *("bench", "--quick", "--encodings", "t5,cope", "--lengths", "16"),
    *("--heads", "2", "--head-dim", "8", "--rounds", "1", "--threads", "1"),
]


def test_bench_prints_ratios_and_writes_results(tmp_path: Path) -> None:
    out = tmp_path / "bench"
    done = CliRunner().invoke(app, [*TINY, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "cope, 16 causal" in done.stdout
    assert "plain SDPA" in done.stdout
    assert "1.00" in done.stdout
    assert "t5, 16 tokens" in done.stderr
    assert json.loads((out / "bench.json").read_text())["settings"]["rounds"] == 1


def test_bench_as_json_prints_nothing_else() -> None:
    done = CliRunner().invoke(app, [*TINY, "--json"], catch_exceptions=False)
    assert done.stderr == ""
    printed = json.loads(done.stdout)
    assert set(printed["verdicts"]) == {"t5", "cope"}
    assert {r["contender"] for r in printed["readings"]} == {"plain SDPA", "posenc"}


@pytest.mark.parametrize(("options", "rounds"), [([], 7), (["--quick"], 3)])
def test_a_quick_bench_has_fewer_rounds(
    options: list[str], rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[BenchSettings] = []

    def run(settings: BenchSettings, progress: object) -> BenchReport:
        found.append(settings)
        about = {"device": "cpu", "versions": {}}
        return BenchReport(settings=settings, about=about, seconds=0.0, readings=())

    monkeypatch.setattr("posenc.lab.bench.run.bench", run)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    done = CliRunner().invoke(app, ["bench", *options], catch_exceptions=False)
    assert done.exit_code == 0
    assert [settings.rounds for settings in found] == [rounds]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (["--lengths", "1k"], ArgumentError),
        (["--encodings", "ropee"], UnknownNameError),
        (["--device", "cuda:99"], ArgumentError),
    ],
)
def test_bench_refuses_before_it_writes(
    options: list[str], kind: type[Exception], tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["bench", *options, "--out", str(tmp_path / "none")])
    assert type(done.exception) is kind
    assert not (tmp_path / "none").exists()


def test_nothing_is_cut_off_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OUT, "_width", 80)
    readings = tuple(
        BenchReading(
            encoding="transformer_xl@frozen",
            length=131072,
            causal=True,
            dtype="bfloat16",
            contender=f"posenc {backend}",
            times=Times(forward_ratio=1.04, both_ratio=123.7),
            served_by=backend,
        )
        for backend in ("blockwise", "reference")
    )
    report = BenchReport(settings=BenchSettings(), about={}, seconds=1.0, readings=readings)
    command._print_readings(report)
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert printed.count("123.70") == 2
    assert printed.count("transformer_xl@frozen, 131072 causal bf16") == 1
    assert max(map(len, printed.splitlines())) <= 80
