"""Texts as ids of a tokenizer or as bytes, in the chat template of a checkpoint if it has one."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.errors import ArgumentError, CheckpointError
from posenc.lab.evaluation.suites.needles import ByteNeedles, KeyNeedles, Needles, letters
from posenc.lab.experiments.corpus import Pieces, read_corpus
from posenc.lab.folders import panics_as_errors
from posenc.storage import MOST_JSON, read_bytes
from posenc.transformers.checkpoints import SAVE_AGAIN, read_object

Encode = Callable[[str], Sequence[int]]
"""Text to ids, without special tokens."""

Decode = Callable[[Sequence[int]], str]
"""Ids to text."""

MOST_BYTES = 4_000_000
"""Bytes of each part that are encoded by a tokenizer, an equal number of each of its pieces."""

BYTES = 256
"""Vocabulary of models of bytes, without a mask."""

MASKS = ("[MASK]", "<mask>")
"""Mask tokens by default."""

MOST_TOKENIZER = 1 << 26
"""Bytes of a tokenizer.json, twice those of 256,000 tokens."""

POOL = 256
"""Number of ids that words to be copied consist of: the most frequent of the text."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that a tokenizer adds.

    Args:
        begin, end: before and after every text.
        mask: in place of a masked token, if there is one.
    """

    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    mask: int | None = None

    @property
    def count(self) -> int:
        """Number of ids added to a text."""
        return len(self.begin) + len(self.end)

    def around(self, rows: Tensor) -> Tensor:
        """``[N, L]`` ids (booleans) with these (with False) before and after them."""
        begin, end = (
            torch.tensor(ids, dtype=torch.int64).expand(len(rows), -1)
            * (rows.dtype is not torch.bool)
            for ids in (self.begin, self.end)
        )
        return torch.cat([begin.to(rows.dtype), rows, end.to(rows.dtype)], dim=1)


@dataclass(frozen=True)
class TokenizerFile:
    """The tokenizer of a checkpoint.

    Args:
        encode: text to ids, without special tokens; None: ids are bytes.
        decode: ids to text, without special tokens.
        special: tokens that it adds.
        identity: hash of its file; "" for bytes.
        chat: a user's message to the text up to the model's answer; None: no chat template.
    """

    encode: Encode | None
    decode: Decode
    special: SpecialTokens
    identity: str = ""
    chat: Callable[[str], str] | None = None


@dataclass(frozen=True, eq=False)
class Text:
    """A text to measure on, and one to train on.

    Args:
        measured, trained: ``[T]`` ids, disjoint parts of the text; the latter may be empty.
        measured_pieces, trained_pieces: pieces that they consist of.
        unit: of an id, ``"byte"`` or ``"token"``.
        needles: how they are hidden in it.
        pool: ids that words to be copied consist of.
        name: description of the text.
        sha256: of its bytes.
        special: tokens that the tokenizer adds.
        plain: what is measured on, as text.
        tokenizer: of the ids; None: bytes, or unknown.
    """

    measured: Int[Tensor, " T"]
    trained: Int[Tensor, " T"]
    measured_pieces: Pieces
    trained_pieces: Pieces
    unit: str
    needles: Needles
    pool: Int[Tensor, " P"]
    name: str
    sha256: str
    special: SpecialTokens = field(default_factory=SpecialTokens)
    plain: str = ""
    tokenizer: TokenizerFile | None = None


def read_ids(
    path: Path | None,
    *,
    encode: Encode | None,
    training: bool,
    special: SpecialTokens | None = None,
) -> Text:
    """The text at ``path``, or the shipped one, as ids.

    Args:
        path: a file or folder.
        encode: of the tokenizer; None: ids are bytes.
        training: measure on held-out blocks (see ``TextCorpus``) and train on the rest. The shipped
            text is always measured so, as posenc's own models were trained on the rest.
        special: tokens that the tokenizer adds; none by default.

    Raises:
        DataError: if it is unusable.
    """
    corpus = read_corpus(path)
    measures_all = path is not None and not training
    read = (corpus.text,) if measures_all else corpus.held_out
    measured, measured_pieces = _ids(read, encode)
    trained, trained_pieces = _ids(corpus.train if training else (), encode)
    return Text(
        measured=measured,
        trained=trained,
        measured_pieces=measured_pieces,
        trained_pieces=trained_pieces,
        unit="byte" if encode is None else "token",
        needles=ByteNeedles() if encode is None else KeyNeedles(encode),
        pool=letters() if encode is None else _pool(measured),
        name=corpus.name,
        sha256=corpus.sha256,
        special=special or SpecialTokens(),
        plain="\n".join(part.decode(errors="replace") for part in _parts(read)),
    )


def _of_bytes(ids: Sequence[int]) -> str:
    return bytes(number for number in ids if number < BYTES).decode(errors="replace")


def read_tokenizer(folder: Path, vocabulary: int) -> TokenizerFile:
    """The tokenizer of a checkpoint folder.

    Args:
        folder: with ``tokenizer.json``; models of 256 bytes (and a mask) need none.
        vocabulary: of the model.

    Raises:
        ArgumentError: if the tokenizers library is missing.
        CheckpointError: if the tokenizer is missing, damaged, or another model's.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        if vocabulary in (BYTES, BYTES + 1):
            mask = BYTES if vocabulary > BYTES else None
            return TokenizerFile(None, _of_bytes, SpecialTokens(mask=mask))
        raise CheckpointError(
            str(path),
            expected=f"a tokenizer for a vocabulary of {vocabulary}",
            got="no such file",
            remedy="Save the fast tokenizer into the folder. Only models of 256 bytes (and a mask) "
            "need none.",
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ArgumentError(
            "checkpoint",
            expected="the tokenizers library, which reads its tokenizer.json",
            got="none installed",
            remedy="pip install 'posenc[extend]'",
        ) from error
    try:
        with panics_as_errors():
            stored = read_bytes(path, most=MOST_TOKENIZER)
            tokenizer = Tokenizer.from_buffer(stored)
            tokenizer.no_truncation()
            tokenizer.no_padding()
            content = tokenizer.encode("a", add_special_tokens=False).ids
            around = tokenizer.encode("a").ids
    except Exception as error:  # the library raises nothing narrower
        raise _no_tokenizer(path, error) from error

    def encode(text: str) -> list[int]:
        try:
            with panics_as_errors():
                ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:
            raise _no_tokenizer(path, error) from error
        if ids and max(ids) >= vocabulary:
            raise CheckpointError(
                str(path),
                expected=f"ids below {vocabulary}, the model's vocabulary",
                got=max(ids),
                remedy="Model and tokenizer do not belong together.",
            )
        return ids

    return TokenizerFile(
        encode,
        tokenizer.decode,
        _special(tokenizer, folder, content, around),
        identity=hashlib.sha256(stored).hexdigest(),
        chat=read_template(folder),
    )


def _special(tokenizer: Any, folder: Path, content: list[int], around: list[int]) -> SpecialTokens:
    """Tokens that a tokenizer adds.

    Args:
        tokenizer: of the tokenizers library.
        folder: whose ``tokenizer_config.json`` names the mask.
        content, around: ids of a text without the tokens, and with them.
    """
    named = text_of(read_object(folder / "tokenizer_config.json").get("mask_token"))
    masks = [tokenizer.token_to_id(name) for name in (named, *MASKS) if isinstance(name, str)]
    mask = next((number for number in masks if number is not None), None)
    inside = (n for n, number in enumerate(around) if number in content)
    begin = next(inside, len(around) // 2)
    return SpecialTokens(tuple(around[:begin]), tuple(around[begin + len(content) :]), mask)


def _no_tokenizer(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(str(path), expected="a tokenizer", got=error, remedy=SAVE_AGAIN)


def _ids(parts: Sequence[bytes], encode: Encode | None) -> tuple[Int[Tensor, " T"], Pieces]:
    """Ids of pieces of a text, end to end."""
    if encode is None:
        text, pieces = Pieces.joined(parts)
        return text.long(), pieces
    ids = [encode(part.decode(errors="replace")) for part in _parts(parts)]
    return torch.tensor([*chain(*ids)], dtype=torch.int64), Pieces(tuple(map(len, ids)))


def _parts(parts: Sequence[bytes]) -> list[bytes]:
    """An equal number of bytes of each part, ``MOST_BYTES`` in all."""
    most = MOST_BYTES // max(1, len(parts))
    return [part[:most] for part in parts]


def _pool(ids: Int[Tensor, " T"]) -> Int[Tensor, " P"]:
    """The most frequent ids."""
    counts = torch.bincount(ids)
    return counts.argsort(descending=True)[: min(POOL, int((counts > 0).sum()))]


FILE = "chat_template.jinja"

SECONDS = 5.0
"""Longest time of a template."""


def read_template(folder: Path) -> Callable[[str], str] | None:
    """A user's message to the text up to the model's answer; None: the folder has no template.

    The template runs in the sandbox of transformers, for ``SECONDS`` at most.

    Raises:
        CheckpointError: if its file is not text.
    """
    fields = read_object(folder / "tokenizer_config.json")
    template, path = fields.get("chat_template"), folder / FILE
    if path.exists():
        template = _text_in(path)
    if isinstance(template, list):  # by name
        named = (item for item in template if isinstance(item, dict))
        template = next((i.get("template") for i in named if i.get("name") == "default"), None)
    if not isinstance(template, str):
        return None
    tokens = {
        name: text_of(fields.get(name)) or ""
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
    }

    def rendered(message: str) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with deadline(SECONDS):
                texts, _ = render_jinja_template(
                    conversations=[[{"role": "user", "content": message}]],
                    chat_template=template,
                    add_generation_prompt=True,
                    **tokens,
                )
        except Exception as error:  # a template is a program
            raise CheckpointError(
                str(folder),
                expected="a chat template for a message of a user",
                got=f"{type(error).__name__}: {error}",
                remedy="Mend it, or use --style base.",
            ) from error
        return str(texts[0])

    return rendered


def _text_in(path: Path) -> str:
    try:
        return read_bytes(path, most=MOST_JSON).decode()
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) else "bytes that are not UTF-8"
        raise CheckpointError(
            str(path), expected="a chat template", got=got, remedy=SAVE_AGAIN
        ) from error


def text_of(token: object) -> str | None:
    """A special token as ``tokenizer_config.json`` has it, as text."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise an error in the code of a context when it takes longer.

    Lines of Python are watched, so that a loop ends on any system and in any thread; one operation
    in C is not cut short.

    Raises:
        TimeoutError: after ``seconds``.
    """
    end, before = time.monotonic() + seconds, sys.gettrace()

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it took more than {seconds:g} s")
        return watch

    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)
