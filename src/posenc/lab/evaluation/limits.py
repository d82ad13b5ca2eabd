"""Context lengths that fit into limits of memory and time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor, nn

from posenc.arguments import GIB
from posenc.errors import ArgumentError
from posenc.lab.experiments.text_loss import rows_a_call
from posenc.lab.training.machine import PeakMemory


@torch.inference_mode()
def affordable(
    model: nn.Module,
    text: Int[Tensor, " T"],
    lengths: Sequence[int],
    *,
    needed: int,
    passes: int,
    memory: float | None,
    minutes: float | None,
) -> tuple[tuple[int, ...], dict[str, str]]:
    """The lengths from the first on that fit, and why the others do not.

    A pass over as many texts of each length as are read at a time is run, from the shortest on,
    unless it is expected to take too much memory: as the one before it, but in proportion to the
    number of texts and the square of their length.

    Args:
        model: to run.
        text: ids.
        lengths: in rising order.
        needed: length without which nothing can be said.
        passes: texts read at each length.
        memory: GiB of a pass.
        minutes: of all passes.

    Raises:
        ArgumentError: if ``needed`` does not fit.
    """
    device = next(model.parameters()).device
    affordable_lengths: list[int] = []
    left_out: dict[str, str] = {}
    peak, seconds, before, reason = 0, 0.0, 1, ""
    for length in lengths:
        rows = rows_a_call(length)
        if memory is not None and peak * rows * length**2 / before > memory * GIB:
            reason = f"memory: a pass would take more than {memory:g} GiB"
        else:
            used = PeakMemory(device)
            began = time.perf_counter()
            model(text[:length].expand(rows, -1).to(device))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds += passes / rows * (time.perf_counter() - began)
            peak, before = used.used(), rows * length**2
            if memory is not None and peak > memory * GIB:
                reason = f"memory: a pass takes more than {memory:g} GiB"
            elif minutes is not None and seconds > 60 * minutes:
                reason = f"minutes: measuring would take more than {minutes:g}"
        if reason:
            left_out = {str(n): reason for n in lengths[lengths.index(length) :]}
            break
        affordable_lengths.append(length)
    if not affordable_lengths or max(affordable_lengths) < needed:
        name, _, rest = reason.partition(": ")
        raise ArgumentError(
            name,
            expected=f"enough for contexts of {needed}, the trained length",
            got=f"{memory:g} GiB" if name == "memory" else f"{minutes:g}",
            remedy=f"{rest[0].upper()}{rest[1:]}; raise the limit, or measure on another device.",
        )
    return tuple(affordable_lengths), left_out
