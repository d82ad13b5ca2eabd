"""Calls of attention in modules that use none of transformers' interfaces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.transformers.doctor.recording import TOKENS, record


class OwnAttention(nn.Module):
    """Softmax of products written out, or PyTorch's function."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (self.query(x), self.key(x), x))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = (q @ k.mT / 2).softmax(-1) @ v
        return y.transpose(1, 2).flatten(2)


class Shared(nn.Module):
    """A model that calls one module twice, and softmax elsewhere too."""

    main_input_name, dtype = "input_ids", torch.float32
    config = SimpleNamespace(is_encoder_decoder=False)

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(9, 8), nn.Embedding(20, 8)
        self.attention = OwnAttention(fused=fused)

    def forward(self, input_ids: Tensor, use_cache: Any = None) -> Tensor:
        at = torch.arange(2, 2 + input_ids.shape[1])
        x = self.words(input_ids) + self.positions(at)
        for _ in range(2):
            x = x + self.attention(x) * x.softmax(-1)
        return x


def test_own_products_and_softmax_are_a_call() -> None:
    model = Shared(fused=False).eval()
    recorder = record(model, {})
    first, second = recorder.calls
    assert first.module is second.module is model.attention
    assert first.query.shape == (1, 2, TOKENS, 4)
    assert first.logits is not None
    expected = first.query[0] @ first.key[0].mT / 2
    torch.testing.assert_close(first.logits, expected)
    assert recorder.tables == {model.positions: (20, 2)}


def test_calls_of_the_fused_function() -> None:
    model = Shared(fused=True).eval()
    calls = record(model, {}).calls
    assert [call.module for call in calls] == [model.attention] * 2
    assert calls[0].options["is_causal"] is True
    assert calls[0].logits is None


def test_silent_products_leave_bias_and_mask() -> None:
    calls = record(Shared(fused=False).eval(), {}, silent=True).calls
    assert [bool(call.logits.any()) for call in calls if call.logits is not None] == [False] * 2
