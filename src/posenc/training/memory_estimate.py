"""Estimates of the memory of a forward pass or a training step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posenc.attention import explain
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.models import Decoder
from posenc.models.stack import StackConfig

__all__ = ["decoder_bytes", "gigabytes", "require_step", "stack_bytes"]


def decoder_bytes(model: Decoder, rows: int, length: int, *, training: bool) -> int:
    """Estimated bytes of a forward pass, or of a training step: measured ones to about a third."""
    config = model.config
    tokens = rows * length
    hidden = 2 * config.feed_forward_width
    kept = config.layers if training else 1
    per_token = kept * (12 * config.dim + 3 * hidden) + 4 * config.vocabulary
    floats = tokens * per_token
    if any(_materialises(model, layer, training) for layer in range(config.layers)):
        floats += kept * 5 * rows * config.heads * length**2
    if training:
        # Gradients take their places, and the optimiser has its two moments.
        floats = 7 * floats // 5 + 4 * sum(p.numel() for p in model.parameters())
    return 4 * floats


def _materialises(model: Decoder, layer: int, training: bool) -> bool:
    """Whether attention writes its weights of size length² to memory."""
    config = model.config
    head_dim = config.head_dim or config.dim // config.heads
    q = torch.zeros(1, config.heads, 2, head_dim, device=model.embedding.weight.device)
    layout = Layout.sequence(2, device=q.device)
    window = config.window
    if isinstance(window, Sequence):
        window = window[layer]
    grid = Grid.of(layout, causal=True, window=window)
    with torch.set_grad_enabled(training):
        return explain(q, q, q, grid, model.encodings[layer]).backend == "reference"


def require_step(needed: int, available: int, *, rows: int, length: int) -> None:
    """Refuse a training step that takes ``needed`` bytes where there are ``available``.

    Raises:
        ArgumentError: with what would make it fit.
    """
    if needed > available:
        raise ArgumentError(
            "batch",
            expected=f"a training step that fits into {gigabytes(available)}",
            got=f"about {gigabytes(needed)} for {rows} windows of {length}",
            remedy="Lower batch, train_length or width, or use fewer workers.",
        )


def gigabytes(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 1e9:.1f} GB"


def stack_bytes(
    config: StackConfig,
    *,
    layers: int,
    vocabulary: int,
    parameters: int,
    rows: int,
    length: int,
    training: bool,
) -> int:
    """Estimated bytes of a pass through any stack of blocks, or of a training step.

    Attention is taken to write its weights to memory, which is what it does at worst.

    Args:
        config: shape of the blocks.
        layers: how many; one with cross-attention counts as two.
        vocabulary: logits at each place.
        parameters: of the whole model.
        rows, length: of the batch.
        training: a training step, with gradients and the optimiser's moments.
    """
    kept = layers if training else 1
    per_token = kept * (12 * config.dim + 6 * config.feed_forward_width) + 4 * vocabulary
    floats = rows * length * per_token + kept * 5 * rows * config.heads * length**2
    if training:
        floats = 7 * floats // 5 + 4 * parameters
    return 4 * floats
