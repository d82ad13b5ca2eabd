"""Damaged and malicious files end in posenc's own errors, quickly and without taking memory."""

from __future__ import annotations

from pathlib import Path

from tests.hostile.hostile_files import run
from tests.hostile.hostile_targets import make_targets


def test_damaged_files_are_refused_in_posencs_words(tmp_path: Path) -> None:
    failures = run(make_targets(tmp_path / "whole"), count=400, seed=1, work=tmp_path)
    assert not failures
