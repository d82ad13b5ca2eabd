"""Sequences to translate or to classify: read from files, cut into subwords, split, and batched."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from posenc.errors import ArgumentError, CheckpointError, DataError
from posenc.lab.experiments.corpus import MOST_BYTES, unusable
from posenc.lab.experiments.results import Corpus
from posenc.lab.folders import panics_as_errors
from posenc.lab.training.objectives import token_loss
from posenc.layout import Layout
from posenc.models import Transformer
from posenc.models.transformer import Given
from posenc.storage import read_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Sentences and their translations.

    Args:
        name: where they come from, in a phrase.
        pairs: (source, target), as they stand in the text but for blanks at the ends.
        skipped: lines left out because one side was empty.
        sha256: of all pairs.
    """

    name: str
    pairs: Sequence[tuple[str, str]]
    skipped: int
    sha256: str


def read_parallel(text: Path, target: Path | None = None, *, skip_empty: bool = False) -> Parallel:
    """The pairs of a TSV file (source, tab, target), or of two files, line by line.

    Args:
        text: the TSV, or the source's file.
        target: the target's file.
        skip_empty: leave out pairs of which a side is empty, instead of refusing the text.

    Raises:
        DataError: on a file that is missing, unreadable, empty or not in UTF-8, on unequal numbers
            of lines, lines without exactly one tab, and empty lines; it names the first.
    """
    text = Path(text)
    if target is None:
        pairs = [(source, other) for source, other in read_columns(text, 2, skip=skip_empty)]
        name = text.name
    else:
        target = Path(target)
        sources, targets = read_lines(text), read_lines(target, "target")
        require_equal(sources, targets, str(text), str(target), "target")
        pairs = list(zip(sources, targets, strict=True))
        name = f"{text.name} and {target.name}"
    stripped = [(source.strip(), other.strip()) for source, other in pairs]
    for number, (source, other) in enumerate(stripped, start=1):
        if not ((source and other) or skip_empty):
            empty = text if target is None or not source else target
            raise DataError(
                "text",
                expected="a sentence and its translation in every line",
                got=f"line {number} of {empty}, of which nothing is left without blanks",
                remedy="Remove the line from both sides.",
            )
    complete = [pair for pair in stripped if all(pair)]
    if not complete:
        raise unusable(text, "no pairs", "Give sentences and their translations.")
    digest = hashlib.sha256()
    for source, other in complete:
        digest.update(f"{source}\t{other}\n".encode())
    return Parallel(
        name=name, pairs=complete, skipped=len(pairs) - len(complete), sha256=digest.hexdigest()
    )


def require_equal(
    lines: Sequence[str], others: Sequence[str], first: str, second: str, argument: str
) -> None:
    """Refuse two texts that have not equally many lines.

    Raises:
        DataError: with both numbers.
    """
    if len(lines) != len(others):
        raise DataError(
            argument,
            expected=f"{len(lines):,} lines in {second}, as in {first}",
            got=f"{len(others):,}",
            remedy="Line N of one must translate line N of the other.",
        )


def read_columns(path: Path, count: int, *, skip: bool = False) -> list[tuple[str, ...]]:
    """The cells of a file with tabs between them.

    Args:
        path: the file.
        count: cells a line.
        skip: leave out empty lines.

    Raises:
        DataError: on a line with more cells or fewer; as ``read_lines``.
    """
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        cells = tuple(line.split("\t"))
        if skip and not line.strip(" "):
            continue
        if len(cells) != count:
            got = "an empty line" if not line.strip() else f"{len(cells) - 1}"
            raise DataError(
                "text",
                expected=f"{count - 1} tab in every line of {path}",
                got=f"{got} in line {number}",
                remedy="Put one between the cells, and none within them.",
            )
        rows.append(cells)
    return rows


def read_lines(path: Path, argument: str = "text") -> list[str]:
    r"""The lines of a file in UTF-8, ended by ``\n`` or ``\r\n`` and by nothing else.

    Raises:
        DataError: when it is missing, unreadable, empty, too large, or not in UTF-8.
    """
    path = Path(path)
    try:
        content = read_bytes(path, most=MOST_BYTES)
    except OSError as error:
        remedy = f"Give a text file of at most {MOST_BYTES:,} bytes that you may read."
        if isinstance(error, FileNotFoundError):
            remedy = "Check the path for a typing error."
        raise unusable(path, error.strerror or str(error), remedy, argument) from error
    if not content.strip():
        raise unusable(path, "an empty file", "Give some text.", argument)
    return decoded(content, path, argument)


def decoded(content: bytes, path: Path | str, argument: str = "text") -> list[str]:
    """The lines of a text in UTF-8.

    Raises:
        DataError: when it is not; it names the byte and the line.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            argument,
            expected=f"{path} in UTF-8",
            got=f"byte 0x{content[error.start]:02X} in line {line}",
            remedy="Convert it: iconv -f LATIN1 -t UTF-8 FILE, if that is what it is in.",
        ) from error
    # Not splitlines(), to which a form feed or a Unicode separator within a sentence ends a line.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


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


BEGIN, END, SYMBOLS = 0, 1, 2
"""Tokens: what begins a target, what ends both sides, and the first of the symbols."""


def drawn(name: str) -> float:
    """A number from 0 to 1 that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def padded(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Tensor]:
    """Pairs of source and target symbols as a batch.

    ``source`` and ``target`` are ``[B, L]``, padded on the right: sources end with the end,
    targets begin with the begin and end with the end. ``sizes`` ``[B, 2]`` counts their tokens.
    """
    sources = [[*source, END] for source, _ in pairs]
    targets = [[BEGIN, *target, END] for _, target in pairs]
    sizes = [[len(a), len(b)] for a, b in zip(sources, targets, strict=True)]
    return {
        "source": stacked(sources, END),
        "target": stacked(targets, END),
        "sizes": torch.tensor(sizes),
    }


def pair_loss(model: Transformer, batch: Mapping[str, Tensor], *, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats of a target's token after those before it.

    Args:
        model: the encoder–decoder.
        batch: as ``padded`` makes it.
        smoothing: see ``token_loss``.
    """
    source, target, sizes = batch["source"], batch["target"], batch["sizes"]
    inputs, wanted = target[:, :-1], target[:, 1:]
    layout = real(inputs.shape[1], sizes[:, 1] - 1)
    logits = model(source, inputs, real(source.shape[1], sizes[:, 0]), layout)
    return token_loss(logits, wanted, valid=layout.valid, smoothing=smoothing)


def read_source(model: Transformer, sources: Sequence[Sequence[int]]) -> Given:
    """The model's decoder with sources of any lengths in view."""
    device = model.source_embedding.weight.device
    ended = [[*source, END] for source in sources]
    tokens = stacked(ended, END).to(device)
    sizes = torch.tensor([len(source) for source in ended], device=device)
    return model.given(tokens, real(tokens.shape[1], sizes))


def stacked(rows: Sequence[Sequence[int]], fill: int) -> Int[Tensor, "B L"]:
    """Rows of any lengths as one tensor, padded on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def real(length: int, sizes: Int[Tensor, " B"]) -> Layout:
    """Tokens at 0, 1, 2, … in every row, of which the first ``sizes`` are real."""
    valid: Bool[Tensor, "B L"] = torch.arange(length, device=sizes.device) < sizes.unsqueeze(1)
    return replace(Layout.sequence(length, device=sizes.device), valid=valid)


MOST, FEWEST = 512, 16
"""Examples tested at a length, and how many there must be for a number to mean something."""


class NamedExample(Protocol):
    """An example of a task.

    Attributes:
        name: decides by its hash whether it is held out.
        length: in symbols or words.
    """

    @property
    def name(self) -> str: ...
    @property
    def length(self) -> int: ...


E = TypeVar("E", bound=NamedExample)


@dataclass(frozen=True)
class Split(Generic[E]):
    """Examples to train on, and to test on at each length.

    Args:
        train: of the training length at most.
        tests: length to examples, ascending; the first is the training length.
    """

    train: Sequence[E]
    tests: Mapping[int, Sequence[E]]

    @classmethod
    def of(
        cls,
        examples: Sequence[E],
        lengths: Sequence[int],
        *,
        held_out: float,
        most: int = MOST,
        unit: str = "symbols",
    ) -> Split[E]:
        """The split by the hashes of the examples' names.

        At each length but the first are tested those that are longer than the length before.

        Args:
            examples: all of them; those of one name fall into one part.
            lengths: ascending, the training length first.
            held_out: share of the short ones that is not trained on.
            most: number of examples tested at a length, at most.
            unit: of the lengths, for the error.

        Raises:
            DataError: when there is nothing to train on, or to test on at the training length.
        """
        place = {example.name: drawn(example.name) for example in examples}
        ranked = sorted(examples, key=lambda example: (place[example.name], example.name))
        short = [example for example in ranked if example.length <= lengths[0]]
        train = [example for example in short if place[example.name] >= held_out]
        tests = {lengths[0]: [e for e in short if place[e.name] < held_out][:most]}
        for before, length in pairwise(lengths):
            tests[length] = [e for e in ranked if before < e.length <= length][:most]
        if len(train) < FEWEST or len(tests[lengths[0]]) < FEWEST:
            raise DataError(
                "text",
                expected=f"at least {FEWEST} examples of at most {lengths[0]} {unit} to train on, "
                f"and {FEWEST} held out",
                got=f"{len(train)} and {len(tests[lengths[0]])}",
                remedy="Give more text, or a longer train_length.",
            )
        return cls(train, tests)

    def corpus(self, *, name: str, sha256: str, files: int, unit: str) -> Corpus:
        """The record of the data, with the numbers of examples."""
        return Corpus(
            name=name,
            sha256=sha256,
            files=files,
            train_bytes=len(self.train),
            held_out_bytes=sum(map(len, self.tests.values())),
            unit=unit,
        )
