"""Studies made up from losses and needles found, to test what is said of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from posenc.lab.evaluation.results import Findings, Study, StudyReading
from posenc.lab.evaluation.suites.needles import ByteNeedles, letters
from posenc.lab.evaluation.suites.next_token import NextTokenSuite
from posenc.lab.experiments.corpus import Pieces
from tests.support.samples import studied

STRETCHES = 64
RULER = NextTokenSuite(
    torch.zeros(64), Pieces((64,)), (16, 32), ByteNeedles(), letters(), seed=0, windows=1
)
NOISE = [0.01 * ((7 * n) % 5 - 2) for n in range(STRETCHES)]


def reading(loss: float, found: float = 0.5, spread: float = 0.0) -> StudyReading:
    """Each stretch costs ``loss``, more or less, as all others do; ``spread`` is its own."""
    own = [spread * (1 if n % 2 else -1) for n in range(STRETCHES)]
    each = tuple(loss + noise + mine for noise, mine in zip(NOISE, own, strict=True))
    measured = {"needles": {16: (0.9,), 32: (found,)}, "copied": {16: 0.9, 32: 0.9}}
    return StudyReading(
        loss={16: 2.0, 32: loss},
        by_position=((4.0, 2.0),),
        per_second=1.0,
        peak_memory_bytes=1,
        pieces={"loss": {32: each}},
        **measured,
    )


def study(**readings: StudyReading) -> Study:
    baselines = ("direct", "window")
    findings = tuple(
        Findings(
            key=key,
            role="baseline" if key in baselines else "method",
            writable=key not in (*baselines, "segments"),
            advice=(f"{key} has a ramp.",) if key == "yarn" else (),
            untuned=each,
        )
        for key, each in readings.items()
    )
    chances = {"chance": 0.06, "copy_chance": 0.04}
    facts = studied(RULER, (16, 32), factor=2.0, parameters=1, **chances)
    return Study(guide="", depths=(0.5,), findings=findings, **facts)


def blind(
    readings: Mapping[str, StudyReading], first: float = 0.06, last: float = 0.06
) -> dict[str, StudyReading]:
    """The same with these shares of needles found, by default no more than by chance."""
    needles = {16: (first,), 32: (last,)}
    return {key: replace(each, needles=needles) for key, each in readings.items()}


BASE = {"direct": reading(4.0, 0.1), "window": reading(2.4, 0.05)}
