"""Probes of a model beside its loss: finding needles, and copying near tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.lab.experiments.tasks.common import needles
from posenc.lab.experiments.text_loss import Model, rows_a_call

DEPTHS = (0.0, 0.25, 0.5, 0.75, 0.95)
"""Depths of needles, as shares of the context before the question."""

WORD, PROMPT = 16, 4
"""Tokens of a word to be copied, and how many of the copy are given."""

LETTERS, FIRST_LETTER = 26, ord("a")

SHORTEST, LONGEST = 8, 24
"""Lengths of words that training rows repeat."""


@dataclass(frozen=True)
class ByteNeedles:
    """Marked bytes, for models of bytes that were trained to find them."""

    chance = needles.CHANCE
    description = (
        "one of 16 marked bytes hidden in real text, and asked for at the end by another mark"
    )

    def hide(
        self, windows: Int[Tensor, "W L"], depth: float, generator: torch.Generator
    ) -> tuple[Int[Tensor, "W L"], Int[Tensor, "W 1"]]:
        """Windows with a needle at this depth and the question at their end; and the answers."""
        hidden = needles.unmarked(windows)
        drawn = torch.randint(needles.KINDS, (len(windows),), generator=generator)
        answers = needles.FIRST + drawn
        hidden[:, round(depth * (windows.shape[1] - 2))] = answers
        hidden[:, -1] = needles.QUERY
        return hidden, answers.unsqueeze(1)


Encode = Callable[[str], Sequence[int]]
"""Text to ids, without special tokens."""


@dataclass(frozen=True)
class KeyNeedles:
    """A pass key of five digits, in a sentence hidden in the text; its end asks for the key.

    Args:
        encode: text to ids.
    """

    encode: Encode

    chance = 1e-5
    description = (
        "a pass key of five digits hidden in real text as a sentence, and asked for at the end"
    )

    def hide(
        self, windows: Int[Tensor, "W L"], depth: float, generator: torch.Generator
    ) -> tuple[Int[Tensor, "W L"], Int[Tensor, "W n"]]:
        """Windows with a needle and the question, and the answers; see ``ByteNeedles.hide``.

        The windows end in all tokens of the answer but the last.

        All keys of a batch have the same number of tokens.
        """
        length = windows.shape[1]
        hidden, answers = [], []
        width: int | None = None
        for row in windows:
            while True:
                key = int(torch.randint(10_000, 100_000, (), generator=generator))
                asked = list(self.encode("\nThe pass key is"))
                sentence = list(self.encode(f"\nThe pass key is {key}"))
                if sentence[: len(asked)] != asked:
                    asked = sentence[: len(sentence) - 1]
                answer = sentence[len(asked) :]
                if width in (None, len(answer)):
                    break
            width = len(answer)
            needle = list(self.encode(f"\nThe pass key is {key}. Remember it.\n"))
            text_length = length - len(needle) - len(sentence) + 1
            begin = round(depth * text_length)
            text = row[:text_length].tolist()
            hidden.append(text[:begin] + needle + text[begin:] + sentence[:-1])
            answers.append(answer)
        return torch.tensor(hidden), torch.tensor(answers)


Needles = ByteNeedles | KeyNeedles


def copying(
    windows: Int[Tensor, "W L"], pool: Int[Tensor, " P"], generator: torch.Generator
) -> tuple[Int[Tensor, "W L"], Int[Tensor, "W n"]]:
    """Windows that end in a random word and most of its repetition; and the rest of that.

    Args:
        windows: of text.
        pool: ids that words consist of.
        generator: of the words.
    """
    rows = len(windows)
    word = pool[torch.randint(len(pool), (rows, WORD), generator=generator)]
    sequences = torch.cat(
        [windows[:, : windows.shape[1] - 2 * WORD + 1], word, word[:, :-1]], dim=1
    )
    return sequences, word[:, PROMPT:]


@torch.inference_mode()
def shares_right(
    model: Model, windows: Int[Tensor, "W L"], answers: Int[Tensor, "W n"], *, exact: bool
) -> Float[Tensor, " W"]:
    """Share of each answer that the model predicts, given windows without its last token.

    Args:
        model: tokens to logits.
        windows: which end in all tokens of the answer but the last.
        answers: ids.
        exact: 1 if all tokens of the answer are right, else 0.
    """
    count = answers.shape[1]
    rows = rows_a_call(windows.shape[1])
    right = []
    for part, wanted in zip(torch.split(windows, rows), torch.split(answers, rows), strict=True):
        hit = model(part)[:, -count:].argmax(-1).cpu() == wanted
        right.append(hit.all(1).double() if exact else hit.double().mean(1))
    return torch.cat(right)


def letters() -> Int[Tensor, " P"]:
    """Lower-case letters as bytes."""
    return FIRST_LETTER + torch.arange(LETTERS)


def repeat(
    windows: Int[Tensor, "W L"], generator: torch.Generator, *, latest: float
) -> Int[Tensor, "W L"]:
    """Bytes that repeat a random word from a place in the first ``latest`` of a window on."""
    repeated = windows.clone()
    for row in repeated:
        size = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
        begin = int(torch.randint(max(1, int(latest * len(row))), (), generator=generator))
        word = FIRST_LETTER + torch.randint(LETTERS, (size,), generator=generator)
        space = len(row) - begin
        row[begin:] = word.repeat(-(-space // size))[:space]
    return repeated
