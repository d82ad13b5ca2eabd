"""A shared comparison whose processes are killed and suspended; benchmarks have the long form."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.killed_sweeps import KILLS, Sweep, require_equal, tiny

from posenc.lab.experiments.compare import compare, prepare
from tests.support.processes import forking


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="it finds workers by /proc")
def test_no_run_is_lost_or_done_twice(tmp_path: Path) -> None:
    settings = replace(tiny(tmp_path / "undisturbed", seeds=2), steps=60)
    whole = compare(replace(settings, workers=None))
    out = tmp_path / "disturbed"
    prepare(replace(settings, out=out))
    sweep = Sweep(out, forking(), random.Random(4), processes=2)
    sweep.run(kinds=KILLS, longest=0.5)
    assert sweep.killed
    require_equal(sweep, whole, settings.out)
