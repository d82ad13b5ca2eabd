"""Interleaved timing, for ratios on a shared machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Entrant:
    """A timed call.

    Args:
        run: runs it once.
        rounds: number of rounds, from the first on.
        calls: repetitions in a round; times are divided by it.
    """

    run: Callable[[], object]
    rounds: int
    calls: int = 1


def interleaved(entrants: Mapping[str, Entrant], *, device: str) -> dict[str, list[float]]:
    """Seconds per call of every entrant and round; each round runs all of them in turn.

    The order is reversed in every other round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in entrants}
    for round_ in range(max((entrant.rounds for entrant in entrants.values()), default=0)):
        due = [name for name, entrant in entrants.items() if round_ < entrant.rounds]
        for name in reversed(due) if round_ % 2 else due:
            seconds[name].append(_time(entrants[name], device))
    return seconds


def median_ratio(mine: list[float], base: list[float]) -> float:
    """Median over rounds of the ratio of times in the same round."""
    return statistics.median(a / b for a, b in zip(mine, base, strict=False))


def _time(entrant: Entrant, device: str) -> float:
    _wait(device)
    began = time.perf_counter()
    for _ in range(entrant.calls):
        entrant.run()
    _wait(device)
    return (time.perf_counter() - began) / entrant.calls


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
