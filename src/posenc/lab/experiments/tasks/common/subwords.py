"""A subword vocabulary, learned from text and written back as text, and scores of translations."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from posenc.errors import ArgumentError, CheckpointError, DataError
from posenc.storage import panics_as_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RESERVED = 2
"""Ids below this are the model's: what begins a sentence, and what ends it."""

LEAST = 8


class Subwords:
    """Byte-pair encoding over characters (Sennrich et al. 2016), of words with their blanks.

    Text is composed (Unicode NFC), and blanks of any kind and number become one space. Every
    character of the text it learns from is in the vocabulary, and no other.

    Args:
        tokenizer: as ``learn`` makes it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = {token for token in tokenizer.get_vocab() if len(token) == 1}

    @classmethod
    def learn(cls, lines: Iterable[str], *, size: int) -> Subwords:
        """The vocabulary of a text, a pure function of it.

        Args:
            lines: sentences, of both languages if they share it.
            size: most subwords, unless there are more characters; at least 8.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if size < LEAST:
            raise ArgumentError(
                "vocabulary", expected=f"{LEAST} or more", got=size, remedy="2000 is a good start."
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False)
        tokenizer.train_from_iterator((_cleaned(line) for line in lines), trainer)
        return cls(tokenizer)

    @property
    def size(self) -> int:
        """Ids, the reserved ones included."""
        return RESERVED + int(self._tokenizer.get_vocab_size())

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of each line, without characters that are not in the vocabulary."""
        encodings = self._tokenizer.encode_batch([_cleaned(line) for line in lines])
        return [[RESERVED + number for number in encoding.ids] for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, the reserved ones left out."""
        text: str = self._tokenizer.decode([number - RESERVED for number in ids if number >= 2])
        return text.strip()

    def unknown(self, line: str) -> list[str]:
        """Characters of a line that are not in the vocabulary, each once."""
        return sorted({c for c in _cleaned(line) if c != " " and c not in self._characters})

    def require_characters(self, lines: Sequence[str], where: str) -> None:
        """Raise DataError for the first line of file ``where`` with unknown characters."""
        for number, line in enumerate(lines, start=1):
            strange = self.unknown(line)
            if strange:
                named = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in strange[:5])
                raise DataError(
                    "text",
                    expected=f"characters in {where} that the model was trained on",
                    got=f"{named} in line {number}",
                    remedy="Replace them, or leave them out (--drop-unknown).",
                )

    def to_json(self) -> str:
        """The tokenizer in the format of the tokenizers library."""
        text: str = self._tokenizer.to_str()
        return text

    @classmethod
    def from_json(cls, text: str, *, where: str) -> Subwords:
        """The vocabulary of ``to_json``; CheckpointError if it is damaged."""
        from tokenizers import Tokenizer

        try:
            with panics_as_errors():
                return cls(Tokenizer.from_str(text))
        except Exception as error:  # the library raises no narrower one
            raise CheckpointError(
                where,
                expected="a vocabulary written by posenc",
                got=error,
                remedy="Train the translator again.",
            ) from error


def _cleaned(line: str) -> str:
    return " ".join(unicodedata.normalize("NFC", line).split())


def bleu(written: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """BLEU from 0 to 100 as sacrebleu computes it (Post 2018), and what was computed."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    score = metric.corpus_score(list(written), [list(references)]).score
    return float(score), str(metric.get_signature())


def chrf(written: Sequence[str], references: Sequence[str]) -> float:
    """chrF from 0 to 100 (Popović 2015), which unlike BLEU distinguishes short sentences."""
    from sacrebleu.metrics.chrf import CHRF

    return float(CHRF().corpus_score(list(written), [list(references)]).score)
