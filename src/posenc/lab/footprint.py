"""How much memory a model is going to take, before it takes it."""

from __future__ import annotations

import torch

from posenc.attention import explain
from posenc.layout import Grid, Layout
from posenc.models import Decoder

__all__ = ["decoder_bytes", "gigabytes"]


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
    grid = Grid.of(layout, causal=True, window=config.window)
    with torch.set_grad_enabled(training):
        return explain(q, q, q, grid, model.encodings[layer]).backend == "reference"


def gigabytes(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 1e9:.1f} GB"
