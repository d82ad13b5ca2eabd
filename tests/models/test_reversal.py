"""A small encoder–decoder learns to reverse in seconds with positions, and not without.

``benchmarks/reversal.py`` is the whole experiment.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc.lab.training.objectives import token_loss
from posenc.models import Transformer, TransformerConfig, generate
from tests.support.exhaustive import kept_in_suite

SYMBOLS, LENGTH, BEGIN, END = 8, 3, 8, 9


def batch(rows: int, data: torch.Generator) -> tuple[Tensor, Tensor]:
    source = torch.randint(SYMBOLS, (rows, LENGTH), generator=data)
    begin, end = (torch.full((rows, 1), token) for token in (BEGIN, END))
    target = torch.cat([begin, source.flip(1), end], dim=1)
    return torch.cat([begin, source, end], dim=1), target


def accuracy_of(encoding: str) -> float:
    """The share of fresh sequences reversed without a mistake, after a short training."""
    torch.manual_seed(0)
    model = Transformer(
        TransformerConfig(
            source_vocabulary=10,
            target_vocabulary=10,
            dim=48,
            heads=4,
            encoder_layers=1,
            decoder_layers=1,
            encoder_encoding=encoding,
            decoder_encoding=encoding,
            shared=True,
        )
    )
    data = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=240)
    for _ in range(240):
        source, target = batch(32, data)
        loss = token_loss(model(source, target[:, :-1]), target[:, 1:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    source, target = batch(200, data)
    with torch.no_grad():
        given = model.eval().given(source)
    decoded = generate(given, target[:, :1], max_new_tokens=LENGTH + 1, stop_token=END)
    return float((decoded == target[:, : decoded.shape[1]]).all(1).float().mean())


@pytest.mark.parametrize("encoding", kept_in_suite(["sinusoidal", "t5", "rope"], ["t5"]))
def test_positions_let_it_reverse(encoding: str) -> None:
    assert accuracy_of(encoding) >= 0.9


def test_without_positions_it_cannot() -> None:
    assert accuracy_of("nope") <= 0.3
