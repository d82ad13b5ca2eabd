"""Processes of a shared comparison, started by submitit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from posenc.errors import ArgumentError, OutputError
from posenc.lab.experiments.launch import launch
from posenc.lab.experiments.settings import ComparisonSettings

pytest.importorskip("submitit")


def tiny(folder: Path) -> ComparisonSettings:
    return ComparisonSettings(
        out=folder / "out",
        task="copy",
        encodings=("rope", "alibi"),
        references=(),
        train_length=8,
        test_lengths=(16,),
        steps=3,
        seeds=(0,),
        width=16,
        layers=1,
        heads=2,
        batch=2,
        workers=1,
    )


@pytest.mark.long
def test_local_process_joins_a_comparison(tmp_path: Path) -> None:
    settings = tiny(tmp_path)
    (job,) = launch(settings, cluster="local", options={"timeout_min": 5})
    assert job.result() is True
    comparison = json.loads((settings.out / "report" / "comparison.json").read_text())
    assert comparison["complete"]
    assert {run["subject"] for run in comparison["runs"]} == {"rope", "alibi"}
    assert (settings.out / "report" / "index.html").exists()
    with pytest.raises(OutputError, match=r"which exists.*--resume"):
        launch(settings, cluster="local", options={})


def test_launch_without_a_cluster_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    settings = tiny(tmp_path)
    with pytest.raises(ArgumentError, match=r"srun.*login node"):
        launch(settings, cluster="slurm", options={})
    with pytest.raises(ArgumentError, match="slurm or local"):
        launch(settings, cluster="cloud", options={})
    with pytest.raises(ArgumentError, match=r"budget_minutes.*--steps"):
        launch(replace(settings, steps=None, budget_minutes=3.0), cluster="local", options={})
    with pytest.raises(ArgumentError, match=r"launch_option.*partitoin"):
        launch(settings, cluster="local", options={"partitoin": "gpu"})
    assert not settings.out.exists()
