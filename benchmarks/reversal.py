"""An encoder–decoder that learns to reverse, with sinusoidal, T5 and RoPE positions alike.

    python -m benchmarks.reversal [--seeds 3] [--threads 2]

Each encoding is on encoder and decoder; the attention from target to source has none. Sequences
have 1 to 12 of 16 symbols between two marks. The metric is the share of 1000 fresh sequences of
12 that greedy decoding reverses without a mistake. Training ends after a fixed number of steps;
seconds are of training, by the clock and of processor time (all threads together).
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from benchmarks.measuring import write_results
from torch import Tensor

from posenc.lab.training.objectives import token_loss
from posenc.models import Transformer, TransformerConfig, generate

ENCODINGS = ("sinusoidal", "t5", "rope")
SYMBOLS, BEGIN, END = 16, 16, 17
LENGTH = 12
STEPS, BATCH, RATE = 1800, 64, 2e-3
LEAST = 0.99
"""Of sequences right, that each encoding has to reach."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encodings", nargs="+", default=ENCODINGS, choices=ENCODINGS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, object]] = []
    for encoding in options.encodings:
        scores, clock, work = [], [], []
        for seed in range(options.seeds):
            began, busy = time.perf_counter(), time.process_time()
            model = train(encoding, seed=seed, steps=options.steps)
            clock.append(round(time.perf_counter() - began, 1))
            work.append(round(time.process_time() - busy, 1))
            scores.append(accuracy(model, seed=seed))
            print(
                f"{encoding:10}  seed {seed}  {scores[-1]:.3f} right after {clock[-1]} s "
                f"({work[-1]} s of processor)",
                flush=True,
            )
        verdict = "holds" if min(scores) >= LEAST else f"below {LEAST}"
        print(
            f"{encoding:10}  mean {statistics.mean(scores):.4f}, least {min(scores):.3f}, {verdict}"
        )
        rows.append({"encoding": encoding, "accuracy": scores, "seconds": clock, "processor": work})
    path = write_results("reversal", rows, length=LENGTH, steps=options.steps, batch=BATCH)
    print(f"Written to {path}.")


def train(encoding: str, *, seed: int, steps: int) -> Transformer:
    """A model trained on sequences of ``LENGTH`` symbols and, every other step, of 1 to that."""
    torch.manual_seed(seed)
    model = Transformer(
        TransformerConfig(
            source_vocabulary=END + 1,
            target_vocabulary=END + 1,
            dim=64,
            heads=4,
            encoder_layers=2,
            decoder_layers=2,
            encoder_encoding=encoding,
            decoder_encoding=encoding,
            shared=True,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    data = torch.Generator().manual_seed(seed)
    for step in range(steps):
        length = LENGTH if step % 2 else int(torch.randint(1, LENGTH + 1, (), generator=data))
        source, target = batch(length, data)
        loss = token_loss(model(source, target[:, :-1]), target[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def batch(length: int, data: torch.Generator, rows: int = BATCH) -> tuple[Tensor, Tensor]:
    """Sources and targets, each from begin to end."""
    source = torch.randint(SYMBOLS, (rows, length), generator=data)
    begin, end = (torch.full((rows, 1), token) for token in (BEGIN, END))
    target = torch.cat([begin, source.flip(1), end], dim=1)
    return torch.cat([begin, source, end], dim=1), target


def accuracy(model: Transformer, *, seed: int, rows: int = 1000) -> float:
    """The share of new sequences of the training length whose every token is right."""
    source, target = batch(LENGTH, torch.Generator().manual_seed(1000 + seed), rows)
    begin = target[:, :1]
    with torch.no_grad():
        given = model.given(source)
    decoded = generate(given, begin, max_new_tokens=LENGTH + 1, stop_token=END)
    if decoded.shape != target.shape:
        return 0.0
    return float((decoded == target).all(1).float().mean())


if __name__ == "__main__":
    main()
