"""Options that make a method fit the length it is trained at."""

from __future__ import annotations

from typing import Any

from posenc.lab.experiments.recipe import Recipe

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
