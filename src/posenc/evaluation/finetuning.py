"""Short training of a stretched model at its new length."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.errors import ArgumentError, UnknownNameError
from posenc.experiments.tasks.common import needles
from posenc.layout import Layout
from posenc.training.seeding import generator
from posenc.transforms import randomized, skipped

__all__ = ["Tuning", "finetuned"]

Positions = Literal["plain", "randomized", "skipped"]

TOKENS_A_STEP = 2048

NEEDLE_SHARE = 0.25
"""Rows that ask for needles, as in the training of the lab's own models."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How models are fine-tuned, all alike.

    Args:
        steps: of AdamW, its rate rising over the first tenth and falling to 0.
        positions: ``"plain"``: windows of the new length; ``"randomized"`` (Ruoss et al. 2023) or
            ``"skipped"`` (PoSE, Zhu et al. 2024): windows of the trained length at positions from
            the new one, which costs less.
        rate: at its peak; by default 0.1 / C, C the model's width.
        seed: of the data's order and of positions.

    Raises:
        ArgumentError: on a value out of its domain.
    """

    steps: int
    positions: Positions = "plain"
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ArgumentError(
                "--finetune-steps", expected="0 or more", got=self.steps, remedy="0 trains nothing."
            )
        if self.positions not in get_args(Positions):
            raise UnknownNameError.of("--positions", self.positions, get_args(Positions))
        if self.rate is not None and not self.rate > 0:
            raise ArgumentError(
                "--finetune-rate", expected="above 0", got=self.rate, remedy="Leave it out."
            )

    def rate_for(self, width: int) -> float:
        """``rate``, or its default."""
        return 0.1 / width if self.rate is None else self.rate


def finetuned(
    model: nn.Module,
    text: Int[Tensor, " T"],
    tuning: Tuning,
    *,
    length: int,
    goal: int,
    marks: bool,
    stepped: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[nn.Module, float]:
    """A copy of a decoder, trained on a text, and the seconds that took.

    Args:
        model: stretched; it is left as it is.
        text: ``[T]`` ids.
        tuning: how.
        length, goal: the trained length, and the new one.
        marks: hide needles in some rows (models of bytes that know them).
        stepped: called after each step with its number and loss.

    Raises:
        ArgumentError: when the loss is no number any more.
    """
    trained = copy.deepcopy(model).requires_grad_(requires_grad=True).train()
    device = next(trained.parameters()).device
    width = next(trained.parameters()).shape[-1]
    rate = tuning.rate_for(width)
    optimizer = torch.optim.AdamW(
        trained.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    begin = time.perf_counter()
    for step, (inputs, targets, layout) in enumerate(
        _batches(text, tuning, length=length, goal=goal, marks=marks)
    ):
        for group in optimizer.param_groups:
            group["lr"] = rate * _share(step, tuning.steps)
        logits = trained(inputs.to(device), layout.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten())
        if not torch.isfinite(loss):
            raise ArgumentError(
                "--finetune-rate",
                expected="a loss that stays a number",
                got=f"none at step {step + 1}",
                remedy=f"Try half of {rate:.2g}.",
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        stepped(step + 1, float(loss.detach()))
    seconds = time.perf_counter() - begin
    return trained.requires_grad_(requires_grad=False).eval(), seconds


def _batches(
    text: Tensor, tuning: Tuning, *, length: int, goal: int, marks: bool
) -> Iterator[tuple[Tensor, Tensor, Layout]]:
    size = goal if tuning.positions == "plain" else length
    rows = max(1, TOKENS_A_STEP // size)
    for step in range(tuning.steps):
        draw = generator(tuning.seed, step)
        begins = torch.randint(len(text) - size, (rows, 1), generator=draw)
        windows = text[begins + torch.arange(size + 1)].long()
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        asking = round(NEEDLE_SHARE * rows) if rows > 1 else step % 4 == 0
        if marks and asking:
            needles.hide(inputs[: int(asking)], targets[: int(asking)], draw)
        layout = Layout.sequence(size)
        if tuning.positions == "randomized":
            layout = randomized(layout, max_length=goal, generator=draw)
        elif tuning.positions == "skipped":
            layout = skipped(layout, max_length=goal, generator=draw)
        yield inputs, targets, layout


def _share(step: int, steps: int) -> float:
    """Of the peak rate: up over a tenth of the steps, then down in a line."""
    rising = max(1, steps // 10)
    if step < rising:
        return (step + 1) / rising
    return max(0.0, 1 - (step - rising) / max(1, steps - rising))
