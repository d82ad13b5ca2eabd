"""Studies made up from losses and needles found, to test what is said of them."""

from __future__ import annotations

import torch

from posenc.lab.evaluation.results import Findings, Study, StudyReading
from posenc.lab.evaluation.suites.needles import ByteNeedles, letters
from posenc.lab.evaluation.suites.next_token import NextTokenSuite
from posenc.lab.experiments.corpus import Pieces

STRETCHES = 64
RULER = NextTokenSuite(
    torch.zeros(64), Pieces((64,)), (16, 32), ByteNeedles(), letters(), seed=0, windows=1
)
NOISE = [0.01 * ((7 * n) % 5 - 2) for n in range(STRETCHES)]


def reading(loss: float, found: float = 0.5, spread: float = 0.0) -> StudyReading:
    """Each stretch costs ``loss``, more or less, as all others do; ``spread`` is its own."""
    own = [spread * (1 if n % 2 else -1) for n in range(STRETCHES)]
    return StudyReading(
        loss={16: 2.0, 32: loss},
        by_position=((4.0, 2.0),),
        needles={16: (0.9,), 32: (found,)},
        copied={16: 0.9, 32: 0.9},
        per_second=1.0,
        peak_memory_bytes=1,
        pieces={
            "loss": {32: tuple(loss + noise + mine for noise, mine in zip(NOISE, own, strict=True))}
        },
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
    return Study(
        checkpoint="tiny",
        family="llama",
        parameters=1,
        length=16,
        factor=2.0,
        lengths=(16, 32),
        metrics=RULER.facts("byte")["metrics"],
        guide="",
        depths=(0.5,),
        unit="byte",
        needles="needles",
        chance=0.06,
        copy_chance=0.04,
        text="a text",
        sha256="",
        targets=STRETCHES,
        asked=64,
        findings=findings,
    )


BASE = {"direct": reading(4.0, 0.1), "window": reading(2.4, 0.05)}
