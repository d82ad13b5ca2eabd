"""Everything that decides how a translator is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from posenc.errors import ArgumentError, CheckpointError
from posenc.experiments.recipe import require_encoding
from posenc.training.records import record

__all__ = ["TranslatorSettings"]

NOT_ABOUT_RESULTS = frozenset({"out", "existing", "threads"})
"""Fields that may differ between a training and its continuation."""


@dataclass(frozen=True, kw_only=True)
class TranslatorSettings:
    """One translator: of which text, how large, how long, where to.

    Args:
        out: output folder.
        text: a file with a sentence, a tab and its translation in every line; with ``target``
            the sentences alone.
        target: their translations, line by line.
        existing: what to do if ``out`` already has something in it: ``"refuse"``; ``"resume"`` a
            training of the same settings; or ``"replace"`` one by a new one.
        skip_bad: leave out pairs with an empty or an over-long side instead of refusing the text.
        encoding: of encoder and decoder; names of the registry joined by ``+``.
        cross_encoding: of the attention from target to source.
        vocabulary: subwords of both languages together.
        max_length: subwords of the longest sentence.
        width, layers, heads: of the model; layers of encoder and decoder each.
        dropout, smoothing: see ``TransformerConfig`` and ``token_loss``.
        batch_tokens: tokens in a batch, padding included.
        steps: training steps at most.
        every: steps between two looks at the validation pairs.
        patience: training ends after so many looks without a lower loss.
        warmup, learning_rate: the rate rises to ``learning_rate`` over ``warmup`` steps, and
            falls with the square root of the steps from there.
        beams, length_penalty: of the search that is scored at the end.
        seed: of initial weights, order of the data and dropout.
        device: as ``torch.device`` reads it.
        threads: CPU threads.

    Raises:
        ArgumentError: on a value out of its domain.
        UnknownNameError: on an encoding that does not exist.
    """

    out: Path
    text: Path
    target: Path | None = None
    existing: Literal["refuse", "resume", "replace"] = "refuse"
    skip_bad: bool = False
    encoding: str = "sinusoidal"
    cross_encoding: str = "nope"
    vocabulary: int = 2000
    max_length: int = 128
    width: int = 128
    layers: int = 2
    heads: int = 4
    dropout: float = 0.1
    smoothing: float = 0.1
    batch_tokens: int = 1024
    steps: int = 4000
    every: int = 200
    patience: int = 5
    warmup: int = 400
    learning_rate: float = 2e-3
    beams: int = 4
    length_penalty: float = 0.6
    seed: int = 0
    device: str = "cpu"
    threads: int = 2

    def __post_init__(self) -> None:
        for name in ("out", "text", "target"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        for name in ("encoding", "cross_encoding"):
            require_encoding(getattr(self, name))
        for name in (
            "vocabulary",
            "max_length",
            "width",
            "layers",
            "heads",
            "batch_tokens",
            "steps",
            "every",
            "patience",
            "warmup",
            "beams",
            "threads",
        ):
            self._require(name, getattr(self, name) >= 1, "1 or more")
        self._require("width", self.width % self.heads == 0, f"a multiple of {self.heads} heads")
        self._require("dropout", 0 <= self.dropout < 1, "0 or more, less than 1")
        self._require("smoothing", 0 <= self.smoothing < 1, "0 or more, less than 1")
        self._require("learning_rate", 0 < self.learning_rate < float("inf"), "more than 0")
        self._require("seed", 0 <= self.seed < 2**31, "from 0 to 2147483647")
        known = ("refuse", "resume", "replace")
        self._require("existing", self.existing in known, f"one of {', '.join(known)}")
        # A batch has room for one pair of the longest sentences.
        room = self.max_length + 1
        self._require("batch_tokens", self.batch_tokens >= room, f"at least max_length + 1, {room}")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ArgumentError(
                "device",
                expected="a device that torch can use here",
                got=f"{self.device!r} ({str(error).splitlines()[0]})",
                remedy="Use cpu.",
            ) from error

    def _require(self, name: str, right: bool, expected: str) -> None:
        if not right:
            raise ArgumentError(
                name, expected=expected, got=getattr(self, name), remedy="Change it."
            )

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> TranslatorSettings:
        """Settings from ``to_json``'s values.

        Raises:
            CheckpointError: when fields are missing or unknown, or a value is out of its domain.
        """
        known = {one.name for one in fields(cls)}
        try:
            if set(plain) != known:
                raise TypeError(f"fields {', '.join(sorted(plain))}")
            return record(cls, plain)
        except Exception as error:  # a file can say anything
            raise CheckpointError(
                "settings",
                expected=f"the fields {', '.join(sorted(known))} with valid values",
                got=error,
                remedy="They come from another version of posenc: train anew.",
            ) from error

    def decisive(self) -> dict[str, Any]:
        """The fields that decide what comes out."""
        return {k: v for k, v in self.to_json().items() if k not in NOT_ABOUT_RESULTS}
