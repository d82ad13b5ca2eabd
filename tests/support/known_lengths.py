"""Small models of bytes whose length is known by construction."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch.nn import functional as F

from posenc.lab.evaluation.questions.question import NOUNS
from posenc.models import Decoder, DecoderConfig

TRAINED = 64
"""Bytes that the models are trained at."""

TABLE = 512
"""Positions in the table of the model that breaks."""

WINDOW = 16
"""Bytes that a layer sees, so that no distance is new at any length."""

STEPS, BATCH = 100, 16

CONFIG = DecoderConfig(
    vocabulary=256, dim=32, layers=2, heads=2, max_length=TABLE, encoding="rope", window=WINDOW
)


def words_text(seed: int, *, size: int) -> bytes:
    """Random words: what follows depends on the word that has begun, and on nothing before it."""
    draw = random.Random(seed)
    words = draw.sample(NOUNS, 24)
    return " ".join(draw.choices(words, k=size // 7)).encode()


def unlearned(seed: int) -> Decoder:
    """A model with random weights."""
    torch.manual_seed(seed)
    return Decoder(CONFIG).eval()


def holding(text: bytes, seed: int) -> Decoder:
    """A model trained on a text, that holds at every length, as it sees a window alone."""
    model = unlearned(seed)
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for _ in range(STEPS):
        begins = torch.randint(len(ids) - TRAINED - 1, (BATCH, 1))
        rows = ids[begins + torch.arange(TRAINED + 1)]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    return model.requires_grad_(requires_grad=False)


def breaking(held: Decoder) -> Decoder:
    """The model with a table of positions too, of which only the first ``TRAINED`` are of use.

    All others are as drawn, as in a model whose table is longer than the texts of its training.
    """
    model = Decoder(replace(CONFIG, encoding="rope+learned")).eval()
    model.load_state_dict(held.state_dict(), strict=False)
    for name, table in model.named_parameters():
        if name not in dict(held.named_parameters()):
            torch.nn.init.normal_(table.requires_grad_(requires_grad=False))
            table[:TRAINED] = 0
    return model.requires_grad_(requires_grad=False)
