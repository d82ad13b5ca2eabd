"""Every law, over every encoding of the registry."""

from __future__ import annotations

import pytest
import torch

from posenc.registry import ENCODINGS
from posenc.testing import LAWS, Subject

TRACED_AS = {
    **dict.fromkeys(("alibi", "dynamic_bias", "fire", "kerple", "relative_bias", "sandwich"), "t5"),
    **dict.fromkeys(("cable", "grape_additive", "grape_contextual"), "forgetting"),
    **dict.fromkeys(("complex_order", "fourier", "gaussian_fourier", "hierarchical"), "learned"),
    **dict.fromkeys(("learned2d", "multiplicative", "multiplicative_shared", "radix"), "learned"),
    **dict.fromkeys(("row_column", "seqpe", "sine2d", "sinusoidal"), "learned"),
    **dict.fromkeys(("contextual", "relative_logits"), "shaw"),
    **dict.fromkeys(("dape", "transformer_xl", "xlnet"), "deberta"),
    **dict.fromkeys(("decomposed2d", "swin", "swin_v2"), "irpe"),
    **dict.fromkeys(("fope", "grape_multiplicative", "mrope", "nope", "p_rope", "pope"), "rope"),
    **dict.fromkeys(("rope2d", "rope_mixed", "rope_pp", "xpos"), "rope"),
    "comrope": "lierope",
}
"""Encodings whose programs are made as another's: of tables or angles by position, of rotations, of
logits by bucket of offset or of content, of prefix sums of a signal, or of pairs on two axes.

``OF_PROGRAMS`` are tried on one with ``make test-exhaustive``; on all others, new ones too, in the
suite.
"""

OF_PROGRAMS = (
    "compiles_once",
    "double_positions_serve_any_features",
    "exports",
    "lse_is_of_all_logits",
    "runs_without_values",
    "sinks_and_caps_agree",
)
"""Laws about how a program is computed; that its numbers are right is tried on every encoding."""

FAR = ("half_precision_keeps_positions", "shift_is_as_claimed", "single_precision_is_double")
"""Laws of positions up to 5,012."""

OPTIONS = {"floater": {"step": 32.0}}
"""Options for ``FAR``: steps of one token there are the work of half a minute."""


def cases() -> list[object]:
    """Encodings and laws; those of programs made as another's are exhaustive."""
    return [
        pytest.param(
            name, law, marks=[pytest.mark.exhaustive] * (law in OF_PROGRAMS and name in TRACED_AS)
        )
        for name in ENCODINGS
        for law in LAWS
    ]


@pytest.mark.parametrize(("name", "law"), cases())
def test_law(name: str, law: str) -> None:
    options = OPTIONS.get(name, {}) if law in FAR else {}
    subject = Subject.of_entry(name, ENCODINGS[name], **options)
    if law in subject.claims.exceptions:
        assert subject.claims.exceptions[law], "an exception needs its reason"
        return
    # Outside of programs with symbolic sizes, which repeat no call, it halves the time.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=law == "runs_without_values"):
        LAWS[law](subject)


def test_programs_are_made_as_ones_in_the_suite() -> None:
    assert set(TRACED_AS) <= set(ENCODINGS)
    assert set(TRACED_AS.values()) <= set(ENCODINGS) - set(TRACED_AS)
    assert {*OF_PROGRAMS, *FAR} <= set(LAWS)
