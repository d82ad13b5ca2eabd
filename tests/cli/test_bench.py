"""``posenc bench``: what it prints and writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posenc.bench.limits import CPU, judge
from posenc.bench.results import Reading, Report
from posenc.cli import bench as command
from posenc.cli.app import app
from posenc.cli.console import OUT
from posenc.errors import ArgumentError, UnknownNameError

TINY = [
    *("bench", "--quick", "--encodings", "t5,cope", "--lengths", "16"),
    *("--heads", "2", "--head-dim", "8", "--rounds", "1", "--threads", "1"),
]


def test_bench_prints_ratios_and_writes_results(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*TINY, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "cope, 16 causal" in done.stdout
    assert "plain SDPA" in done.stdout
    assert "1.00" in done.stdout
    assert "Limits:" not in done.stdout  # these are no sizes that limits are for
    assert "t5, 16 tokens: calls" in done.stderr
    for kind in ("json", "png", "svg"):
        assert (tmp_path / f"attention_cpu.{kind}").stat().st_size > 0


def test_bench_as_json_prints_nothing_else(tmp_path: Path) -> None:
    options = [*TINY, "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, options, catch_exceptions=False)
    assert done.stderr == ""
    printed = json.loads(done.stdout)
    assert printed == json.loads((tmp_path / "attention_cpu.json").read_text())
    assert {r["contender"] for r in printed["readings"]} == {"plain SDPA", "posenc"}


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


@pytest.fixture
def report() -> Report:
    """A report with a limit met, one not met, and all others not measured."""
    cases = {"encoding": "t5", "length": 2048, "causal": False, "level": "call"}
    readings = (
        Reading(contender="plain SDPA", forward_ratio=1.0, both_ratio=1.0, **cases),  # type: ignore[arg-type]
        Reading(
            contender="posenc",
            served_by="blockwise",
            forward_ratio=1.04,
            both_ratio=1.7,
            both_memory=30_000_000,
            output_error=4e-7,
            **cases,  # type: ignore[arg-type]
        ),
        Reading(contender="FlexAttention", refusal="no backward on the CPU", **cases),  # type: ignore[arg-type]
    )
    return Report(
        date="2026-01-01",
        seconds=90.0,
        settings={"heads": 8, "head_dim": 64, "dtypes": ["float32"], "rounds": 7, "device": "cpu"},
        device="cpu",
        machine={"threads": 2},
        versions={"torch": "2.13.0"},
        readings=readings,
        verdicts=tuple(judge(CPU, readings)),
    )


def test_limits_are_printed_with_what_came_of_them(
    report: Report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("posenc.bench.run.bench", lambda settings, progress: report)
    done = CliRunner().invoke(app, ["bench", "--out", str(tmp_path)], catch_exceptions=False)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "learned tables ≤ 1.12/1.00 ≤ 1.12/1.00 ≤ 1.12/1.00 ≤ 1.12/1.00" in lines
    assert "t5 –/– –/– 1.04/1.70* –/–" in lines
    assert "ALiBi, long ≤ 0.35" in lines
    assert "extra memory ≤ 250/250" in lines
    unmeasured = len(report.verdicts) - 2
    assert f"1 of 2 limits met; * marks the others; {unmeasured} not measured." in lines
    assert "FlexAttention, for t5: no backward on the CPU." in lines
    assert any(line.startswith("cpu; 2 threads; 8 heads of 64, float32;") for line in lines)


def test_nothing_is_cut_off_in_a_narrow_terminal(
    report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OUT, "_width", 80)
    long = replace(
        report.readings[1], encoding="transformer_xl@frozen", length=131072, dtype="bfloat16"
    )
    command._print_limits(report)
    command._print_readings(replace(report, readings=(*report.readings, long)))
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "1.70*" in printed
    assert max(map(len, printed.splitlines())) <= 80
