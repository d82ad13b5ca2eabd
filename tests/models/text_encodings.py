"""The encodings that a model of text can have."""

from __future__ import annotations

from collections.abc import Iterable

from posenc.registry import ENCODINGS
from tests.support.exhaustive import kept_in_suite

TEXT_ENCODINGS = [name for name, entry in ENCODINGS.items() if entry.claims.serves(1)]

KINDS = {
    "nope": "nothing",
    "sinusoidal": "a vector of the position, added once",
    "learned": "a table that ends",
    "floater": "vectors in every layer, of shared dynamics",
    "abacus": "a vector of the tokens before",
    "conv": "a vector of the neighbours' vectors",
    "rope": "rotated queries and keys",
    "rope_pp": "half the heads",
    "grape_contextual": "rotations by a signal of each token",
    "xpos": "queries and keys of other sizes far from 0",
    "t5": "one table for all layers",
    "shaw": "logits of the queries, and values",
    "deberta": "logits of queries and keys, with a scale of its own",
    "tupe": "logits of the positions alone, shared by all layers",
    "transformer_xl": "biases of the keys",
    "forgetting": "decay by a signal of each token",
    "cope": "positions counted from the logits",
    "path": "logits by products of all tokens between",
}
"""An encoding for each way in which a model or its cache depends on it."""

assert set(KINDS) <= set(TEXT_ENCODINGS)


def one_of_each_kind(names: Iterable[str]) -> list[object]:
    """``names`` for tests of what models add; others than ``KINDS`` run when all do.

    What a layer computes in chunks, padded or ahead of others is a law of every encoding.
    """
    return kept_in_suite(names, KINDS)
