"""Laws of every encoding hold for every stretched one, across the trained length."""

from __future__ import annotations

import dataclasses

import pytest

from posenc import create
from posenc.encoding import Encoding
from posenc.entry import Claims
from posenc.extension import EXTENSIONS, extend
from posenc.registry import ENCODINGS
from posenc.testing.laws import LAWS
from posenc.testing.subject import DIM, HEADS, MAX_LENGTH, Subject

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

SAME_PROGRAM: dict[tuple[str, str], str | tuple[str, str]] = {
    ("drope", "rope"): "nope",
    ("hierarchical", "learned"): "learned",
    ("interpolate", "learned"): "learned",
    ("interpolate", "learned2d"): "learned2d",
    ("interpolate", "rope"): ("yarn", "rope"),
    ("interpolate", "swin"): "swin",
    ("llama3", "rope"): ("yarn", "rope"),
    ("ntk", "rope"): ("yarn", "rope"),
    ("ntk_by_parts", "rope"): ("yarn", "rope"),
    ("radix_base", "radix"): "radix",
    ("random_tail", "learned"): "learned",
    ("yarn+log_n", "rope"): ("log_n", "rope"),
}
"""Subjects that compute what an entry or another subject does, with other numbers."""

TRACED = ("compiles_once", "exports", "runs_without_values")
"""Laws about programs, which are held by one subject a program."""


def claims(method: str, name: str) -> Claims:
    """The stretched encoding's claims: the encoding's, but for those that the method changes."""
    claimed = ENCODINGS[name].claims
    exceptions = dict(claimed.exceptions)
    relative = claimed.relative
    if "log_n" in method or method in ("dynamic_ntk", "longrope", "self_extend", "dual_chunk"):
        relative = False
    if method in ("dynamic_ntk", "longrope"):
        exceptions |= {"cached_is_full": GROWS, "chunked_is_full": GROWS}
    if method == "longrope":
        exceptions |= {"shift_is_as_claimed": LONG}
    return dataclasses.replace(claimed, relative=relative, exceptions=exceptions)


def subject(method: str, name: str) -> Subject:
    options: dict[str, object] = {"factor": 2.0, "length": float(TRAINED)}
    for part in method.split("+"):
        options |= EXTENSIONS[part].sample
    context = {"dim": DIM, "heads": HEADS, "max_length": MAX_LENGTH, "causal": True}

    def make() -> Encoding:
        return extend(create(name, **context, **ENCODINGS[name].sample), method, **options)

    return Subject(f"{method} on {name}", make, claims(method, name))


@pytest.mark.parametrize(
    ("law", "method", "name"),
    [
        (law, *each)
        for each in SUBJECTS
        for law in LAWS
        if law not in claims(*each).exceptions
        if law not in TRACED or each not in SAME_PROGRAM
    ],
)
def test_law(law: str, method: str, name: str) -> None:
    LAWS[law](subject(method, name))


def test_exceptions_have_reasons() -> None:
    assert all(all(claims(*each).exceptions.values()) for each in SUBJECTS)


@pytest.mark.parametrize("each", SAME_PROGRAM)
def test_programs_that_are_the_same_have_the_same_parts(each: tuple[str, str]) -> None:
    other = SAME_PROGRAM[each]
    if isinstance(other, str):
        same = Subject.of_entry(other, ENCODINGS[other])
    else:
        assert other not in SAME_PROGRAM
        same = subject(*other)
    mine, theirs = ([type(m) for m in made.make().modules()] for made in (subject(*each), same))
    assert mine == theirs


@pytest.mark.parametrize(("method", "name"), SUBJECTS)
def test_claim_of_decoding_is_the_one_held(method: str, name: str) -> None:
    promised = all(EXTENSIONS[each].claims.decodes_as_whole for each in method.split("+"))
    assert promised == ("cached_is_full" not in claims(method, name).exceptions)
