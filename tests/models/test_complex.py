"""Complex-valued classifiers, and real twins of the same size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import posenc
from posenc import Layout
from posenc.errors import ArgumentError, UnknownNameError
from posenc.models import ClassifierConfig, SequenceClassifier
from posenc.models.block import ComplexNorm
from posenc.models.complex_layers import ComplexAttention, ComplexConv, ComplexLinear, folded
from tests.models.drawing import draw_biases

BODIES = ["fasttext", "lstm", "cnn", "transformer"]


def config(body: str, **changes: object) -> ClassifierConfig:
    fields = {"vocabulary": 40, "classes": 3, "dim": 16, "hidden": 64, "heads": 2}
    return ClassifierConfig(body=body, **(fields | changes))  # type: ignore[arg-type]


def make(body: str, **changes: object) -> SequenceClassifier:
    torch.manual_seed(0)
    return SequenceClassifier(config(body, **changes)).eval()


def tokens(rows: int = 3, length: int = 9) -> Tensor:
    return torch.randint(40, (rows, length), generator=torch.Generator().manual_seed(1))


def complex_numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex64)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("body", BODIES)
def test_padded_equals_unpadded(body: str, side: str) -> None:
    model = make(body)
    draw_biases(model)
    text = tokens()
    real = slice(4, None) if side == "left" else slice(0, 5)
    logits = model(text, Layout.padded([9, 5, 9], side=side))
    close(logits[[0, 2]], model(text[[0, 2]]))
    close(logits[1:2], model(text[1:2, real]))


@pytest.mark.parametrize("encoding", ["complex_order", "nope"])
@pytest.mark.parametrize("body", ["fasttext", "transformer"])
def test_word_order_is_told_by_the_encoding_alone(body: str, encoding: str) -> None:
    model = make(body, encoding=encoding)
    same = torch.allclose(model(tokens()), model(tokens().flip(1)), atol=1e-5)
    assert same == (encoding == "nope")


@pytest.mark.parametrize("body", BODIES)
def test_every_parameter_gets_a_gradient(body: str) -> None:
    model = make(body)
    model(tokens(16)).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("body", BODIES)
def test_learns_which_word_comes_first(body: str) -> None:
    """Word 1 before word 2 or after it, among others: only order tells."""
    model = make(body, vocabulary=8, classes=2, dim=8, hidden=32, kernel=9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(0)

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(3, 8, (rows, 5), generator=source)
        places = torch.rand(rows, 5, generator=source).argsort(1)[:, :2]
        text.scatter_(1, places, torch.tensor([[1, 2]]).expand(rows, 2))
        return text, (places[:, 0] < places[:, 1]).long()

    for _ in range(120):
        text, label = batch(64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(text), label).backward()
        optimizer.step()
    text, label = batch(256)
    assert (model(text).argmax(1) == label).float().mean() > 0.9


@pytest.mark.parametrize("encoding", ["rope", "t5", "complex_order+alibi", "sinusoidal"])
def test_other_encodings_in_the_transformer(encoding: str) -> None:
    logits = make("transformer", encoding=encoding)(tokens())
    assert logits.isfinite().all()
    assert not torch.allclose(logits, make("transformer", encoding="nope")(tokens()))


def test_double_precision() -> None:
    model = make("transformer")
    assert model.double()(tokens()).dtype == torch.float64


def test_linear_and_convolution_are_those_of_complex_numbers() -> None:
    linear, conv = ComplexLinear(5, 4), ComplexConv(5, 4, kernel=3)
    x = complex_numbers(2, 7, 5)
    with torch.no_grad():
        linear.bias.normal_()
        conv.bias.normal_()
    by_real, by_imaginary = (
        [part @ weight.T for part in (x.real, x.imag)] for weight in linear.weight
    )
    expected = torch.complex(by_real[0] - by_imaginary[1], by_real[1] + by_imaginary[0])
    close(linear(x), expected + torch.complex(*linear.bias))
    kernel = torch.complex(*conv.weight)
    window = torch.einsum("bkt,stk->bs", x[:, 2:5], kernel) + torch.complex(*conv.bias)
    close(conv(x.mT)[:, :, 3], window)


def test_attention_is_the_hermitian_one() -> None:
    attention = ComplexAttention(dim=6, heads=2, encoding=posenc.Encoding())
    x = complex_numbers(1, 4, 6)
    q, k, v = (
        part(x)[0].view(4, 2, 3) for part in (attention.query, attention.key, attention.value)
    )
    rows = []
    for i in range(4):
        heads = []
        for h in range(2):
            logits = torch.stack([(q[i, h] * k[j, h].conj()).sum().real for j in range(4)])
            weights = (logits / 3**0.5).softmax(0)
            heads.append(sum(weights[j] * v[j, h] for j in range(4)))
        rows.append(torch.cat(heads))
    close(attention(x, Layout.sequence(4))[0], attention.output(torch.stack(rows)))


def test_a_common_phase_passes_through_attention() -> None:
    attention = ComplexAttention(dim=6, heads=2, encoding=posenc.Encoding(), product="modulus")
    x, turn = complex_numbers(1, 4, 6), torch.exp(torch.tensor(0.7j))
    layout = Layout.sequence(4)
    close(attention(x * turn, layout), attention(x, layout) * turn)


def test_the_lstm_of_real_numbers_is_torch_s() -> None:
    body, theirs = make("lstm", encoding="nope").body, nn.LSTM(16, 64, batch_first=True)
    order = torch.cat([torch.arange(64) + 64 * gate for gate in (0, 1, 3, 2)])  # i, f, g, o
    with torch.no_grad():
        body.input.bias.normal_()
        for parameter in body.parameters():
            parameter[1] = 0.0  # imaginary parts
        theirs.weight_ih_l0.copy_(body.input.weight[0, order])
        theirs.weight_hh_l0.copy_(body.state.weight[0, order])
        theirs.bias_ih_l0.copy_(body.input.bias[0, order])
        theirs.bias_hh_l0.zero_()
    x = torch.randn(2, 7, 16)
    state = body(torch.complex(x, torch.zeros_like(x)), Layout.sequence(7))
    close(state, torch.complex(theirs(x)[1][0][0], torch.zeros(2, 64)))


def test_complex_norm_has_mean_zero_and_power_one() -> None:
    x = ComplexNorm(32, eps=0.0)(complex_numbers(5, 32) * 3 + 2j)
    close(x.mean(-1), torch.zeros(5, dtype=torch.complex64))
    close(x.abs().square().mean(-1), torch.ones(5))
    with pytest.raises(ArgumentError, match="complex"):
        ComplexNorm(4)(torch.zeros(4))


def test_folded_is_real_parts_first() -> None:
    assert folded(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [1 + 3j, 2 + 4j]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="transformer"):
        make("bert")
    with pytest.raises(ArgumentError, match="odd"):
        make("cnn", kernel=4)
    with pytest.raises(ArgumentError, match="has no attention"):
        make("lstm", encoding="rope")
    with pytest.raises(ArgumentError, match="requires a causal mask"):
        make("transformer", encoding="forgetting")
    with pytest.raises(ArgumentError, match="heads"):
        make("transformer", heads=3)
    with pytest.raises(ArgumentError, match="tokens"):
        make("cnn")(torch.zeros(2, 3))
    attention = ComplexAttention(dim=6, heads=2, encoding=posenc.Encoding())
    with pytest.raises(ArgumentError, match="no context and no cache"):
        attention(complex_numbers(1, 4, 6), Layout.sequence(4), context=complex_numbers(1, 4, 6))
