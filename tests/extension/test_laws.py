"""Laws of every encoding hold for every stretched one, across the trained length."""

from __future__ import annotations

import dataclasses

import pytest

from posenc import create
from posenc.encoding import Encoding
from posenc.encoding.entry import Claims
from posenc.extension import EXTENSIONS, extend
from posenc.registry import ENCODINGS
from posenc.testing.laws import LAWS
from posenc.testing.subject import DIM, HEADS, MAX_LENGTH, Subject
from tests.testing.test_laws import OF_ATTENTION

TRAINED = 6
"""Less than half of the 13 tokens that most laws are tried on."""

GROWS = "the past is seen at the length of each call"
LONG = "all tokens of this law are past the trained length, with the same factors"

ANY = ("alibi", "cope", "deberta", "forgetting", "nope", "rope", "shaw", "t5", "tupe")
"""Encodings that methods for any are tried on."""

ALONE = ("direct", "segments")
"""Methods that change no encoding."""

SUBJECTS = [
    (method, name)
    for method, entry in EXTENSIONS.items()
    if method not in ALONE
    for name in (ANY if entry.on == ("any",) else entry.on)
] + [("rerope+log_n", "rope"), ("yarn+log_n", "rope")]

TRACED = ("compiles_once", "exports", "runs_without_values")
"""Laws about programs, of which only the first subject that computes one is tried."""

TRACED_AS = {
    ("interpolate", "alibi"): ("clipped", "rope"),
    ("interpolate", "radix"): ("clipped", "rope"),
    ("interpolate", "sinusoidal"): ("clipped", "rope"),
    ("leaky_rerope", "rope"): ("rerope", "rope"),
    ("log_n", "alibi"): ("log_n", "shaw"),
    ("log_n", "cope"): ("log_n", "shaw"),
    ("log_n", "deberta"): ("log_n", "shaw"),
    ("log_n", "forgetting"): ("log_n", "shaw"),
    ("log_n", "nope"): ("log_n", "shaw"),
    ("log_n", "rope"): ("log_n", "shaw"),
    ("log_n", "t5"): ("log_n", "shaw"),
    ("log_n", "tupe"): ("log_n", "shaw"),
    ("longrope", "rope"): ("dynamic_ntk", "rope"),
    ("rerope+log_n", "rope"): ("rerope", "rope"),
    ("self_extend", "rope"): ("rerope", "rope"),
    ("string", "rope"): ("rerope", "rope"),
    ("yarn+log_n", "rope"): ("log_n", "shaw"),
}
"""Subjects whose programs are made as another's: of other constants, of factors by the length, of
other scales of queries, or of bands of rotations.

``TRACED`` are tried on them with ``make test-exhaustive``; on others, new ones too, in the suite.
"""

COMPUTED = (
    *("backends_agree", "double_is_double", "double_positions_serve_any_features"),
    *("gradients_are_right", "gradients_of_rows_are_separate", "grouped_heads_are_repeated"),
    *("half_precision_is_as_exact_as_the_definition", "heads_are_slices"),
    *("invalid_tokens_hold_anything", "lse_is_of_all_logits", "nan_stays_nan"),
    *("nothing_kept_outlives_weights", "second_derivatives_are_right", "sinks_and_caps_agree"),
    "weights_that_change_are_followed",
)
"""Laws about backends and derivatives, exhaustive where only numbers differ from others.

Numbers, and scales of queries by ``log_n``, which is tried on one encoding.
"""


def computed_as_another(method: str, name: str) -> bool:
    """Whether ``COMPUTED`` are tried on a subject with ``make test-exhaustive``."""
    scaled = "log_n" in method and (method, name) in TRACED_AS
    return scaled or (method, name) not in OWN_PROGRAM


ROUNDED = "queries and keys are rounded to half precision after a rotation or a scale"
HALF = {"half_precision_is_as_exact_as_the_definition": ROUNDED}

EXCEPTIONS = {
    "longrope": {"shift_is_as_claimed": LONG},
    **dict.fromkeys(("dual_chunk", "leaky_rerope", "log_n", "rerope", "self_extend"), HALF),
    "string": HALF,
}
"""Laws that a method keeps for want of the tokens that would break them, with the reason."""


def claims(method: str, name: str) -> Claims:
    """The stretched encoding's claims: the encoding's, but for those that the method changes."""
    claimed = ENCODINGS[name].claims
    changes = [EXTENSIONS[part].claims for part in method.split("+")]
    exceptions = dict(claimed.exceptions)
    for part in method.split("+"):
        exceptions |= EXCEPTIONS.get(part, {})
    if not all(change.decodes_as_whole for change in changes):
        exceptions |= {"cached_is_full": GROWS, "chunked_is_full": GROWS}
    relative = claimed.relative and all(change.stays_relative for change in changes)
    return dataclasses.replace(claimed, relative=relative, exceptions=exceptions)


def subject(method: str, name: str) -> Subject:
    options: dict[str, object] = {"factor": 2.0, "length": float(TRAINED)}
    for part in method.split("+"):
        options |= EXTENSIONS[part].sample
    context = {"dim": DIM, "heads": HEADS, "max_length": MAX_LENGTH, "causal": True}

    def make() -> Encoding:
        return extend(create(name, **context, **ENCODINGS[name].sample), method, **options)

    return Subject(f"{method} on {name}", make, claims(method, name))


def program(made: Subject) -> list[tuple[type, dict[str, type]]]:
    """Modules and the types of what they hold: alike where only numbers differ."""
    modules = made.make().modules()
    return [(type(m), {name: type(value) for name, value in vars(m).items()}) for m in modules]


def with_programs_of_their_own() -> set[tuple[str, str]]:
    """Subjects that compute what neither an entry nor a subject before them does."""
    known = [program(Subject.of_entry(name, entry)) for name, entry in ENCODINGS.items()]
    own = set()
    for each in SUBJECTS:
        computed = program(subject(*each))
        if computed not in known:
            known.append(computed)
            own.add(each)
    return own


OWN_PROGRAM = with_programs_of_their_own()


def cases() -> list[object]:
    """Laws and subjects; what repeats a subject of the suite is exhaustive."""
    return [
        pytest.param(
            law,
            *each,
            marks=[pytest.mark.exhaustive]
            * (
                (law in TRACED and each in TRACED_AS)
                or (law in COMPUTED and computed_as_another(*each))
                or (law in OF_ATTENTION and claims(*each).sites == ("embedding",))
            ),
        )
        for each in SUBJECTS
        for law in LAWS
        if law not in claims(*each).exceptions
        if law not in TRACED or each in OWN_PROGRAM
    ]


@pytest.mark.parametrize(("law", "method", "name"), cases())
def test_law(law: str, method: str, name: str) -> None:
    LAWS[law](subject(method, name))


def test_exceptions_have_reasons() -> None:
    assert all(all(claims(*each).exceptions.values()) for each in SUBJECTS)


def test_programs_are_made_as_ones_in_the_suite() -> None:
    assert set(TRACED_AS.values()) <= OWN_PROGRAM - set(TRACED_AS)
    assert set(TRACED_AS) <= OWN_PROGRAM


def test_stretched_ropes_are_one_program_and_others_are_not() -> None:
    assert len({("yarn", "rope"), ("ntk", "rope"), ("clipped", "rope")} & OWN_PROGRAM) == 1
    assert {("rerope", "rope"), ("longrope", "rope"), ("log_n", "alibi")} <= OWN_PROGRAM
    assert ("random_tail", "learned") not in OWN_PROGRAM, "a table, as that of the entry"
