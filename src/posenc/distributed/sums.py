"""Running sums over tokens that are spread over ranks."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.distributed.group import Group, total
from posenc.distributed.shards import Shards
from posenc.encoding.prepared import reused_of_layouts
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.layout.padding import documents_of


def running_sums(group: Group, shards: Shards, layout: Layout) -> Float[Tensor, "B L S"]:
    """Sums of this rank's and others' signals up to each token of this rank, in float64.

    Over the real tokens of the token's document, by order. The sorted tokens of a row are in
    runs that one rank has; a rank sums its own, and only a total a run is exchanged.

    Args:
        shards: layouts of all ranks.
        layout: of this rank, with its signals.
    """
    signal = layout.signal
    if signal is None:
        raise ArgumentError(
            "layout",
            expected="the signal that the encoding computes from the tokens",
            got="none",
            remedy="Use Attention, or encoding.observe(x, layout) before attend.",
        )
    compute = partial(_runs, shards)
    runs, begins = reused_of_layouts(compute, "runs", shards.lengths, layouts=(shards.layout,))
    local_runs = runs[:, sum(shards.lengths[: group.rank]) :][:, : layout.length]
    rows, count = len(signal), begins.shape[1]
    index = local_runs.expand(rows, -1).unsqueeze(-1).expand(-1, -1, signal.shape[-1])
    steps = signal.double()
    if layout.valid is not None:
        steps = steps.masked_fill(~layout.valid.unsqueeze(-1), 0.0)
    totals = steps.new_zeros(rows, count, signal.shape[-1]).scatter_add(1, index, steps)
    totals = total(group, totals)
    before = _exclusive(totals, begins.expand(rows, -1))
    return before.gather(1, index) + _within(steps, local_runs, layout)


def crosses_ties(shards: Shards) -> bool:
    """True if tokens of one document and order are on several ranks. Reads the layouts' values."""
    compute = partial(_crosses_ties, shards)
    return reused_of_layouts(compute, "ties", shards.lengths, layouts=(shards.layout,))


def _crosses_ties(shards: Shards) -> bool:
    owner, order, document = _sorted(shards)
    same = (order.diff() == 0) & (document.diff() == 0) & (document[:, 1:] != _PADDING)
    return bool((same & (owner.diff() != 0)).any())


_PADDING = torch.iinfo(torch.int64).max


def _sorted(shards: Shards) -> tuple[Tensor, Tensor, Tensor]:
    """Owner, order and document of all tokens, sorted by document and order, ``[b, K]``."""
    layout = shards.layout
    ranks = torch.arange(len(shards.lengths), device=layout.device)
    lengths = torch.tensor(shards.lengths, device=layout.device)
    owner = ranks.repeat_interleave(lengths).unsqueeze(0).expand(layout.batch, -1)
    index = _sorting(layout)
    parts = (owner, layout.order.expand(layout.batch, -1), _documents(layout))
    return tuple(part.gather(1, index) for part in parts)  # type: ignore[return-value]


def _sorting(layout: Layout) -> Int[Tensor, "b K"]:
    order = layout.order.expand(layout.batch, -1).argsort(dim=1, stable=True)
    return order.gather(1, _documents(layout).gather(1, order).argsort(dim=1, stable=True))


def _documents(layout: Layout) -> Int[Tensor, "b K"]:
    document = documents_of(layout).expand(layout.batch, -1)
    return document if layout.valid is None else document.where(layout.valid, _PADDING)


def _runs(shards: Shards) -> tuple[Int[Tensor, "b K"], Int[Tensor, "b N"]]:
    """The run of every token (as ranks hold them), and the first of each run's document."""
    owner, _, document = _sorted(shards)
    changes = (owner.diff() != 0) | (document.diff() != 0)
    numbers = torch.nn.functional.pad(changes.long().cumsum(1), (1, 0))
    count = int(numbers.max()) + 1 if numbers.numel() else 1
    of_document = (
        torch.nn.functional.pad(numbers[:, 1:].where(document.diff() != 0, 0), (1, 0))
        .cummax(1)
        .values
    )
    begins = torch.zeros(len(numbers), count, dtype=torch.int64, device=numbers.device)
    begins.scatter_(1, numbers, of_document)
    runs = torch.empty_like(numbers).scatter_(1, _sorting(shards.layout), numbers)
    return runs, begins


def _exclusive(
    totals: Float[Tensor, "B N S"], begins: Int[Tensor, "B N"]
) -> Float[Tensor, "B N S"]:
    """Sums of the totals before each run, from the first of its document."""
    sums = torch.nn.functional.pad(totals.cumsum(1), (0, 0, 1, 0))[:, :-1]
    return sums - sums.gather(1, begins.unsqueeze(-1).expand_as(sums))


def _within(
    steps: Float[Tensor, "B L S"], runs: Int[Tensor, "b L"], layout: Layout
) -> Float[Tensor, "B L S"]:
    """Sums of a rank's steps up to each of its tokens, from the first of its run."""
    rows = len(steps)
    order = layout.order.expand(rows, -1)
    runs = runs.expand(rows, -1)
    index = order.argsort(dim=1, stable=True)
    index = index.gather(1, runs.gather(1, index).argsort(dim=1, stable=True))
    wide = index.unsqueeze(-1).expand_as(steps)
    sums = torch.nn.functional.pad(steps.gather(1, wide).cumsum(1), (0, 0, 1, 0))
    ordered, numbers = order.gather(1, index), runs.gather(1, index)
    fresh = torch.nn.functional.pad(numbers.diff() != 0, (1, 0), value=True)
    places = torch.arange(steps.shape[1], device=steps.device).expand(rows, -1)
    first = places.where(fresh, 0).cummax(1).values
    # Tokens of equal order have the sum up to the last of them.
    ends = torch.nn.functional.pad(fresh[:, 1:] | (ordered.diff() != 0), (0, 1), value=True)
    last = places.where(ends, steps.shape[1]).flip(1).cummin(1).values.flip(1)
    upto, before = (sums.gather(1, at.unsqueeze(-1).expand_as(steps)) for at in (last + 1, first))
    return torch.empty_like(steps).scatter(1, wide, upto - before)
