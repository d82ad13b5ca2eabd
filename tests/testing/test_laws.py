"""Every law, over every encoding of the registry."""

from __future__ import annotations

import pytest
import torch

from posenc.registry import ENCODINGS
from posenc.testing import LAWS, Subject

TRACED_AS = {
    "alibi": "t5",
    "cable": "forgetting",
    "comrope": "lierope",
    "complex_order": "learned",  # with tables a word in tests/encodings/embedding
    "contextual": "shaw",
    "dape": "deberta",
    "decomposed2d": "irpe",
    "dynamic_bias": "t5",
    "fire": "t5",
    "fope": "rope",
    "fourier": "learned",
    "gaussian_fourier": "learned",
    "grape_additive": "forgetting",
    "grape_contextual": "forgetting",
    "grape_multiplicative": "rope",
    "hierarchical": "learned",
    "kerple": "t5",
    "learned2d": "learned",
    "mrope": "rope",
    "multiplicative": "learned",
    "multiplicative_shared": "learned",
    "nope": "rope",
    "p_rope": "rope",
    "pope": "rope",
    "radix": "learned",
    "relative_bias": "t5",
    "relative_logits": "shaw",
    "rope2d": "rope",
    "rope_mixed": "rope",
    "rope_pp": "rope",
    "row_column": "learned",
    "sandwich": "t5",
    "seqpe": "learned",
    "sine2d": "learned",
    "sinusoidal": "learned",
    "swin": "irpe",
    "swin_v2": "irpe",
    "transformer_xl": "deberta",
    "xlnet": "deberta",
    "xpos": "rope",
}
"""Encodings whose programs are made as another's: of tables or angles by position, of rotations, of
logits by bucket of offset or of content, of prefix sums of a signal, or of pairs on two axes.

Whether one is compiled once and exported is tried with ``make test-exhaustive``; for all others,
new ones too, in the suite.
"""


def cases() -> list[object]:
    """Encodings and laws; those of programs made as another's are exhaustive."""
    traced = ("compiles_once", "exports")
    return [
        pytest.param(
            name, law, marks=[pytest.mark.exhaustive] * (law in traced and name in TRACED_AS)
        )
        for name in ENCODINGS
        for law in LAWS
    ]


@pytest.mark.parametrize(("name", "law"), cases())
def test_law(name: str, law: str) -> None:
    subject = Subject.of_entry(name, ENCODINGS[name])
    if law in subject.claims.exceptions:
        assert subject.claims.exceptions[law], "an exception needs its reason"
        return
    # Outside of programs with symbolic sizes, which repeat no call, it halves the time.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=law == "runs_without_values"):
        LAWS[law](subject)


def test_programs_are_made_as_ones_in_the_suite() -> None:
    assert set(TRACED_AS) <= set(ENCODINGS)
    assert set(TRACED_AS.values()) <= set(ENCODINGS) - set(TRACED_AS)
