"""Formulas of docstrings as MathML: nothing is lost; indices, powers and fractions."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from posenc.extension import EXTENSIONS
from posenc.lab.visualization.catalogue import DocstringSections
from posenc.lab.visualization.formulas import SIGNS, is_mathematics, mathml
from posenc.registry import ENCODINGS

METHODS = {
    **{name: entry.factory for name, entry in ENCODINGS.items()},
    **{f"extension {name}": entry.function for name, entry in EXTENSIONS.items()},
}


def formulas(method: object) -> list[str]:
    """Formulas in the text of a docstring."""
    text = "\n".join(DocstringSections.of(method).body)
    spans = (" ".join(span.split()) for span in re.findall("``(.+?)``", text, re.DOTALL))
    return [span for span in spans if is_mathematics(span)]


def symbols(text: str) -> list[str]:
    """Signs of a formula in any order, without those that say how it is laid out."""
    for sign, shown in SIGNS.items():
        text = text.replace(sign, shown)
    # An accent is a sign of its own in one of both.
    return sorted(re.sub(r"[\s_^(){}/√\u0304¯]", "", text))


@pytest.mark.parametrize("name", METHODS)
def test_no_symbol_is_lost(name: str) -> None:
    for code in formulas(METHODS[name]):
        for display in (False, True):
            root = ElementTree.fromstring(mathml(code, display=display))
            assert symbols("".join(root.itertext())) == symbols(code), code


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_has_a_formula(name: str) -> None:
    assert any(len(code) > 3 for code in formulas(METHODS[name]))


def inner(code: str, *, display: bool = False) -> str:
    """MathML without its frame and its rows."""
    html = mathml(code, display=display)
    return re.sub(r"^<math[^>]*>|</math>$|</?mrow>", "", html)


@pytest.mark.parametrize(
    ("code", "html"),
    [
        ("s_ij", "<msub><mi>s</mi><mi>i</mi><mi>j</mi></msub>"),
        ("a^K_{t+1}", "<msubsup><mi>a</mi><mi>t</mi><mo>+</mo><mn>1</mn><mi>K</mi></msubsup>"),
        ("q'_i", "<msubsup><mi>q</mi><mi>i</mi><mo>′</mo></msubsup>"),
        ("x²", "<msup><mi>x</mi><mo>2</mo></msup>"),
        ("D^-1/2", "<msup><mi>D</mi><mo>−</mo><mn>1</mn><mo>/</mo><mn>2</mn></msup>"),
        ("y_last", "<msub><mi>y</mi><mi>last</mi></msub>"),
        ("log2", "<msub><mi>log</mi><mn>2</mn></msub>"),
        ("Σ_t", '<munder><mo movablelimits="true">∑</mo><mi>t</mi></munder>'),
        ("√(x)", "<msqrt><mi>x</mi></msqrt>"),
        ("k = max_distance", "<mi>k</mi><mo>=</mo><mi>max_distance</mi>"),
    ],
)
def test_indices_powers_sums_and_words(code: str, html: str) -> None:
    assert inner(code) == html


def test_a_slash_between_spaces_is_a_fraction_where_displayed() -> None:
    one = "<mn>1</mn>"
    expected = f"{one}<mo>+</mo><mfrac>{one}<mo>−</mo><mi>x</mi>{one}<mo>+</mo><mi>x</mi></mfrac>"
    assert inner("1 + (1 - x) / (1 + x)", display=True) == expected
    assert "<mfrac>" not in mathml("a / b")
    assert "<mfrac>" not in mathml("a/b", display=True)
    denominator = mathml("ln n / ln L", display=True).partition("</mrow>")[2]
    assert "<mi>ln</mi>" in denominator
    assert "<mi>L</mi>" in denominator


def test_python_is_no_formula() -> None:
    for code in ("head_dim", "window", "[B|1, L]", 'kernel="log"', "Layout.image", "scale=1.0"):
        assert not is_mathematics(code), code
    for code in ("s_ij", "x", "p_i", "2 s E / |ln ζ_0|", "0.1 ln s + 1", "(y, x)"):
        assert is_mathematics(code), code
