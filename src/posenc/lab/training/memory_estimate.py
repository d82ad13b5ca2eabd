"""Estimates of the memory of a forward pass or a training step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from posenc.attention import explain
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.models import Decoder
from posenc.models.stack import StackConfig


def stack_bytes(
    model: nn.Module,
    config: StackConfig,
    *,
    layers: int,
    vocabulary: int,
    rows: int,
    length: int,
    training: bool,
    materialised: bool = True,
) -> int:
    """Estimated bytes of a forward pass, or of a training step: measured ones to about a third.

    Args:
        model: the whole model, for its parameters.
        config: shape of its blocks.
        layers: number of blocks; one with cross-attention counts as two.
        vocabulary: logits per position.
        rows, length: shape of the batch.
        training: include gradients and the optimiser's two moments.
        materialised: attention writes its weights of size length² to memory.
    """
    saved_layers = layers if training else 1
    per_token = saved_layers * (12 * config.dim + 6 * config.feed_forward_width) + 4 * vocabulary
    floats = rows * length * per_token
    if materialised:
        floats += saved_layers * 5 * rows * config.heads * length**2
    if training:
        floats = 7 * floats // 5 + 4 * sum(parameter.numel() for parameter in model.parameters())
    return 4 * floats


def decoder_bytes(model: Decoder, rows: int, length: int, *, training: bool) -> int:
    """``stack_bytes`` of a decoder, by the backends that serve its layers."""
    config = model.config
    return stack_bytes(
        model,
        config,
        layers=config.layers,
        vocabulary=config.vocabulary,
        rows=rows,
        length=length,
        training=training,
        materialised=any(_materialises(model, layer, training) for layer in range(config.layers)),
    )


def _materialises(model: Decoder, layer: int, training: bool) -> bool:
    config = model.config
    head_dim = config.head_dim or config.dim // config.heads
    q = torch.zeros(1, config.heads, 2, head_dim, device=model.embedding.weight.device)
    window = config.window[layer] if isinstance(config.window, Sequence) else config.window
    grid = Grid.of(Layout.sequence(2, device=q.device), causal=True, window=window)
    with torch.set_grad_enabled(training):
        return explain(q, q, q, grid, model.encodings[layer]).backend == "reference"


def gigabytes(count: int) -> str:
    """Bytes as text, in GB."""
    return f"{count / 1e9:.1f} GB"
