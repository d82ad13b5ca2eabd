"""Time of each backend over sizes, dtypes and layouts: the measurements behind ``auto``.

python -m benchmarks.dispatch

Processor time of one thread, the median over alternating rounds, in microseconds; `auto` is the
backend that `posenc.explain` names, and its excess the factor over the fastest. Writes
``benchmarks/results/dispatch.json``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from benchmarks.measuring import write_results

import posenc
from posenc.errors import PosencError
from posenc.grid import Grid
from posenc.layout import Layout

BACKENDS = ("native", "sdpa", "blockwise", "reference")
HEAD_DIM = 64
LEAST_SECONDS = 0.004

ROWS = (*((1, 8, n) for n in (64, 128, 256, 512, 1024, 2048)), (16, 12, 64), (16, 12, 128))
"""Batch, heads and length."""

ENCODINGS = ("nope", "alibi", "t5", "shaw", "deberta", "swin", "decomposed2d", "forgetting", "cope")
IMAGES = ("swin", "decomposed2d")
CAUSAL = ("forgetting",)
DECODED = (256, 1024, 4096)
LAST = {"decode": (1, 1), "grouped": (1, 4), "draft": (8, 4)}
"""New tokens after many by layout, and heads that share keys."""


@dataclass(frozen=True)
class Case:
    """One call of attention; ``layout`` is ``full``, ``causal``, ``packed`` or one of ``LAST``."""

    encoding: str
    batch: int
    heads: int
    length: int
    layout: str
    dtype: torch.dtype

    def backends(self) -> tuple[dict[str, Callable[[], torch.Tensor]], list[torch.Tensor], str]:
        """Calls by backend, the tensors whose gradients are wanted, and the choice of ``auto``."""
        torch.manual_seed(0)
        where, causal = self._layout(), self.layout in ("causal", *LAST)
        options = {}
        if self.encoding in IMAGES and where.extent is not None:
            valid = posenc.ENCODINGS[self.encoding].options()
            options = {name: where.extent for name in ("window", "size") if name in valid}
        width = self.heads * HEAD_DIM
        encoding = posenc.create(
            self.encoding,
            dim=width,
            heads=self.heads,
            head_dim=HEAD_DIM,
            max_length=self.length,
            causal=causal,
            **options,
        ).to(self.dtype)
        for part in encoding.parts():
            part.attach(*(torch.nn.Linear(width, width).to(self.dtype) for _ in range(2)))
        queries, sharing = LAST.get(self.layout, (self.length, 1))
        groups = self.heads // sharing
        q, k, v = (
            torch.randn(self.batch, heads, n, HEAD_DIM).to(self.dtype).requires_grad_()
            for heads, n in ((self.heads, queries), (groups, self.length), (groups, self.length))
        )
        seen = encoding.observe(torch.randn(self.batch, self.length, width).to(self.dtype), where)
        last = seen if queries == self.length else seen.slice(self.length - queries, self.length)
        grid = Grid(last, seen, causal)
        calls = {}
        for name in BACKENDS:
            try:
                posenc.explain(q, k, v, grid, encoding, backend=name)
            except PosencError:
                continue

            def call(name: str = name) -> torch.Tensor:
                return posenc.attend(q, k, v, grid, encoding, backend=name)

            calls[name] = call
        chosen = posenc.explain(q, k, v, grid, encoding).backend
        return calls, [q, k, v, *(p for p in encoding.parameters() if p.requires_grad)], chosen

    def _layout(self) -> Layout:
        if self.encoding in IMAGES:
            height = 2 ** ((self.length.bit_length() - 1) // 2)
            return Layout.image(height, self.length // height)
        if self.layout == "packed":
            return Layout.packed([self.length // 3, self.length - self.length // 3])
        return Layout.sequence(self.length)


def measure(case: Case, *, backward: bool, rounds: int) -> dict[str, object]:
    """Microseconds by backend, and the choice of ``auto``."""
    with torch.set_grad_enabled(backward):
        calls, wanted, chosen = case.backends()

    def once(name: str) -> float:
        began = time.process_time()
        with torch.set_grad_enabled(backward):
            output = calls[name]()
        if backward:
            torch.autograd.grad(output.sum(), wanted, allow_unused=True)
        return time.process_time() - began

    first = {name: min(once(name), once(name)) for name in calls}
    best = min(min(once(name) for _ in range(2)) for name in calls if first[name] < 1.0)
    kept = [name for name in calls if first[name] < 20 * best + 0.05 or name == chosen]
    counts = {name: max(1, min(40, round(LEAST_SECONDS / max(best, 1e-5)))) for name in kept}
    seconds: dict[str, list[float]] = {name: [] for name in kept}
    for round_ in range(rounds):
        for name in reversed(kept) if round_ % 2 else kept:
            seconds[name].append(min(once(name) for _ in range(counts[name])))
    times = {name: round(1e6 * statistics.median(found), 1) for name, found in seconds.items()}
    return {
        "encoding": case.encoding,
        "shape": [case.batch, case.heads, case.length],
        "layout": case.layout,
        "dtype": str(case.dtype).removeprefix("torch."),
        "passes": "both" if backward else "forward",
        "microseconds": times,
        "auto": chosen,
        "excess": round(times[chosen] / min(times.values()), 2),
    }


def cases(encodings: list[str], dtypes: list[str], layouts: list[str]) -> Iterator[Case]:
    """All cases: those of a layout that an encoding does not have are left out."""
    for dtype in dtypes:
        for encoding in encodings:
            for layout in layouts:
                if layout in LAST:
                    if encoding in IMAGES:
                        continue
                    heads = 8 * LAST[layout][1]
                    rows: tuple[tuple[int, int, int], ...] = tuple((1, heads, n) for n in DECODED)
                elif (encoding in IMAGES and layout != "full") or (
                    encoding in CAUSAL and layout == "full"
                ):
                    continue
                else:
                    rows = ROWS
                for batch, heads, length in rows:
                    yield Case(encoding, batch, heads, length, layout, getattr(torch, dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description="Backends over sizes, dtypes and layouts.")
    parser.add_argument("--encodings", nargs="*", default=list(ENCODINGS))
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--layouts", nargs="*", default=["full", "causal", "packed", *LAST])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="dispatch")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in cases(given.encodings, given.dtypes, given.layouts):
        for backward in (False,) if case.layout in LAST else (False, True):
            row = measure(case, backward=backward, rounds=given.rounds)
            rows.append(row)
            print(*(row[name] for name in row), flush=True)
            write_results(given.name, rows, head_dim=HEAD_DIM, rounds=given.rounds)


if __name__ == "__main__":
    main()
