"""
A model, and a task: copying past the trained length
====================================================

A small decoder learns to copy words of up to 5 letters, with ALiBi and with sinusoids,
and is asked for longer ones. ``posenc compare --task copy`` does this with seeds,
controls and verdicts.
"""

import altair
import torch

from posenc.models import Decoder, DecoderConfig

LETTERS, SPACE = 8, 9


def copies(length: int, rows: int) -> torch.Tensor:
    """Words, a space, and the words again."""
    words = torch.randint(LETTERS, (rows, length))
    return torch.cat([words, torch.full((rows, 1), SPACE), words], dim=1)


rows = []
for encoding in ("alibi", "sinusoidal"):
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig(vocabulary=10, dim=32, layers=2, heads=4, encoding=encoding)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(500):
        length = int(torch.randint(2, 6, ()))
        text = copies(length, 64)
        logits = model(text[:, :-1])[:, length:]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), text[:, length + 1 :].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for length in range(2, 13):
            text = copies(length, 200)
            right = model(text[:, :-1])[:, length:].argmax(-1) == text[:, length + 1 :]
            rows.append(
                {
                    "encoding": encoding,
                    "letters": length,
                    "right": right.float().mean().item(),
                }
            )
chart = altair.Chart(altair.Data(values=rows)).mark_line(point=True)
chart = chart.encode(
    x=altair.X("letters:Q", title="letters of the word, trained up to 5"),
    y=altair.Y("right:Q", title="letters right", axis=altair.Axis(format="%")),
    color="encoding:N",
)
alt = (
    "The share of letters right, by length: past 5 letters sinusoids fall at once, "
    "ALiBi slowly."
)
