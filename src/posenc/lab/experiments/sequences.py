"""Sequences that an encoder–decoder reads and writes, as batches of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from posenc.layout import Layout
from posenc.models import Transformer, token_loss
from posenc.models.transformer import Given

BEGIN, END, SYMBOLS = 0, 1, 2
"""Tokens: what begins a target, what ends both sides, and the first of the symbols."""


def drawn(name: str) -> float:
    """A number from 0 to 1 that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def padded(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Tensor]:
    """Pairs of source and target symbols as a batch.

    ``source`` and ``target`` are ``[B, L]``, padded on the right: sources end with the end,
    targets begin with the begin and end with the end. ``sizes`` ``[B, 2]`` counts their tokens.
    """
    sources = [[*source, END] for source, _ in pairs]
    targets = [[BEGIN, *target, END] for _, target in pairs]
    sizes = [[len(a), len(b)] for a, b in zip(sources, targets, strict=True)]
    return {
        "source": stacked(sources, END),
        "target": stacked(targets, END),
        "sizes": torch.tensor(sizes),
    }


def pair_loss(model: Transformer, batch: Mapping[str, Tensor], *, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats of a target's token after those before it.

    Args:
        model: the encoder–decoder.
        batch: as ``padded`` makes it.
        smoothing: see ``token_loss``.
    """
    source, target, sizes = batch["source"], batch["target"], batch["sizes"]
    inputs, wanted = target[:, :-1], target[:, 1:]
    layout = real(inputs.shape[1], sizes[:, 1] - 1)
    logits = model(source, inputs, real(source.shape[1], sizes[:, 0]), layout)
    return token_loss(logits, wanted, valid=layout.valid, smoothing=smoothing)


def read_source(model: Transformer, sources: Sequence[Sequence[int]]) -> Given:
    """The model's decoder with sources of any lengths in view."""
    device = model.source_embedding.weight.device
    ended = [[*source, END] for source in sources]
    tokens = stacked(ended, END).to(device)
    sizes = torch.tensor([len(source) for source in ended], device=device)
    return model.given(tokens, real(tokens.shape[1], sizes))


def stacked(rows: Sequence[Sequence[int]], fill: int) -> Int[Tensor, "B L"]:
    """Rows of any lengths as one tensor, padded on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def real(length: int, sizes: Int[Tensor, " B"]) -> Layout:
    """Tokens at 0, 1, 2, … in every row, of which the first ``sizes`` are real."""
    valid: Bool[Tensor, "B L"] = torch.arange(length, device=sizes.device) < sizes.unsqueeze(1)
    return replace(Layout.sequence(length, device=sizes.device), valid=valid)
