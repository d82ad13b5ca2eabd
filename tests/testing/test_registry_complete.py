"""A method in the registry has an oracle test, a citation, and a docstring that says enough."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from posenc.encoding import Encoding
from posenc.registry import ENCODINGS
from posenc.testing import LAWS, PARTIAL, Subject

TESTS = Path(__file__).parent.parent / "encodings"


OF_EACH_LAYER = (
    *("cable", "comrope", "contextual", "cope", "dape", "decomposed2d", "enformer", "forgetting"),
    *("grape_additive", "grape_contextual", "grape_multiplicative", "irpe", "lierope", "path"),
    *(
        "pope",
        "relative_bias",
        "relative_logits",
        "repo",
        "residue_offset",
        "rope_mixed",
        "scalable_softmax",
        "selective_rope",
        "shaw",
        "swin",
        "swin_v2",
        "xlnet",
    ),
)
"""Trained methods of which layers share nothing."""

IN_PART = ("deberta", "floater", "transformer_xl")
"""Those of which layers share some parameters; of all others they share all."""


def test_sorted() -> None:
    assert list(ENCODINGS) == sorted(ENCODINGS)


@pytest.mark.parametrize("name", ENCODINGS)
def test_oracle_citation_and_docstring(name: str) -> None:
    entry = ENCODINGS[name]
    assert list(TESTS.rglob(f"test_{name}.py")), f"no oracle test of {name}"
    assert entry.citation is not None
    assert entry.citation.url.startswith("https://")
    document = inspect.getdoc(entry.factory) or ""
    for part in ("``", "Reference:", ">>>"):
        assert part in document, f"the docstring of {name} has no {part}"
    assert entry.claims.cost
    assert entry.claims.extrapolates.endswith(".")


@pytest.mark.parametrize("name", ENCODINGS)
def test_claims_are_what_it_is_made_of(name: str) -> None:
    entry = ENCODINGS[name]
    encoding = Subject.of_entry(name, entry).make()
    sites = [site for site in Encoding.SITES if getattr(encoding, site) is not None]
    assert list(entry.claims.sites) == sites
    assert entry.claims.trainable == any(True for _ in encoding.parameters())
    assert entry.claims.causal_only == encoding.causal_only
    for parameter in entry.parameters().values():
        assert parameter.kind is parameter.KEYWORD_ONLY, "constructors are keyword-only"
    for exception in entry.claims.exceptions:
        assert exception in LAWS or exception in PARTIAL


@pytest.mark.parametrize("name", [name for name, e in ENCODINGS.items() if e.claims.trainable])
def test_layers_share_what_is_one_for_all(name: str) -> None:
    first, second = Subject.of_entry(name, ENCODINGS[name]).layers(2)
    parameters = list(first.parameters())
    shared = sum(any(x is y for y in second.parameters()) for x in parameters)
    if name in IN_PART:
        assert 0 < shared < len(parameters)
    else:
        assert shared == (0 if name in OF_EACH_LAYER else len(parameters))
