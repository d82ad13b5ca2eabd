"""Real text as bytes: windows to train on, and the loss with the levels that it is held to."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.lab.experiments.corpus import Pieces
from posenc.lab.experiments.results import Metric
from posenc.lab.experiments.tasks.common.task import seen, training_loss
from posenc.lab.experiments.text_loss import byte_entropy, pair_entropy

OVERFIT = 0.5
"""Bits per byte that training text may cost less than held-out text, net of what byte pairs do:
files differ by less than that."""


def random_windows(
    text: Tensor, pieces: Pieces, *, rows: int, length: int, source: torch.Generator
) -> Int[Tensor, "rows length"]:
    """Windows from anywhere in a text."""
    drawn = torch.randint(pieces.count(length), (rows, 1), generator=source)
    return text[pieces.begins(drawn, length) + torch.arange(length)].long()


def byte_losses(
    train: Tensor,
    tested: tuple[Tensor, Tensor],
    trained: tuple[Tensor, Tensor],
    *,
    training: str,
    **wording: Any,
) -> tuple[Metric, Metric, Metric]:
    """The deciding loss in bits per byte, that of training, and the deciding one on training data.

    Args:
        train: text that the levels count frequencies in.
        tested, trained: a text and the places of its scored bytes, held out and trained on.
        training: the end of the training loss's description.
        wording: ``label``, ``axis`` and ``description`` of the deciding loss.
    """

    def levels(text: Tensor, places: Tensor) -> dict[str, Any]:
        trivial, learned = (level(train, text, places) for level in (byte_entropy, pair_entropy))
        return {"trivial": trivial, "learned": learned}

    wording["description"] += " The rule is what a byte costs who knows only how frequent each is."
    loss = Metric(
        key="loss",
        unit="bits per byte",
        lower_is_better=True,
        trivial_rule="byte frequencies",
        headline=True,
        rule="the byte before alone",
        overfit=OVERFIT,
        **levels(*tested),
        **wording,
    )
    return loss, training_loss(loss.unit, training), seen(loss, **levels(*trained))
