"""Options of a training, each with its default and help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from posenc.arguments import Interval, Length, Probability, Rate, check_fields
from posenc.errors import ArgumentError, CheckpointError
from posenc.lab.codec import from_plain, to_plain
from posenc.lab.experiments.recipe import require_axes
from posenc.registration import parse_name
from posenc.registry import ENCODINGS

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One translator: its text, size and training; the fields' help says what each is.

    Raises:
        ArgumentError: on a value out of its domain.
        UnknownNameError: on an encoding that does not exist.
    """

    text: Annotated[Path, "a sentence, a tab and its translation a line; or sentences alone"]
    target: Annotated[Path | None, "the translations of --text, line by line"] = None
    skip_bad: Annotated[bool, "leave out pairs with an empty or over-long side"] = False
    encoding: Annotated[str, "of encoder and decoder: rope, t5, …"] = "sinusoidal"
    cross_encoding: Annotated[str, "of the attention from target to source"] = "nope"
    vocabulary: Annotated[Length, "subwords of both languages"] = 2000
    max_length: Annotated[Length, "subwords of the longest line"] = 128
    width: Annotated[Length, "model width"] = 128
    layers: Annotated[Length, "of encoder and of decoder"] = 2
    heads: Annotated[Length, "attention heads"] = 4
    dropout: Annotated[Probability, "while training"] = 0.1
    smoothing: Annotated[Probability, "of labels"] = 0.1
    batch_tokens: Annotated[Length, "tokens a batch, padding included"] = 1024
    steps: Annotated[Length, "training steps at most"] = 4000
    every: Annotated[Length, "steps between two looks at the validation pairs"] = 200
    patience: Annotated[Length, "stop after so many looks without a lower loss"] = 5
    warmup: Annotated[Length, "steps of a rising rate"] = 400
    learning_rate: Annotated[Rate, "at its peak"] = 2e-3
    beams: Annotated[Length, "of the search scored at the end"] = 4
    length_penalty: Annotated[float, "of that search"] = 0.6
    seed: Annotated[int, Interval(0, 2**31 - 1), "of weights, order and dropout"] = 0
    device: Annotated[str, "cpu, cuda, cuda:N or mps"] = "cpu"
    threads: Annotated[Length, "CPU threads"] = 2

    def __post_init__(self) -> None:
        for name in ("encoding", "cross_encoding"):
            require_axes(parse_name(ENCODINGS, getattr(self, name)).entries)
        check_fields(self)
        self._require("width", self.width % self.heads == 0, f"a multiple of {self.heads} heads")
        room = self.max_length + 1  # for one pair of the longest sentences
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
        return to_plain(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Settings:
        """Settings from ``to_json``'s values.

        Raises:
            CheckpointError: when fields are missing or unknown, or a value is out of its domain.
        """
        try:
            return from_plain(cls, plain)
        except TypeError as error:
            raise CheckpointError(
                "settings",
                expected="the settings of a training",
                got=error,
                remedy="They come from another version of this program: train anew.",
            ) from error
