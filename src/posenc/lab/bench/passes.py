"""Passes of attention, and interleaved timing of them, for ratios on a shared machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from posenc.attention import Backend, attend, explain
from posenc.encoding.prepared import Prepared
from posenc.lab.bench.case import TimedCall
from posenc.lab.reporting.intervals import Bounds, Estimate, estimate

LEAST_SECONDS = 0.02
"""Shortest round; short calls are repeated."""

MOST_CALLS = 50

SHORT = 1024
"""Tokens up to which calls on the CPU may be repeated."""


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass that is ready to run.

    Args:
        run: the forward pass.
        wanted: tensors to compute gradients of; none if there is no backward pass.
        weight: gradient of the output.
        served_by: the backend or kernel, if chosen.
        tokens: that ``run`` generates; times are of one.
    """

    run: Callable[[], Tensor]
    wanted: list[Tensor]
    weight: Tensor
    served_by: str = ""
    tokens: int = 1

    def forward(self) -> None:
        """Run without a graph."""
        with torch.no_grad():
            self.run()

    def both(self) -> tuple[Tensor, ...]:
        """Run forward and backward; the gradients of ``wanted``."""
        return torch.autograd.grad(self.run(), self.wanted, self.weight, allow_unused=True)


def plain(call: TimedCall) -> Pass:
    """PyTorch's fused kernel without positions, the reference of all others."""

    def run() -> Tensor:
        return scaled_dot_product_attention(*call.inputs, is_causal=call.case.causal)

    return Pass(run, list(call.inputs), call.weight)


def attending(call: TimedCall, backend: str | Backend) -> Pass:
    """``posenc.attend`` as layers call it; BackendRefusal if the backend does not support it."""
    served_by = explain(*call.inputs, call.grid, call.encoding, backend=backend).backend
    prepared = Prepared()

    def run() -> Tensor:
        with prepared:
            return attend(*call.inputs, call.grid, call.encoding, backend=backend)

    return Pass(run, call.wanted, call.weight, served_by)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of a pass.

    Args:
        rounds: timed forward, and forward and backward.
        forward_seconds, both_seconds: medians; ``both`` is forward and backward, None if there is
            no backward pass.
        forward_ratio, both_ratio: medians of ratios to the reference in the same round.
        forward_spread, both_spread: half the 95 % interval of the mean of these ratios.
    """

    rounds: tuple[int, int] = (0, 0)
    forward_seconds: float | None = None
    both_seconds: float | None = None
    forward_ratio: float | None = None
    both_ratio: float | None = None
    forward_spread: float | None = None
    both_spread: float | None = None


def timed(
    passes: Mapping[str, Pass], rounds: Mapping[str, tuple[int, int]], *, device: str, length: int
) -> dict[str, Times]:
    """Times of every pass: rounds of all forward passes in turn, then of both.

    Args:
        passes: by name, the reference first.
        rounds: of each pass, forward, and forward and backward.
        device: where they run.
        length: tokens; short calls on the CPU are repeated in a round.
    """
    repeated = device.startswith("cuda") or length <= SHORT
    base = next(iter(passes))
    ahead_runs = {name: (one.forward, rounds[name][0]) for name, one in passes.items()}
    forward = interleaved(ahead_runs, device, repeated=repeated)
    both_runs = {name: (one.both, rounds[name][1]) for name, one in passes.items() if one.wanted}
    both = interleaved(both_runs, device, repeated=repeated)
    times = {}
    for name, one in passes.items():
        ahead, back = forward[name], both.get(name)
        alone, trained = ratio(ahead, forward[base]), ratio(back, both[base]) if back else None
        times[name] = Times(
            rounds=(len(ahead), len(back or ())),
            forward_seconds=statistics.median(ahead) / one.tokens,
            forward_ratio=alone.mean,
            forward_spread=alone.half_width,
            both_seconds=statistics.median(back) if back else None,
            both_ratio=None if trained is None else trained.mean,
            both_spread=None if trained is None else trained.half_width,
        )
    return times


def interleaved(
    entrants: Mapping[str, tuple[Callable[[], object], int]], device: str, *, repeated: bool
) -> dict[str, list[float]]:
    """Seconds per call of every entrant and round; each round runs all of them in turn.

    The order is reversed in every other round.

    Args:
        entrants: each a call, and its number of rounds from the first on.
        device: where they run.
        repeated: repeat short calls within a round.
    """
    calls = dict.fromkeys(entrants, 1)
    for name, (run, _) in entrants.items() if repeated else ():
        calls[name] = min(MOST_CALLS, math.ceil(LEAST_SECONDS / _seconds(run, 1, device)))
    seconds: dict[str, list[float]] = {name: [] for name in entrants}
    for number in range(max((rounds for _, rounds in entrants.values()), default=0)):
        due = [name for name, (_, rounds) in entrants.items() if number < rounds]
        for name in reversed(due) if number % 2 else due:
            seconds[name].append(_seconds(entrants[name][0], calls[name], device))
    return seconds


def ratio(mine: list[float], base: list[float]) -> Estimate:
    """Median over rounds of the ratio of times in the same round, with the interval of its mean."""
    ratios = [a / b for a, b in zip(mine, base, strict=False)]
    spread = estimate(ratios, Bounds(0.0))
    assert spread is not None  # a pass has at least one round
    return replace(spread, mean=statistics.median(ratios))


def _seconds(run: Callable[[], object], calls: int, device: str) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    _wait(device)
    return (time.perf_counter() - start) / calls


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
