"""Recipes and variants: encodings to train with, options that fit a length, views of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from posenc.encoding.entry import Entry
from posenc.errors import ArgumentError
from posenc.lab.experiments.results import ComparedEncoding
from posenc.registration import parse_name
from posenc.registry import ENCODINGS

Positions = Literal["plain", "randomized", "unsorted", "index"]
"""Positions of tokens: those of the data (0, 1, 2, … in text); a sorted random sample of a longer
range (Ruoss et al. 2023); the same unsorted, a control; 0, 1, 2, … instead of real times."""


@dataclass(frozen=True)
class Recipe:
    """Encoding, options and positions of a training, written ``NAME[@CHANGE]…``.

    A change is ``randomized``, ``unsorted`` or ``index`` (see ``Positions``), or an option of the
    method: ``sinusoidal@randomized``, ``shaw@max_distance=0``.

    Args:
        name: as it was written; the key of its runs.
        encoding: names of the registry joined by ``+``.
        options: the method's options.
        positions: where its tokens are.
    """

    name: str
    encoding: str
    options: Mapping[str, Any] = field(default_factory=dict)
    positions: Positions = "plain"

    @classmethod
    def parse(cls, name: str, *, axes: int = 1) -> Recipe:
        """The recipe called ``name``.

        Args:
            name: as above.
            axes: position axes of the data.

        Raises:
            UnknownNameError: on an encoding, change or option that does not exist.
            ArgumentError: on an encoding of other axes, or a value out of its option's domain.
        """
        parsed = parse_name(ENCODINGS, name, words=get_args(Positions))
        require_axes(parsed.entries, axes=axes)
        positions = cast(Positions, parsed.words[-1] if parsed.words else "plain")
        return cls(name, parsed.name, parsed.options, positions)


@dataclass(frozen=True)
class Variant:
    """A trained model, perhaps measured with a window.

    Args:
        encoding: as ``Recipe.parse`` reads it.
        window: tokens that attention sees while it is measured (itself included); None: as trained.
    """

    encoding: str
    window: int | None = None

    @classmethod
    def parse(cls, name: str, *, window: int, axes: int = 1) -> Variant:
        """The variant called ``name``: ``rope``, ``t5+sinusoidal``, ``rope|window=64``.

        Args:
            name: as above; ``rope|window`` without a number takes ``window``.
            window: the default width.
            axes: position axes of the data.

        Raises:
            UnknownNameError: on an encoding that does not exist.
            ArgumentError: on anything after ``|`` but ``window`` or ``window=`` and a number.
        """
        encoding, bar, option = name.partition("|")
        Recipe.parse(encoding, axes=axes)
        if not bar:
            return cls(encoding)
        key, equals, value = option.partition("=")
        if key == "window" and not equals:
            return cls(encoding, window)
        if key == "window" and value.isdigit() and int(value) > 0:
            return cls(encoding, int(value))
        raise ArgumentError(
            "encoding",
            expected="nothing, |window or |window=NUMBER after its name",
            got=repr(name),
            remedy=f"Write {encoding}|window={window}, for example.",
        )

    @property
    def name(self) -> str:
        """The name that ``parse`` reads, in full."""
        return self.encoding if self.window is None else f"{self.encoding}|window={self.window}"


def require_axes(entries: Mapping[str, Entry], *, axes: int = 1) -> None:
    """Refuse encodings that do not serve so many position axes by ArgumentError."""
    for part, entry in entries.items():
        if not entry.claims.serves(axes):
            raise ArgumentError(
                "encoding",
                expected="one for text" if axes == 1 else f"one for positions of {axes} axes",
                got=f"{part}, whose positions have {entry.claims.axes} axes",
                remedy=f"See posenc list for those that serve {axes}.",
            )


def describe(variant: Variant, *, references: Sequence[str], note: str) -> ComparedEncoding:
    """A variant as a report lists it.

    Args:
        variant: what is trained and measured.
        references: names of the controls.
        note: more about its encoding, in sentences; "" for none.
    """
    encoding = variant.encoding
    if variant.window is not None:
        return ComparedEncoding(
            name=variant.name,
            label=f"{encoding} (window {variant.window})",
            role="baseline",
            note=f"The {encoding} models, with attention cut to the last {variant.window} tokens "
            "when they are tested: what can be had without looking further back.",
        )
    name, *changes = encoding.split("@")
    shown = ", ".join(changes).replace("=", " ").replace("_", " ")
    notes = [*(NOTES.get(part, "") for part in (name, *changes)), note]
    return ComparedEncoding(
        name=variant.name,
        label=f"{name} ({shown})" if changes else name,
        role="control" if encoding in ("nope", *references) else "candidate",
        note=" ".join(part for part in notes if part),
    )


NOTES = {
    "nope": "No encoding at all: what the mask and the tokens alone tell about order.",
    "randomized": "Positions are a sorted random sample of a range as long as the longest test, "
    "in training and at test.",
    "index": "Positions are 0, 1, 2, …, whatever the times: what it does without them.",
    "unsorted": "Positions are such a sample in no order, which tells nothing about order.",
}
"""Notes on encodings and positions in a report."""


T5_BUCKETS, T5_MAX_DISTANCE = 32, 128


def fitted_options(recipe: Recipe, train_length: int) -> dict[str, Any]:
    """The recipe's options, and what fits T5's buckets to windows of ``train_length`` tokens."""
    return {**_t5(recipe.encoding, train_length), **recipe.options}


def fit_note(encoding: str, train_length: int) -> str:
    """Note in the report on it, and on learned tables."""
    parts = encoding.split("@")[0].split("+")
    notes = []
    if "t5" in parts:
        options = _t5(encoding, train_length)
        notes.append(
            f"T5's biases with {options['buckets']} buckets, the last for distances from "
            f"{options['max_distance']} on, so that training reaches every bucket."
        )
    if "learned" in parts:
        notes.append(f"A table of {train_length} positions: it has none beyond.")
    return " ".join(notes)


def _t5(encoding: str, train_length: int) -> dict[str, Any]:
    if "t5" not in encoding.split("@")[0].split("+"):
        return {}
    # A distance that no training window has would keep its random initial bias: the last bucket
    # must begin within the window. T5's own 128 is a quarter of its training length.
    max_distance = min(T5_MAX_DISTANCE, train_length // 2)
    # A multiple of 4: two directions, each half exact.
    buckets = min(T5_BUCKETS, max(4, max_distance // 4 * 4))
    return {"buckets": buckets, "max_distance": max_distance}
