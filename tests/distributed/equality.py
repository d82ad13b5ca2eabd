"""Jobs that compare attention on several ranks with attention on one."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, distributed
from posenc.extension import extend
from posenc.registry import ENCODINGS
from posenc.testing.subject import DIM, HEAD_DIM, HEADS, KV_HEADS, Subject, spread

LENGTH, ROWS = 26, 2

TOLERANCE, EXACT = 1e-5, 1e-10
"""Of results, and of those in float64, but for FIRE's, whose functions of positions are float32."""

LAYOUTS: dict[str, Callable[[], Layout]] = {
    "sequence": lambda: Layout.sequence(LENGTH),
    "packed": lambda: Layout.packed([11, 4, 11]),
    "padded": lambda: Layout.padded([LENGTH - 2, 15], side="left", prefix=2),
}

Split = Callable[[int, int], Tensor]


def uneven(ranks: int, rank: int) -> Tensor:
    """Random shards of consecutive tokens."""
    generator = torch.Generator().manual_seed(ranks)
    cuts = torch.randperm(LENGTH - 1, generator=generator)[: ranks - 1].sort().values + 1
    ends = [0, *cuts.tolist(), LENGTH]
    return torch.arange(ends[rank], ends[rank + 1])


def with_empty(ranks: int, rank: int) -> Tensor:
    """The second rank has no token."""
    others = [other for other in range(ranks) if other != 1]
    if rank == 1:
        return torch.arange(0)
    return distributed.contiguous(LENGTH, len(others), others.index(rank))


def scattered(ranks: int, rank: int) -> Tensor:
    """Every token on a random rank."""
    generator = torch.Generator().manual_seed(ranks)
    owners = torch.randint(ranks, (LENGTH,), generator=generator)
    return (owners == rank).nonzero().flatten()


SPLITS: dict[str, Split] = {
    "contiguous": lambda ranks, rank: distributed.contiguous(LENGTH, ranks, rank),
    "balanced": lambda ranks, rank: distributed.balanced(LENGTH, ranks, rank),
    "uneven": uneven,
    "empty": with_empty,
    "scattered": scattered,
}


@dataclass(frozen=True)
class Case:
    """A problem, and how it is spread.

    Args:
        name: of a registry entry.
        layout: of ``LAYOUTS``.
        split: of ``SPLITS``.
        form: of ``attend``.
        window: of the grid.
        dtype: of features and parameters.
        causal: of the grid.
        backend: of both.
        device: of all tensors, ``"cuda"`` for each process's own.
        capped: with sinks, a softcap and a scale.
    """

    name: str
    layout: str
    split: str
    form: str
    window: int | None = None
    dtype: torch.dtype = torch.float32
    causal: bool = True
    backend: str = "auto"
    device: str = "cpu"
    capped: bool = False

    @property
    def problem(self) -> Problem:
        """Its problem for one process."""
        of_one = (self.name, self.layout, self.window, self.dtype, self.causal, self.device)
        return Problem(*of_one, self.capped)


def subject_of(name: str) -> Subject:
    """The subject of an entry; ``"ENTRY:METHOD"`` names one that is extended."""
    entry = name.partition(":")[0]
    return Subject.of_entry(entry, ENCODINGS[entry])


def encoding_of(name: str, dtype: torch.dtype, device: str = "cpu") -> Encoding:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        encoding = subject_of(name).make()
        spread(encoding)
    if method := name.partition(":")[2]:
        encoding = extend(encoding, method, factor=4, length=LENGTH // 3)
    return encoding.to(device, dtype)


kept_encoding = lru_cache(maxsize=256)(encoding_of)


def tensors(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """q, k, v, the layer's input and the output's gradient, with tokens in dimension 2."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (1, DIM)]
    shapes.append((HEADS, HEAD_DIM))
    drawn = (
        torch.randn(ROWS, heads, LENGTH, width, generator=generator, dtype=torch.float64)
        for heads, width in shapes
    )
    return [x.to(device, dtype) for x in drawn]


Attend = Callable[..., Tensor]


def run(
    encoding: Encoding, parts: list[Tensor], layout: Layout, compute: Attend, *, capped: bool
) -> list[Tensor]:
    """The output, and gradients of q, k, v and x, tokens in dimension 2; then of parameters."""
    options: dict[str, Any] = {}
    sinks = torch.linspace(-1, 2, HEADS, dtype=parts[0].dtype, device=parts[0].device)
    if capped:
        options = {"sinks": sinks.requires_grad_(), "softcap": 1.5, "scale": 0.7}
    q, k, v, x = (part.detach().clone().requires_grad_() for part in parts[:4])
    encoding.zero_grad()
    observed = encoding.observe(x[:, 0], layout)
    output = compute(q, k, v, observed, encoding, **options)
    output.backward(parts[4])  # type: ignore[no-untyped-call]
    gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in (q, k, v, x)]
    of_parameters = [
        torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for p in (*encoding.parameters(), sinks)
    ]
    return [output.detach(), *gradients, *of_parameters]


@dataclass(frozen=True)
class Problem:
    """Arguments of attention on one process; fields as of ``Case``."""

    name: str
    layout: str
    window: int | None
    dtype: torch.dtype
    causal: bool
    device: str
    capped: bool = False

    @property
    def encoding(self) -> Encoding:
        """The same at every call."""
        return kept_encoding(self.name, self.dtype, self.device)

    def whole(self) -> Layout:
        """The layout of all tokens."""
        return subject_of(self.name).place(LAYOUTS[self.layout]()).to(self.device)

    def results(self) -> list[Tensor]:
        """As ``run`` returns them."""

        def compute(
            q: Tensor, k: Tensor, v: Tensor, layout: Layout, encoding: Encoding, **options: Any
        ) -> Tensor:
            grid = Grid.of(layout, causal=self.causal, window=self.window)
            return attend(q, k, v, grid, encoding, **options)

        given = tensors(self.dtype, self.device)
        found = run(self.encoding, given, self.whole(), compute, capped=self.capped)
        return [x.cpu() for x in found]


KNOWN: dict[Problem, list[Tensor]] = {}
"""Results of one process that this process has computed."""


def expected(group: dist.ProcessGroup, problems: list[Problem]) -> dict[Problem, list[Tensor]]:
    """Results of one process; each problem is computed by one rank, and sent to the others."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    own = problems[rank::ranks]
    KNOWN.update({problem: problem.results() for problem in own if problem not in KNOWN})
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, {problem: KNOWN[problem] for problem in own}, group=group)
    return {problem: results for part in every for problem, results in part.items()}


def bare(layout: Layout) -> Layout:
    """The layout without fields that say nothing of its tokens, as a rank would make its own."""
    document, valid, special = layout.document, layout.valid, layout.special
    return replace(
        layout,
        document=None if document is None or not document.any() else document,
        valid=None if valid is None or valid.all() else valid,
        special=None if special is None or not special.any() else special,
    )


def difference(group: dist.ProcessGroup, case: Case, results: list[Tensor]) -> str:
    """Run a case on the ranks of a group; "" if it agrees with one process's results."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    encoding, whole = case.problem.encoding, case.problem.whole()
    index = SPLITS[case.split](ranks, rank).to(case.device)
    layout = bare(distributed.take(whole, index))

    def compute(
        q: Tensor, k: Tensor, v: Tensor, layout: Layout, encoding: Encoding, **options: Any
    ) -> Tensor:
        return distributed.attend(
            *(q, k, v, layout, encoding),
            **options,
            mesh=group,
            causal=case.causal,
            window=case.window,
            form=case.form,
            backend=case.backend,
        )

    own = [part[:, :, index] for part in tensors(case.dtype, case.device)]
    found = run(encoding, own, layout, compute, capped=case.capped)
    for gradient in found[5:]:
        dist.all_reduce(gradient, group=group)
    found, index = [x.cpu() for x in found], index.cpu()
    wanted = [result[:, :, index] for result in results[:5]] + results[5:]
    labels = ["output", *(f"gradient of {name}" for name in ("q", "k", "v", "x"))]
    labels += [f"gradient of {name}" for name, _ in encoding.named_parameters()]
    labels.append("gradient of sinks")
    largest = [result.abs().max().item() for result in results]
    for label, got, want, most in zip(labels, found, wanted, largest, strict=True):
        off = (got - want).abs().max().item() if got.numel() else 0.0
        exact = case.dtype == torch.float64 and case.name != "fire"
        if not off <= (EXACT if exact else TOLERANCE) * max(most, 1.0):
            return f"{case}, {ranks} ranks: {label} is off by {off:.3g} of {most:.3g}"
    return ""


def differences(group: dist.ProcessGroup, cases: list[Case]) -> list[str]:
    """The cases that differ from one process, each with its difference."""
    found = []
    known = expected(group, list(dict.fromkeys(case.problem for case in cases)))
    for case in cases:
        try:
            found.append(difference(group, case, known[case.problem]))
        except Exception:
            found.append(f"{case}: {traceback.format_exc(limit=-6)}")
    return [text for text in found if text]
