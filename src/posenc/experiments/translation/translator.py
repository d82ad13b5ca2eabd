"""A trained translator: model and vocabulary, on disk and at work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from posenc.errors import CheckpointError, DataError
from posenc.experiments.sequences import BEGIN, END, read_source
from posenc.experiments.translation.subwords import Subwords
from posenc.models import Transformer, beam_search
from posenc.storage import read_bytes, write_bytes

__all__ = ["ROOM", "Translator"]

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
        length = self.model.config.max_length
        assert length is not None  # whoever trains one sets it
        return length - ROOM

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
        """A line for each; empty ones stay empty.

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
            self.subwords.require_known(lines, where)
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
            found = self._search([sources[i] for i in rows], beams, length_penalty)
            for index, ids in zip(rows, found, strict=True):
                written[index] = self.subwords.decode(ids)
            count += len(rows)
            done(count)
        return written

    @torch.inference_mode()
    def _search(
        self, sources: Sequence[Sequence[int]], beams: int, length_penalty: float
    ) -> list[list[int]]:
        given = read_source(self.model, sources)
        longest = max(map(len, sources))
        device = self.model.source_embedding.weight.device
        found = beam_search(
            given,
            torch.full((len(sources), 1), BEGIN, device=device),
            beams=beams,
            max_new_tokens=min(longest * 3 // 2 + SLACK, self.longest + ROOM),
            stop_token=END,
            length_penalty=length_penalty,
        )
        return [
            row[1 : 1 + length]
            for row, length in zip(
                found.tokens[:, 0].tolist(), found.lengths[:, 0].tolist(), strict=True
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
                remedy="Give the folder that posenc translate train has written.",
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
