"""Every law, over every encoding of the registry."""

from __future__ import annotations

import pytest
import torch

from posenc.encoding import Encoding
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

OF_ATTENTION = (
    *("backends_agree", "double_is_double", "empty_rows_are_zero", "grouped_heads_are_repeated"),
    *("half_precision_is_as_exact_as_the_definition", "heads_are_slices", "lowered_is_forward"),
    *("lse_is_of_all_logits", "nan_stays_nan", "sharded_is_whole", "sinks_and_caps_agree"),
    "weights_that_change_are_followed",
)
"""Laws that embed no tokens: what is only added to these is tried on them, as ``nope`` is, with
``make test-exhaustive``.
"""

OPTIONS = {"floater": {"step": 32.0}}
"""Options for ``FAR``: steps of one token there are the work of half a minute."""


def cases() -> list[object]:
    """Encodings and laws; what repeats another's is exhaustive."""
    found: list[object] = []
    for name, entry in ENCODINGS.items():
        embeds = entry.claims.sites == ("embedding",)
        for law in LAWS:
            repeats = (law in OF_PROGRAMS and name in TRACED_AS) or (embeds and law in OF_ATTENTION)
            found.append(pytest.param(name, law, marks=[pytest.mark.exhaustive] * repeats))
    return found


@pytest.mark.parametrize(("name", "law"), cases())
def test_law(name: str, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = OPTIONS.get(name, {}) if law in FAR else {}
    subject = Subject.of_entry(name, ENCODINGS[name], **options)
    if law in subject.claims.exceptions:
        assert subject.claims.exceptions[law], "an exception needs its reason"
        return
    if law in OF_ATTENTION:
        monkeypatch.delattr(Encoding, "embed")
    # Outside of programs with symbolic sizes, which repeat no call, it halves the time.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=law == "runs_without_values"):
        LAWS[law](subject)


def test_programs_are_made_as_ones_in_the_suite() -> None:
    assert set(TRACED_AS) <= set(ENCODINGS)
    assert set(TRACED_AS.values()) <= set(ENCODINGS) - set(TRACED_AS)
    assert {*OF_PROGRAMS, *FAR, *OF_ATTENTION} <= set(LAWS)
