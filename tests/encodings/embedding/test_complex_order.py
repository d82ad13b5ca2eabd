"""Complex-order embeddings against Python's own complex numbers."""

from __future__ import annotations

import cmath
import copy
import math
from typing import Any

import pytest
import torch

from posenc import Layout
from posenc.encodings.embedding.complex_order import ENTRY, ComplexOrder, Shared
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.testing import LAWS, Subject
from tests.testing.test_laws import OF_ATTENTION

VOCABULARY = 7
SHARED: tuple[Shared, ...] = ("words", "dimensions", "none")


def make(shared: Shared, *, dim: int = 6, **options: Any) -> ComplexOrder:
    torch.manual_seed(2)
    vocabulary = None if shared == "words" else VOCABULARY
    encoding = ComplexOrder(dim=dim, shared=shared, vocabulary=vocabulary, **options)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    return encoding.double()


def wave(encoding: ComplexOrder, word: int, feature: int, position: float) -> complex:
    """``exp(i (ω p + θ))`` from the paper's equation."""
    row = 0 if encoding.shared == "words" else word
    column = 0 if encoding.shared == "dimensions" else feature
    if encoding.shared == "dimensions":
        exponent = word * (math.sqrt(5) - 1) / 2 % 1
    else:
        exponent = 2 * (feature // 2) / encoding.width
    rate = encoding.base**-exponent + encoding.departure[row, column].item()
    phase = 0.0 if encoding.phases is None else encoding.phases[row, column].item()
    return cmath.exp(1j * (rate * position + phase))


@pytest.mark.parametrize("phase", [False, True])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("dim", [2, 6, 10])
def test_equals_loops(shared: Shared, phase: bool, dim: int) -> None:
    encoding = make(shared, dim=dim, phase=phase)
    tokens = torch.tensor([[0, 6, 3, 3], [5, 1, 0, 2]])
    times = torch.tensor([[0.0, 1.0, 2.5, 40.0], [3.0, 9.0, 700.0, 0.25]], dtype=torch.float64)
    x = torch.randn(2, 4, dim // 2, dtype=torch.complex128)
    layout = Layout.at(times)
    got = encoding(x, layout, tokens=tokens)
    real = encoding(torch.cat([x.real, x.imag], dim=-1), layout, tokens=tokens)
    for b in range(2):
        for i in range(4):
            for t in range(dim // 2):
                turn = wave(encoding, int(tokens[b, i]), t, times[b, i].item())
                expected = x[b, i, t].item() * turn
                assert got[b, i, t].item() == pytest.approx(expected, abs=1e-9)
                assert real[b, i, t].item() == pytest.approx(expected.real, abs=1e-9)
                assert real[b, i, dim // 2 + t].item() == pytest.approx(expected.imag, abs=1e-9)


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("steps", [1.0, -4.0, 250.0, 0.5])
def test_moving_on_by_n_multiplies_by_a_turn(shared: Shared, steps: float) -> None:
    """``f(p + n) = f(p) exp(iωn)``: the law the paper derives the form from."""
    encoding = make(shared, phase=True)
    tokens = torch.arange(5).unsqueeze(0)
    x = torch.randn(1, 5, 3, dtype=torch.complex128)
    times = 300 + 10 * torch.rand(1, 5, dtype=torch.float64)
    before = encoding(x, Layout.at(times), tokens=tokens)
    after = encoding(x, Layout.at(times + steps), tokens=tokens)
    words = torch.zeros_like(tokens) if shared == "words" else tokens
    rates = encoding.initial(words, like=times) + encoding.departure[words]
    torch.testing.assert_close(after, before * torch.exp(1j * rates * steps))


def test_a_number_by_hand() -> None:
    """A quarter turn a token: 1 goes to i, to -1, to -i."""
    encoding = ComplexOrder(dim=2).requires_grad_(False)
    encoding.departure.fill_(math.pi / 2 - 1)
    got = encoding(torch.ones(1, 4, 1) + 0j, Layout.sequence(4)).flatten()
    torch.testing.assert_close(got, torch.tensor([1, 1j, -1, -1j]))


@pytest.mark.parametrize("shared", SHARED)
def test_amplitude_stays(shared: Shared) -> None:
    encoding = make(shared, phase=True)
    x = torch.randn(1, 5, 3, dtype=torch.complex128)
    got = encoding(x, Layout.sequence(5, start=999), tokens=torch.arange(5).unsqueeze(0))
    torch.testing.assert_close(got.abs(), x.abs())


def test_initial_frequencies_are_the_official_ones() -> None:
    encoding = ComplexOrder(dim=12)
    expected = [10000.0 ** (-2 * (t // 2) / 6) for t in range(6)]
    angles = encoding.angles(Layout.at(torch.ones(1, 1, dtype=torch.float64)))
    assert angles.flatten().tolist() == pytest.approx(expected)


def test_initial_frequencies_of_words_cover_the_range() -> None:
    encoding = ComplexOrder(dim=4, shared="dimensions", vocabulary=1000)
    tokens = torch.arange(1000).unsqueeze(0)
    rates = encoding.angles(Layout.at(torch.ones(1, 1000)), tokens).flatten()
    steps = (-rates.log10() / 4).sort().values
    assert steps[0].item() == 0.0
    assert steps[-1].item() > 0.99
    assert steps.diff().max().item() < 0.003


def test_hermitian_product_of_shared_frequencies_is_relative() -> None:
    """Without projections between, the real reading is RoPE over the halves of a vector."""
    encoding = ComplexOrder(dim=8, base=100.0).double()
    x, y = torch.randn(2, 1, 5, 8, dtype=torch.float64)
    near, far = (
        encoding(x, Layout.sequence(5, start)) @ encoding(y, Layout.sequence(5, start)).mT
        for start in (0, 500)
    )
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        rates = torch.tensor([100.0 ** (-t / 4) for t in range(4)], dtype=torch.float64)
        encoding.departure.copy_(rates - torch.tensor([1.0, 1.0, 0.1, 0.1]).double())
    rope = Rope(head_dim=8, base=100.0, pairing="half")
    q, k = rope(x.unsqueeze(1), y.unsqueeze(1), Grid.of(Layout.sequence(5)))
    product = encoding(x, Layout.sequence(5)) @ encoding(y, Layout.sequence(5)).mT
    torch.testing.assert_close((q @ k.mT)[:, 0], product, rtol=1e-4, atol=1e-4)


def test_narrow_dtypes_do_not_round_frequencies() -> None:
    """A frequency kept in bfloat16 would be off by radians at position 5000."""
    encoding = ComplexOrder(dim=12)
    narrow = copy.deepcopy(encoding).bfloat16()
    layout = Layout.sequence(3, start=5000)
    torch.testing.assert_close(narrow.angles(layout), encoding.angles(layout), rtol=0, atol=0)


OF_TABLES = ("cached_is_full", "gradients_are_right", "single_precision_is_double")
"""Laws that tell a table that is missing, or that is read by another number."""


@pytest.mark.parametrize(
    ("shared", "law"),
    [
        pytest.param(
            shared,
            law,
            marks=[pytest.mark.exhaustive]  # one table less than with "none"
            * (shared == "dimensions" and law not in OF_TABLES),
        )
        for shared in ("dimensions", "none")
        for law in LAWS
        if law not in OF_ATTENTION
    ],
)
def test_laws_with_tables_a_word(shared: Shared, law: str) -> None:
    vocabulary = 26
    options: dict[str, Any] = {"shared": shared, "vocabulary": vocabulary, "phase": True}
    subject = Subject.of_entry("complex_order", ENTRY, **options)
    LAWS[law](subject)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_dtypes_stay(dtype: torch.dtype) -> None:
    x = torch.ones(1, 2, 3, dtype=dtype)
    assert ComplexOrder(dim=6)(x, Layout.sequence(2)).dtype == dtype


def test_bad_inputs() -> None:
    encoding = ComplexOrder(dim=4, shared="none", vocabulary=3)
    layout = Layout.sequence(2)
    with pytest.raises(ArgumentError, match=r"tokens.*shared='words'"):
        encoding(torch.zeros(1, 2, 4), layout)
    with pytest.raises(ArgumentError, match="0 to 2"):
        encoding(torch.zeros(1, 2, 4), layout, tokens=torch.tensor([[0, 3]]))
    with pytest.raises(ArgumentError, match="width 4"):
        encoding(torch.zeros(1, 2, 2), layout, tokens=torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="width 4"):
        encoding(torch.zeros(1, 2, 4) + 0j, layout, tokens=torch.zeros(1, 2, dtype=torch.int64))
