"""Fine-tuning of an extended model at its new length."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.errors import ArgumentError
from posenc.lab import training
from posenc.lab.evaluation.settings import Positions, Tuning
from posenc.lab.evaluation.suites.needles import ByteNeedles
from posenc.lab.evaluation.texts import Text
from posenc.lab.experiments.tasks.common import needles
from posenc.lab.experiments.tasks.common.byte_text import random_windows
from posenc.lab.training.seeding import generator
from posenc.layout import Layout
from posenc.layout.transforms import randomized, skipped

TOKENS_A_STEP = 2048

NEEDLE_SHARE = 0.25
"""Share of rows that ask for needles, as in the training of posenc's own models."""


def finetuned(
    model: nn.Module,
    text: Text,
    tuning: Tuning,
    *,
    length: int,
    goal: int,
    stepped: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[nn.Module, float]:
    """A copy of a decoder, fine-tuned on a text, and the seconds spent.

    Args:
        model: the extended model.
        text: its part to train on; marked bytes are hidden in some rows where ids are bytes.
        tuning: settings.
        length, goal: the trained and the new length.
        stepped: called after each step with its number and loss.

    Raises:
        ArgumentError: if the loss is not finite.
    """
    trained = copy.deepcopy(model).requires_grad_(requires_grad=True)
    weight = next(trained.parameters())
    rate = tuning.rate_for(weight.shape[-1])

    def after(step: int, loss: Tensor, speed: float) -> None:
        if not torch.isfinite(loss):
            raise ArgumentError(
                "finetune_rate",
                expected="a loss that stays a number",
                got=f"none at step {step}",
                remedy=f"Try half of {rate:.2g}.",
            )
        stepped(step, float(loss))

    plan = training.TrainingPlan(
        encoding="",
        seed=tuning.seed,
        steps=tuning.steps,
        rate=rate,
        device=str(weight.device),
        weight_decay=0.0,
        schedule=_triangle,
    )
    size = goal if tuning.positions == "plain" else length
    windows = _Windows(text, tuning.positions, size, goal)
    done = training.fit(trained, windows, plan, training.Watch(stepped=after))
    return done.model, done.seconds


@dataclass(frozen=True, eq=False)
class _Windows:
    """A task of predicting windows of a text, at positions up to the goal; see ``finetuned``."""

    text: Text
    positions: Positions
    size: int
    goal: int
    fingerprint: str = ""

    @property
    def rows(self) -> int:
        """Windows of a step."""
        return max(1, TOKENS_A_STEP // self.size)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of these."""
        return self.rows * self.size

    def batch(self, seed: int, step: int) -> dict[str, Tensor | Layout]:
        """``inputs``, ``targets`` ``[rows, size]`` and their ``layout``."""
        draw = generator(seed, step)
        windows = random_windows(
            self.text.trained,
            self.text.trained_pieces,
            rows=self.rows,
            length=self.size + 1,
            source=draw,
        )
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        asking = round(NEEDLE_SHARE * self.rows) if self.rows > 1 else step % 4 == 0
        if isinstance(self.text.needles, ByteNeedles) and asking:
            needles.hide(inputs[: int(asking)], targets[: int(asking)], draw)
        layout = Layout.sequence(self.size)
        if self.positions == "randomized":
            layout = randomized(layout, max_length=self.goal, generator=draw)
        elif self.positions == "skipped":
            layout = skipped(layout, max_length=self.goal, generator=draw)
        return {"inputs": inputs, "targets": targets, "layout": layout}

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Mean cross-entropy of the next token, in nats."""
        logits = model(batch["inputs"], batch["layout"])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())


def _triangle(step: int, steps: int) -> float:
    """Share of the peak rate: rising over a tenth of the steps, then falling linearly."""
    rising = max(1, steps // 10)
    if step < rising:
        return (step + 1) / rising
    return max(0.0, 1 - (step - rising) / max(1, steps - rising))
