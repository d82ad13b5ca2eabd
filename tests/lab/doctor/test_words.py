"""Facts in words, and the fields that the page of the command names."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from posenc.lab.doctor.words import described, descriptions, numbers_in_words, rotation_in_words
from posenc.transformers.doctor.facts import (
    UNKNOWN,
    AttentionFacts,
    LayerReading,
    Layers,
    RotationFacts,
)

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "doctor.md"

VISIBLE: dict[str, dict[str, object]] = {
    "sees all earlier tokens": {"causal": True, "ahead": 0},
    "sees all tokens": {"causal": False},
    "sees the last 4,096 tokens": {"causal": True, "back": 4095, "ahead": 0},
    "sees 64 tokens back and 64 ahead": {"causal": False, "back": 64, "ahead": 64},
    "sees earlier tokens of its chunk of 8,192": {"causal": True, "back": 8191, "chunk": 8192},
    "sees all earlier tokens, changed by the input (blockwise_overlay)": {
        "causal": True,
        "exceptions": ("or blockwise_overlay",),
    },
}


@pytest.mark.parametrize(("words", "facts"), VISIBLE.items())
def test_what_a_token_sees(words: str, facts: dict[str, object]) -> None:
    lines = described(AttentionFacts(module="m", kind="self", heads=4, key_heads=1, **facts))
    assert words in lines
    assert lines[0].endswith("1 key head")


def test_further_facts() -> None:
    seen = AttentionFacts(module="m", kind="self", causal=True, back=UNKNOWN)
    further = {"sinks": True, "cap": 50.0, "temperature": {"1048576": 1.486}, "keys_of": "layers.3"}
    logits = "a sink in each head, logits capped at 50, queries × 1.486 at position 1,048,576"
    told = ["causal", "NoPE: no rotation", f"{logits}, keys of layers.3", "unknown: back"]
    assert described(replace(seen, **further))[1:] == told
    none = AttentionFacts(module="m", kind="none", instead=("GatedDeltaNet",))
    assert described(none) == ["no attention: GatedDeltaNet"]


def test_rotations() -> None:
    how = {"pairing": "half", "distance": 2, "gain": 1.25, "varies": True}
    rotation = RotationFacts(features=4, frequencies=(1.0, 0.01), **how)
    words = "base 10,000, half-split pairs, gain 1.25, changes with the length"
    assert rotation_in_words(rotation, 8) == f"RoPE on 4 of 8 features, {words}"
    stretched = RotationFacts(features=6, frequencies=(1.0, 0.5, 0.01))
    assert rotation_in_words(stretched, 6) == "RoPE, uneven frequencies 1 to 0.01"
    divided = RotationFacts(features=4, frequencies=(0.25, 0.0025))
    assert rotation_in_words(divided, 4) == "RoPE, base 10,000, angles ÷ 4"


def test_numbers_of_layers() -> None:
    every_fourth = [n for n in range(36) if n % 4 != 3]
    cases = (range(32), [3, 7, 11, 15], [0, 1, 2, 4, 5], every_fourth, [])
    words = ["0–31", "3, 7 … 15", "0–2, 4–5", "0–2, 4–6 … 32–34", ""]
    assert [numbers_in_words(numbers) for numbers in cases] == words


def test_the_page_names_every_fact() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    for kind in (AttentionFacts, RotationFacts):
        assert {field.name for field in fields(kind)} - {"module"} <= named


def test_kinds_that_read_alike_are_told_apart_by_their_pairs() -> None:
    ends = [RotationFacts(features=6, frequencies=(1.0, middle, 0.1)) for middle in (0.5, 0.2, 0.5)]
    kinds = [AttentionFacts(module="m", kind="self", rotation=rotation) for rotation in ends]
    layers = (Layers(numbers=(n,), attention=kind) for n, kind in enumerate(kinds))
    reading = LayerReading(layers=tuple(layers))
    assert [len(lines) for lines in descriptions(reading)] == [3, 4, 3]
    told = descriptions(reading)[1]
    assert told[:-1] == described(kinds[0])
    assert told[-1] == "1 of 3 pairs rotate otherwise than those of 1 layer: 0"
