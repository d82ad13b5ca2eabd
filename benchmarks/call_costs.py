"""Time of a call by stage: checks, plan, operands, kernel, autograd.

    python -m benchmarks.call_costs
    python -m benchmarks.call_costs --lengths 16 --batches 1 --subjects attend:t5 --training
    python -m benchmarks.call_costs --lengths 512 --batches 1 --subjects every --dtype bfloat16

Processor time of one thread, in microseconds: medians over calls, each stage without those inside
it. Checks are those of arguments; plan, the choice of a backend; operands, what encodings lower to
and records of kernels; kernel, what backends compute, by definition too; autograd, the
backward pass without the kernels. The rest of the call is Python between them, projections of
layers included; beside all of it, the multiple of its kernel. ``every`` stands for calls of all
encodings that attention reads, of images where positions have two axes. Clocks cost about a
microsecond a stage. Writes ``benchmarks/results/call_costs.json``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any

import torch
from benchmarks.engine_models import MODELS
from benchmarks.measuring import table, write_results
from torch import Tensor

import posenc
from posenc.attention import Attention, Plan, api, call, dispatch
from posenc.attention.backends import native
from posenc.attention.backends.common import flash_cpu, fused
from posenc.attention.backends.native import arguments, library, posing
from posenc.encoding import prepared
from posenc.lab.bench.passes import Case
from posenc.transformers import accelerate

HEADS, HEAD_DIM = 12, 64
WIDTH = HEADS * HEAD_DIM

ATTENDED = ("nope", "rope", "alibi", "t5", "shaw", "deberta", "tupe", "transformer_xl")
LAYERS = ("rope", "t5")
ACCELERATED = ("deberta_v2", "mpnet", "t5")
SUBJECTS = (
    *(f"attend:{name}" for name in ATTENDED),
    *(f"layer:{name}" for name in LAYERS),
    *(f"model:{name}" for name in ACCELERATED),
)
EVERY = tuple(
    f"attend:{name}"
    for name, entry in posenc.ENCODINGS.items()
    if set(entry.claims.sites) - {"embedding"}
    and (entry.claims.serves(1) or entry.claims.serves(2))
)
"""Calls of all encodings of text or images that attention reads."""

STAGES: dict[str, tuple[tuple[Any, str], ...]] = {
    "checks": ((api, "validate"), (api, "_kind_of"), (prepared.States, "hold")),
    "plan": ((api, "choose"), (dispatch, "preparing")),
    "operands": (
        (call.Call, "_lower"),
        (posing, "record_of"),
        (arguments.Arguments, "__init__"),
        (native, "_prepare"),
    ),
    "kernel": (
        (Plan, "run"),
        (library.Library, "call"),
        (fused, "scaled_dot_product_attention"),
        (flash_cpu, "_FORWARD"),
    ),
    "autograd": ((torch.autograd, "backward"),),
}
"""Functions of each stage, by owner and name."""


class Clock:
    """Seconds by stage, each without the stages inside it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._inside: list[float] = []

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted to a stage."""

        @wraps(function)
        def run(*given: Any, **options: Any) -> Any:
            self._inside.append(0.0)
            start = time.thread_time()
            try:
                return function(*given, **options)
            finally:
                whole = time.thread_time() - start
                self.spent[stage] += whole - self._inside.pop()
                if self._inside:
                    self._inside[-1] += whole

        return run


@contextmanager
def watched(clock: Clock) -> Iterator[None]:
    """Count the time of all functions of ``STAGES``."""
    places = [(stage, *place) for stage, found in STAGES.items() for place in found]
    before = [(owner, name, getattr(owner, name)) for _, owner, name in places]
    for (stage, owner, name), (*_, function) in zip(places, before, strict=True):
        setattr(owner, name, clock.timed(stage, function))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def subject(name: str, batch: int, length: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """A call of ``attend``, of a layer or of an accelerated model of one layer."""
    torch.manual_seed(0)
    kind, _, of = name.partition(":")
    if kind == "model":
        entry = MODELS[of]
        model = entry.make(1).eval().to(dtype)
        accelerate(model, check=False)
        rows = [entry.inputs(length) for _ in range(batch)]
        inputs = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
        return lambda: model(**inputs)[0]
    case = Case(
        encoding=of,
        length=length,
        causal=posenc.ENCODINGS[of].claims.causal_only,
        batch=batch,
        heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=str(dtype).removeprefix("torch."),
    ).build()
    encoding = case.encoding.eval()
    if kind == "layer":
        layer = Attention(dim=WIDTH, heads=HEADS, encoding=encoding).eval().to(dtype)
        return lambda: layer(case.x, case.layout)
    with torch.no_grad():  # signals are not the call's to compute
        grid = case.grid
    results = posenc.Prepared()

    def attend() -> Tensor:
        with results:
            return posenc.attend(case.q, case.k, case.v, grid, encoding)

    return attend


def measure(run: Callable[[], Tensor], *, training: bool, rounds: int) -> dict[str, float]:
    """Median microseconds of a call by stage, and of all of it."""
    readings: list[dict[str, float]] = []
    for turn in range(rounds + 3):  # the first calls prepare the others
        clock = Clock()
        with watched(clock), torch.set_grad_enabled(training):
            start = time.thread_time()
            output = run()
            if training:
                torch.autograd.backward(output.square().mean())
            whole = time.thread_time() - start
        if turn >= 3:
            rest = whole - sum(clock.spent.values())
            readings.append(clock.spent | {"rest": rest, "all": whole})
    return {key: 1e6 * statistics.median(one[key] for one in readings) for key in readings[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--subjects", nargs="+", choices=("every", *SUBJECTS, *EVERY), default=SUBJECTS
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=(16, 128, 512))
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 16, 64))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--training", action="store_true", help="forward and backward")
    parser.add_argument("--seconds", type=float, default=1.0, help="about, for each row")
    parser.add_argument("--name", default="call_costs", help="of the file in results")
    options = parser.parse_args()
    torch.set_num_threads(1)  # so that the thread's clock is that of the work
    rows: list[dict[str, Any]] = []
    groups = (EVERY if name == "every" else (name,) for name in options.subjects)
    for name in chain.from_iterable(groups):
        for length in options.lengths:
            for batch in options.batches:
                run = subject(name, batch, length, getattr(torch, options.dtype))
                once = measure(run, training=options.training, rounds=1)["all"] / 1e6
                rounds = max(3, min(200, int(options.seconds / once)))
                found = measure(run, training=options.training, rounds=rounds)
                key = {"subject": name, "batch": batch, "length": length}
                rows.append(key | {"rounds": rounds} | found)
    columns = (*STAGES, "rest", "all")
    lines = [
        (
            *(row["subject"], f"{row['batch']} x {row['length']}"),
            *(f"{row[column]:,.0f}" for column in columns),
            f"{row['all'] / row['kernel']:.2f}" if row["kernel"] else "–",
        )
        for row in rows
    ]
    print(table(("subject", "batch x tokens", *columns, "x kernel"), lines))
    write_results(options.name, rows, training=options.training, dtype=options.dtype)


if __name__ == "__main__":
    main()
