"""Model and vocabulary of a translator: made, saved, loaded, and translating."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from examples.translation.settings import Settings
from posenc.errors import CheckpointError, DataError
from posenc.lab.experiments.recipe import Recipe, fitted_options
from posenc.lab.experiments.sequences import BEGIN, END, Subwords, read_source
from posenc.models import Transformer, TransformerConfig, beam_search
from posenc.storage import read_bytes, write_bytes

__all__ = ["Translator", "new_model"]

VOCABULARY, MOST_VOCABULARY = "vocabulary.json", 1 << 26

ROOM = 1
"""Positions a side beyond its subwords: what begins a target, or ends a source."""

ROWS, SLACK = 32, 10
"""Sentences translated at a time; a translation has at most half as many subwords again as the
source, and so many more."""


class Translator:
    """Translates lines of text.

    Args:
        model: trained, in eval mode.
        subwords: of both languages.
    """

    def __init__(self, model: Transformer, subwords: Subwords) -> None:
        self.model, self.subwords = model, subwords

    @property
    def longest(self) -> int:
        """Subwords of the longest sentence it can read."""
        return (self.model.config.max_length or ROOM) - ROOM

    def translate(
        self,
        lines: Sequence[str],
        *,
        beams: int = 4,
        length_penalty: float = 0.6,
        where: str = "the text",
        drop_unknown: bool = False,
        done: Callable[[int], None] = lambda count: None,
    ) -> list[str]:
        """Translate line by line; empty lines stay empty.

        Args:
            lines: sentences, one a line.
            beams: hypotheses kept; 1 always takes the likeliest next subword.
            length_penalty: see ``beam_search``.
            where: the file they come from, for errors.
            drop_unknown: leave out characters that the model was not trained on, instead of
                refusing the text.
            done: called with the number of lines that are translated so far.

        Raises:
            DataError: on unknown characters, and on lines longer than the model can read; it
                names the first line. Nothing has been translated then.
            ArgumentError: as ``beam_search``.
        """
        if not drop_unknown:
            self.subwords.require_characters(lines, where)
        sources = self.subwords.encode(lines)
        for number, source in enumerate(sources, start=1):
            if len(source) > self.longest:
                raise DataError(
                    "text",
                    expected=f"lines of {where} of at most {self.longest} subwords",
                    got=f"{len(source)} in line {number}",
                    remedy="Write one sentence a line, or train with a larger --max-length.",
                )
        written = [""] * len(lines)
        # Longest first: what does not fit into memory fails at once, and batches are even.
        order = sorted((i for i, s in enumerate(sources) if s), key=lambda i: -len(sources[i]))
        count = len(lines) - len(order)
        for begin in range(0, len(order), ROWS):
            rows = order[begin : begin + ROWS]
            targets = self._search([sources[i] for i in rows], beams, length_penalty)
            for index, ids in zip(rows, targets, strict=True):
                written[index] = self.subwords.decode(ids)
            count += len(rows)
            done(count)
        return written

    @torch.inference_mode()
    def _search(
        self, sources: Sequence[Sequence[int]], beams: int, length_penalty: float
    ) -> list[list[int]]:
        longest = max(map(len, sources))
        device = self.model.source_embedding.weight.device
        hypotheses = beam_search(
            read_source(self.model, sources),
            torch.full((len(sources), 1), BEGIN, device=device),
            beams=beams,
            max_new_tokens=min(longest * 3 // 2 + SLACK, self.longest + ROOM),
            stop_token=END,
            length_penalty=length_penalty,
        )
        return [
            row[1 : 1 + length]
            for row, length in zip(
                hypotheses.tokens[:, 0].tolist(), hypotheses.lengths[:, 0].tolist(), strict=True
            )
        ]

    def save(self, folder: Path | str) -> None:
        """Write ``model.safetensors``, ``config.json`` and ``vocabulary.json``.

        Raises:
            OutputError: when the folder cannot be written to.
        """
        folder = Path(folder)
        self.model.save(folder)
        write_bytes(folder / VOCABULARY, self.subwords.to_json().encode())

    @classmethod
    def load(cls, folder: Path | str, *, device: torch.device | str = "cpu") -> Translator:
        """The translator that ``save`` wrote.

        Raises:
            CheckpointError: when files are missing, damaged, of another kind or do not belong
                together.
        """
        folder = Path(folder)
        model = Transformer.load(folder, device=device)
        path = folder / VOCABULARY
        try:
            text = read_bytes(path, most=MOST_VOCABULARY).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                str(path),
                expected="the vocabulary of a translator",
                got=error,
                remedy="Give the folder that was trained into.",
            ) from error
        subwords = Subwords.from_json(text, where=str(path))
        size = model.config.source_vocabulary
        if subwords.size != size or model.config.max_length is None:
            raise CheckpointError(
                str(path),
                expected=f"{size} ids, as the model has, and a model with a longest length",
                got=f"{subwords.size} ids, {model.config.max_length} positions",
                remedy="vocabulary.json and config.json do not belong together.",
            )
        return cls(model, subwords)


def new_model(settings: Settings, vocabulary: int) -> Transformer:
    """An untrained encoder–decoder, its weights drawn from torch's global generator.

    Raises:
        ArgumentError: when an encoding cannot serve.
    """
    length = settings.max_length + ROOM
    own, cross = Recipe.parse(settings.encoding), Recipe.parse(settings.cross_encoding)
    options = fitted_options(own, length)
    return Transformer(
        TransformerConfig(
            source_vocabulary=vocabulary,
            target_vocabulary=vocabulary,
            shared=True,
            dim=settings.width,
            heads=settings.heads,
            encoder_layers=settings.layers,
            decoder_layers=settings.layers,
            encoder_encoding=own.encoding,
            decoder_encoding=own.encoding,
            cross_encoding=cross.encoding,
            encoder_options=options,
            decoder_options=options,
            cross_options=fitted_options(cross, length),
            dropout=settings.dropout,
            max_length=length,
        )
    )
