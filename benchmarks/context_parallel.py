"""Time, memory and bytes of attention over ranks: a plan, and what two and four processes measure.

python -m benchmarks.context_parallel plan      # 8k … 4M tokens on 1 … 4,096 devices, and the chart
python -m benchmarks.context_parallel measure   # predictions beside 2 and 4 gloo processes here
python -m benchmarks.context_parallel memory    # memory of a rank, 16k tokens, 1, 2, 4 processes

Writes ``benchmarks/results/context_parallel_*.json`` and ``context_parallel.svg``. Published rates:
989 TFLOP/s of an H100's dense bfloat16 products and 400 Gbit/s InfiniBand a GPU (NVIDIA's H100 and
DGX H100 data sheets), of which FlashAttention-2 reaches 35 % (Shah et al. 2024,
https://arxiv.org/abs/2407.08608). posenc's own kernels have not been timed on GPUs for this plan.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.attention.memory import SEPARATE_BLOCKS
from benchmarks.measuring import RESULTS, write_results
from torch.multiprocessing.spawn import start_processes

from posenc import Layout, create, distributed
from posenc.distributed.group import Group
from posenc.lab.training.machine import PeakMemory

FORMS = ("ring", "gather", "heads")

SIZE = "datum.value < 1048576 ? datum.value / 1024 + 'k' : datum.value / 1048576 + 'M'"
"""A number of tokens on an axis."""


@dataclass(frozen=True)
class Rates:
    """Rates of a device and its link.

    Args:
        compute: operations a second, of attention.
        link: bytes a second, each way.
        latency: seconds a message.
    """

    compute: float
    link: float
    latency: float


H100 = Rates(compute=0.35 * 989e12, link=50e9, latency=10e-6)


@dataclass(frozen=True)
class Layer:
    """Causal attention of one layer.

    Args:
        tokens, heads, kv_heads, head_dim: L, H, G and D.
        width: bytes of a feature.
    """

    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    width: int = 2

    def operations(self, pairs: float, *, backward: bool) -> float:
        """Two products a pair forward, five backward."""
        return (10 if backward else 4) * self.heads * self.head_dim * pairs

    def keys(self, tokens: float) -> float:
        """Bytes of keys and values."""
        return 2 * self.kv_heads * self.head_dim * self.width * tokens

    def queries(self, tokens: float) -> float:
        """Bytes of queries and outputs."""
        return 2 * self.heads * self.head_dim * self.width * tokens


@dataclass(frozen=True)
class Cost:
    """Of one rank, forward and backward.

    Args:
        seconds: from the first rank's begin to the last one's end.
        compute: seconds of them in which it computes.
        sent: bytes that it sends.
        memory: bytes that it needs at once: queries, keys, values, outputs, all gradients and what
            travels, without parameters and the kernels' own buffers.
    """

    seconds: float
    compute: float
    sent: float
    memory: float


def simulate_ring(
    work: Callable[[int, int], float], ranks: int, transfer: float, sums: float = 0.0
) -> float:
    """Seconds until all ranks have met all blocks; sends go on while blocks are computed.

    Args:
        work: seconds that a rank computes with a block, by both numbers.
        transfer: seconds of a block; sums: of its gradients, which wait for the computation.
    """
    now = [0.0] * ranks
    for step in range(ranks):
        last = step + 1 == ranks
        done = [now[r] + work(r, (r - step) % ranks) for r in range(ranks)]
        # A transfer begins when both sides have posted it.
        arrived = [0.0 if last else max(now[r], now[r - 1]) + transfer for r in range(ranks)]
        now = [max(done[r], arrived[r]) for r in range(ranks)]
        if sums:
            summed = [max(done[r], done[r - 1]) + sums for r in range(ranks)]
            now = summed if last else now
    return max(now)


def cost(layer: Layer, ranks: int, form: str, rates: Rates) -> Cost | None:
    """Cost of head–tail shards; None where the heads do not divide."""
    pairs = layer.tokens**2 / 2 / ranks
    share = layer.tokens / ranks
    compute = [layer.operations(pairs, backward=b) / rates.compute for b in (False, True)]
    own = 2 * (layer.queries(share) + layer.keys(share))
    if form == "gather":
        sent = 2 * layer.keys(share) * (ranks - 1)
        seconds = sum(compute) + sent / rates.link + 2 * (ranks > 1) * rates.latency * ranks
        return Cost(seconds, sum(compute), sent, own + 2 * layer.keys(layer.tokens) * (ranks > 1))
    if form == "heads":
        if layer.heads % ranks:
            return None
        groups = max(layer.kv_heads, ranks) / layer.kv_heads
        moved = layer.queries(share) + groups * layer.keys(share)
        sent = 2 * moved * (ranks - 1) / ranks
        seconds = sum(compute) + sent / rates.link + 8 * (ranks > 1) * rates.latency * ranks
        return Cost(seconds, sum(compute), sent, own + 2 * moved * (ranks > 1))
    block = layer.keys(share)
    sums = block * 4 / layer.width  # gradients of a block travel in float32
    steps = [part / ranks for part in compute]
    block_time, sums_time = (x / rates.link + rates.latency for x in (block, sums))
    if ranks == 1:
        return Cost(sum(compute), sum(compute), 0.0, own)
    seconds = simulate_ring(lambda rank, block: steps[0], min(ranks, 64), block_time)
    seconds += simulate_ring(
        lambda rank, block: max(steps[1], block_time + sums_time), min(ranks, 64), 0.0, sums_time
    )
    seconds *= max(1.0, ranks / 64)  # all steps are alike
    sent = block * (2 * ranks - 2) + sums * ranks
    return Cost(seconds, sum(compute), sent, own + 2 * block + 2 * sums)


LENGTHS = tuple(2**n for n in range(13, 23, 1))
DEVICES = (1, 4, 16, 64, 256, 1024, 4096)


def plan() -> None:
    """Write the table of all lengths, devices and forms, and the chart of the best form."""
    rows: list[dict[str, object]] = []
    for tokens in LENGTHS:
        for ranks in DEVICES:
            for form in FORMS:
                found = cost(Layer(tokens), ranks, form, H100)
                if found is None or ranks * 128 > tokens:
                    continue
                rows.append({"tokens": tokens, "devices": ranks, "form": form} | vars(found))
    print(write_results("context_parallel_plan", rows, rates=vars(H100), layer=str(Layer(0))))
    import altair as alt
    import vl_convert

    shown = [
        {
            "tokens": row["tokens"],
            "devices": f"{row['devices']} devices",
            "form": row["form"],
            "share of time computing": row["compute"] / row["seconds"],  # type: ignore[operator]
        }
        for row in rows
        if row["devices"] in (4, 16, 64, 256)
    ]
    chart = (
        alt.Chart(alt.Data(values=shown))
        .mark_line(point=True)
        .encode(
            x=alt.X("tokens:Q", scale=alt.Scale(type="log", base=2), axis=alt.Axis(labelExpr=SIZE)),
            y=alt.Y("share of time computing:Q", scale=alt.Scale(domain=[0, 1])),
            color="form:N",
            facet=alt.Facet(
                "devices:N", columns=2, title=None, sort=[f"{n} devices" for n in (4, 16, 64, 256)]
            ),
        )
        .properties(width=330, height=180)
    )
    svg = vl_convert.vegalite_to_svg(chart.to_dict(validate=False))
    (RESULTS / "context_parallel.svg").write_text(svg)


def attend_once(
    group: dist.ProcessGroup, layer: Layer, form: str, window: int | None
) -> tuple[float, int, int]:
    """A forward and a backward pass of T5's bias over this rank's tokens.

    Returns:
        seconds, bytes of the inputs and the output's gradient, and the peak of bytes beside them.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(rank)
    index = distributed.balanced(layer.tokens, ranks, rank)
    layout = distributed.take(Layout.sequence(layer.tokens), index)
    encoding = create("t5", heads=layer.heads, causal=True)
    counts = (layer.heads, layer.kv_heads, layer.kv_heads)
    q, k, v = (torch.randn(1, n, len(index), layer.head_dim).requires_grad_() for n in counts)
    gradient = torch.randn_like(q)
    peak = PeakMemory(q.device)
    dist.barrier(group)
    begin = time.perf_counter()
    options: dict[str, Any] = {"mesh": group, "causal": True, "window": window, "form": form}
    output = distributed.attend(q, k, v, layout, encoding, **options)
    torch.autograd.grad(output, [q, k, v, *encoding.parameters()], gradient)
    dist.barrier(group)
    return time.perf_counter() - begin, sum(x.nbytes for x in (q, k, v, gradient)), peak.used()


def link_of(group: dist.ProcessGroup) -> tuple[float, float]:
    """Bytes a second and seconds a message, of a shift around the ring."""
    ring, found = Group.of(group), []
    for size in (1, 2**22):
        x, times = torch.zeros(size), []
        for _ in range(5):
            dist.barrier(group)
            begin = time.perf_counter()
            ring.shift([x], [torch.empty_like(x)])()
            times.append(time.perf_counter() - begin)
        found.append(statistics.median(times))
    return 4 * 2**22 / max(found[1] - found[0], 1e-9), found[0]


ROUNDS = 3
"""Measurements of one kind, in the same processes."""

WINDOW = 1024
"""Keys that a query sees where memory is measured: it takes the same tensors in less time."""


def worker(rank: int, ranks: int, store: str, layer: Layer, form: str, window: int | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}/store", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None  # it was made above
    attend_once(group, replace(layer, tokens=256 * ranks), form, window)
    rounds = [attend_once(group, layer, form, window) for _ in range(ROUNDS)]
    link = link_of(group) if ranks > 1 else (0.0, 0.0)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, rounds)
    if rank == 0:
        torch.save((everyone, link), f"{store}/result")
    dist.destroy_process_group()


def on(
    ranks: int, layer: Layer, form: str, window: int | None = None
) -> tuple[list[Any], tuple[float, float]]:
    """Results of ``attend_once`` on every rank in every round, and rates of the link."""
    with tempfile.TemporaryDirectory() as store:
        start_processes(worker, (ranks, store, layer, form, window), ranks, start_method="spawn")  # type: ignore[no-untyped-call]
        result: tuple[list[Any], tuple[float, float]] = torch.load(Path(store) / "result")
    return result


def median_seconds(rounds: list[Any]) -> float:
    return statistics.median(seconds for seconds, *_ in rounds[0])


def measure(tokens: int, cores: int) -> None:
    """Predictions beside measurements; the rate of computing is that of one process."""
    rows: list[dict[str, object]] = []
    layer = Layer(tokens, 4, 2, 64, 4)
    alone = median_seconds(on(1, layer, "gather")[0])
    pairs = tokens**2 / 2
    rate = sum(layer.operations(pairs, backward=b) for b in (False, True)) / alone
    for ranks in (2, 4):
        for form in FORMS:
            rounds, (link, latency) = on(ranks, layer, form)
            seconds = median_seconds(rounds)
            rates = Rates(rate * min(1.0, cores / ranks), link, latency)
            predicted = cost(layer, ranks, form, rates)
            assert predicted is not None  # four heads divide
            row = {"ranks": ranks, "form": form, "seconds": seconds}
            rows.append(row | {"predicted": predicted.seconds, "alone": alone, "link": link})
            print(rows[-1])
    print(write_results("context_parallel_measured", rows, tokens=tokens, cores=cores, rate=rate))


def memory(tokens: int) -> None:
    """Memory of the rank that needs most, in MiB: its inputs, and the peak beside them."""
    os.environ |= SEPARATE_BLOCKS  # of the processes that are started
    rows: list[dict[str, object]] = []
    layer = Layer(tokens, 8, 2, 64, 4)
    for form in FORMS:
        for ranks in (1, 2, 4):
            everyone, _ = on(ranks, layer, form, WINDOW)
            rounds = [
                max(peak for _, _, peak in several) for several in zip(*everyone, strict=True)
            ]
            inputs = max(size for several in everyone for _, size, _ in several)
            predicted = cost(layer, ranks, form, H100)
            assert predicted is not None  # eight heads divide
            found = {
                "inputs": inputs,
                "beside": statistics.median(rounds),
                "least": min(rounds),
                "most": max(rounds),
                "predicted": predicted.memory - inputs,
            }
            rows.append({"form": form, "ranks": ranks} | {k: x / 2**20 for k, x in found.items()})
            print(rows[-1], flush=True)
            settings = {"tokens": tokens, "window": WINDOW, "rounds": ROUNDS, "layer": str(layer)}
            path = write_results("context_parallel_memory", rows, **settings)
    print(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["plan", "measure", "memory"])
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--cores", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.task == "plan":
        plan()
    elif chosen.task == "measure":
        measure(chosen.tokens or 4096, chosen.cores)
    else:
        memory(chosen.tokens or 16384)
