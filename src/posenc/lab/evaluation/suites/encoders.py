"""Measurements of encoders of text: loss of masked tokens, and retrieval of long documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from posenc.errors import ArgumentError, DataError
from posenc.lab.evaluation.results import StudyReading
from posenc.lab.evaluation.suites.next_token import (
    BUDGET,
    FEWEST,
    MOST,
    cost,
    profile_of,
    require_text,
    rounded,
    words,
)
from posenc.lab.evaluation.texts import SpecialTokens, Text
from posenc.lab.experiments.corpus import Pieces
from posenc.lab.experiments.text_loss import at_device, restored, rows_a_call, unigram_entropy
from posenc.lab.training.seeding import generator

RATE = 0.15
"""Share of masked tokens, as in BERT."""


@dataclass(frozen=True, eq=False)
class MaskedSuite:
    """Measurements of masked language models on the same masked tokens.

    Args:
        text: ``[T]`` ids.
        pieces: that they consist of.
        masked: ``[T]``, tokens hidden wherever they are read.
        special: added to every text.
        lengths: of contexts, special tokens included; in all of them the tokens of the shortest, in
            the middle, are scored.
        windows: for one number.
    """

    text: Int[Tensor, " T"]
    pieces: Pieces
    masked: Bool[Tensor, " T"]
    special: SpecialTokens
    lengths: tuple[int, ...]
    windows: int

    @classmethod
    def of(cls, text: Text, lengths: tuple[int, ...], *, seed: int) -> MaskedSuite:
        """The suite of a text, with the default number of windows.

        Raises:
            DataError: if the text is too short.
            ArgumentError: if there is no mask token.
        """
        if text.special.mask is None:
            raise ArgumentError(
                "checkpoint",
                expected="a tokenizer with a token that hides others ([MASK] or <mask>)",
                got="one without",
                remedy="Save the tokenizer that the model was trained with into the folder.",
            )
        longest, ids = lengths[-1], text.measured
        require_text(len(ids), longest, text.unit)
        masked = torch.rand(len(ids), generator=generator(seed)) < RATE
        windows = min(MOST, max(FEWEST, BUDGET // longest), len(ids) // longest)
        return cls(ids, text.measured_pieces, masked, text.special, lengths, windows)

    def measure(self, model: nn.Module, *, limit: int | None = None) -> StudyReading:
        """See ``Suite``; contexts are cut to ``limit`` tokens around the scored ones."""
        read = {length: min(length, limit or length) for length in self.lengths}
        bits = {length: self._bits(model, *self._middle(length)) for length in set(read.values())}
        longest = read[self.lengths[-1]]
        begins = len(self.special.begin)
        context = self.lengths[-1] - self.special.count
        profile = profile_of(self.pieces, context, self.windows)
        by_position = profile.shortened(longest - self.special.count).curve(
            lambda rows: self._bits(model, rows[:, 1:], self.masked[rows[:, 1:]])
        )
        inputs = self.special.around(self.text[self._middle(longest)[0][:1]])
        spent = cost(model, inputs, count=longest)
        means = {length: bits[scored].nanmean(1) for length, scored in read.items()}
        return StudyReading(
            loss={length: float(bits[scored].nanmean()) for length, scored in read.items()},
            by_position=tuple((at + begins, bits) for at, bits in by_position if bits == bits),
            **spent._asdict(),
            pieces={"loss": {n: rounded(values[~values.isnan()]) for n, values in means.items()}},
        )

    def facts(self, unit: str) -> dict[str, Any]:
        """See ``Suite``."""
        rows, chosen = self._middle(self.lengths[0])
        count = int(chosen.sum())
        named = words("masked", unit=unit, goal=self.lengths[-1], count=count, rate=RATE)
        return named | {
            "targets": count,
            "trivial": unigram_entropy(self.text, rows[chosen]),
            "trivial_rule": f"{unit} frequencies",
        }

    def _middle(self, length: int) -> tuple[Int[Tensor, "W L"], Bool[Tensor, "W L"]]:
        """Contexts as indices of the text, and which tokens are scored."""
        shortest, context, longest = (
            size - self.special.count for size in (self.lengths[0], length, self.lengths[-1])
        )
        last_start = self.pieces.count(longest) - 1
        begins = self.pieces.begins(
            torch.arange(self.windows) * last_start // self.windows, longest
        )
        middle = begins.unsqueeze(1) + (longest - shortest) // 2
        rows = begins.unsqueeze(1) + (longest - context) // 2 + torch.arange(context)
        inside = (rows >= middle) & (rows < middle + shortest)
        return rows, inside & self.masked[rows]

    def _bits(
        self, model: nn.Module, rows: Int[Tensor, "W L"], chosen: Bool[Tensor, "W L"]
    ) -> Tensor:
        """``[W, L]`` bits of the chosen tokens, NaN for others."""
        assert self.special.mask is not None  # checked in ``of``
        wanted = self.text[rows]
        inputs = self.special.around(wanted.masked_fill(self.masked[rows], self.special.mask))
        bits, _ = restored(
            at_device(model), inputs, self.special.around(wanted), self.special.around(chosen)
        )
        return bits[:, len(self.special.begin) : inputs.shape[1] - len(self.special.end)]


PARTS = 4
"""Parts of a document; a passage is cut out of the middle of each."""

PASSAGE = 48
"""Tokens of a passage; fewer in short documents."""

FEWEST_DOCUMENTS, MOST_DOCUMENTS = 8, 64
"""Documents."""

READ = 3 * BUDGET // 2
"""Tokens of all documents together, at the longest."""


@dataclass(frozen=True, eq=False)
class RetrievalSuite:
    """Measurements of sentence encoders on the same documents.

    A passage is cut out of the middle of each quarter of a document. Each passage is a query, for
    which the rest of its document should rank first among the rests of all, by the cosine of mean
    token vectors.

    Args:
        documents: ``[N, T]`` ids: the longest length and the passages.
        special: added to every text.
        lengths: of documents, with special tokens, without passages.
        passage: tokens in one.
    """

    documents: Int[Tensor, "N T"]
    special: SpecialTokens
    lengths: tuple[int, ...]
    passage: int

    @classmethod
    def of(cls, text: Text, lengths: tuple[int, ...]) -> RetrievalSuite:
        """The suite of a text, with the default number of documents, sampled evenly.

        Raises:
            DataError: if the text is too short.
        """
        passage = min(PASSAGE, max(1, lengths[0] // PARTS))
        size = lengths[-1] - text.special.count + PARTS * passage
        ids = text.measured
        if len(ids) < FEWEST_DOCUMENTS * size:
            raise DataError(
                "text",
                expected=f"at least {FEWEST_DOCUMENTS * size} {text.unit}s, for "
                f"{FEWEST_DOCUMENTS} documents of {lengths[-1]}",
                got=len(ids),
                remedy="Give a longer text, or ask for shorter contexts.",
            )
        count = min(MOST_DOCUMENTS, max(FEWEST_DOCUMENTS, READ // lengths[-1]), len(ids) // size)
        pieces = text.measured_pieces
        numbers = torch.arange(count) * (pieces.count(size) - 1) // max(1, count - 1)
        begins = pieces.begins(numbers, size)
        documents = ids[begins.unsqueeze(1) + torch.arange(size)]
        return cls(documents, text.special, lengths, passage)

    def measure(self, model: nn.Module, *, limit: int | None = None) -> StudyReading:
        """See ``Suite``; documents are cut after ``limit`` tokens."""
        hits = {length: self._hits(model, length, limit) for length in self.lengths}
        longest = self.lengths[-1]
        inputs = self._cut(self._rest(longest)[:1], limit)
        spent = cost(model, inputs, count=inputs.shape[1])
        return StudyReading(
            needles={n: tuple(hit.double().mean(1).tolist()) for n, hit in hits.items()},
            **spent._asdict(),
            pieces={
                "needles": {n: tuple(hit.double().mean(0).tolist()) for n, hit in hits.items()}
            },
        )

    def facts(self, unit: str) -> dict[str, Any]:
        """See ``Suite``."""
        count = len(self.documents)
        named = words("retrieval", goal=self.lengths[-1], count=count, depths=PARTS)
        return named | {
            "depths": tuple((part + 0.5) / PARTS for part in range(PARTS)),
            "needles": f"passages of {self.passage} {unit}s, each cut out of a document, by which "
            f"what is left of it is looked for among what is left of all {count}",
            "chance": 1 / count,
            "trivial": 1 / count,
            "trivial_rule": "a guess",
            "asked": count,
            "sample": "documents",
        }

    def _hits(self, model: nn.Module, length: int, limit: int | None) -> Bool[Tensor, "P N"]:
        """True for passages whose document ranks first."""
        rest = self._vectors(model, self._cut(self._rest(length), limit))
        hits = []
        for passage in self._passages(length):
            scores = self._vectors(model, self.special.around(passage)) @ rest.T
            hits.append(scores.argmax(1) == torch.arange(len(rest)))
        return torch.stack(hits)

    def _places(self, length: int) -> tuple[int, list[int]]:
        """Tokens of a document with its passages, and where the passages begin."""
        total = length - self.special.count + PARTS * self.passage
        part = total // PARTS
        return total, [index * part + (part - self.passage) // 2 for index in range(PARTS)]

    def _passages(self, length: int) -> list[Int[Tensor, "N p"]]:
        begins = self._places(length)[1]
        return [self.documents[:, begin : begin + self.passage] for begin in begins]

    def _rest(self, length: int) -> Int[Tensor, "N n"]:
        """Documents without their passages, without special tokens."""
        total, begins = self._places(length)
        in_document = torch.ones(total, dtype=torch.bool)
        for begin in begins:
            in_document[begin : begin + self.passage] = False
        return self.documents[:, :total][:, in_document]

    def _cut(self, ids: Int[Tensor, "N n"], limit: int | None) -> Int[Tensor, "N m"]:
        most = None if limit is None else limit - self.special.count
        return self.special.around(ids[:, :most])

    @torch.inference_mode()
    def _vectors(self, model: nn.Module, tokens: Int[Tensor, "N n"]) -> Float[Tensor, "N C"]:
        run, parts = at_device(model), torch.split(tokens, rows_a_call(tokens.shape[1]))
        means = [run(part).float().mean(1).cpu() for part in parts]
        return nn.functional.normalize(torch.cat(means), dim=1)
