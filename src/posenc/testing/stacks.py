"""Small decoder for laws of whole models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posenc.layout import Layout
from posenc.models import Decoder, DecoderConfig
from posenc.testing.subject import DIM, HEAD_DIM, HEADS, LENGTH, Subject, seeded

VOCABULARY = 11


def stack(subject: Subject, *, tied: bool = True) -> Decoder:
    """A decoder of two blocks in float64, the same in every call."""
    records = subject.layers(2)
    with seeded(13):
        config = DecoderConfig(
            vocabulary=VOCABULARY, dim=DIM, layers=2, heads=HEADS, head_dim=HEAD_DIM, tied=tied
        )
        return Decoder(config, encodings=records).double().eval()


def tokens(rows: int = 2) -> Tensor:
    """Token ids ``[rows, 13]``."""
    return torch.arange(rows * LENGTH).reshape(rows, LENGTH) % VOCABULARY


def run(subject: Subject, model: nn.Module, text: Tensor | None = None) -> Tensor:
    """Logits of some tokens at positions that the encoding supports."""
    text = tokens() if text is None else text
    logits: Tensor = model(text, subject.place(Layout.sequence(LENGTH)))
    return logits
