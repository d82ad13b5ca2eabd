"""The decoder with every encoding: caches, chunks, padding, packing and shards change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Layout
from posenc.attention import Cache
from posenc.errors import ArgumentError, LengthError, UnknownNameError
from posenc.models import Decoder, DecoderConfig
from tests.models.text_encodings import TEXT_ENCODINGS, one_of_each_kind

COMBINED = ["rope+alibi", "t5+sinusoidal"]
NAMES = [*TEXT_ENCODINGS, *COMBINED]
IN_STACKS = [*one_of_each_kind(TEXT_ENCODINGS), *COMBINED]
LENGTH, VOCABULARY = 24, 29


def make(encoding: str, **changes: object) -> Decoder:
    torch.manual_seed(0)
    fields = {"vocabulary": VOCABULARY, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2}
    fields |= {"encoding": encoding, "max_length": 40, **changes}
    return Decoder(DecoderConfig(**fields)).eval()  # type: ignore[arg-type]


def tokens(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("encoding", IN_STACKS)
def test_packed_equals_separate(encoding: str) -> None:
    model, text = make(encoding), tokens(1)
    packed = model(text, Layout.packed([9, 15]))
    close(packed[:, :9], model(text[:, :9]))
    close(packed[:, 9:], model(text[:, 9:]))


@pytest.mark.parametrize("encoding", NAMES)
def test_every_parameter_gets_a_gradient(encoding: str) -> None:
    model = make(encoding)
    model(tokens()).logsumexp(-1).sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    part = "shared_encodings.0"
    expected = {
        # A text has no special tokens, for which TUPE has two values a head.
        "tupe": [f"{part}.score.special"],
        # FLOATER starts as the sinusoid: the second layer of its dynamics is 0.
        "floater": [f"{part}.embedding.dynamics.first_{name}" for name in ("weight", "bias")],
    }
    assert without == expected.get(encoding, [])


@pytest.mark.parametrize("encoding", [name for name in NAMES if name != "rope_pp"])
def test_other_weights_do_not_depend_on_the_encoding(encoding: str) -> None:
    """All but RoPE++, whose layers have half the projections."""
    plain = {n: p for n, p in make("nope").named_parameters() if ".encoding." not in n}
    other = dict(make(encoding).named_parameters())
    for name, weight in plain.items():
        assert torch.equal(weight, other[name]), name


@pytest.mark.parametrize("encoding", ["floater", "t5"])
def test_compiled_equals_eager(encoding: str) -> None:
    """With vectors in every layer, and with a table that layers share."""
    model, text = make(encoding), tokens()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(text), model(text))


@pytest.mark.parametrize("options", [{"tied": False}, {"norm": "layer", "norm_first": False}])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "relu"])
def test_shapes_of_the_block(options: dict[str, object], activation: str) -> None:
    model = make("rope", activation=activation, **options)
    assert model(tokens()).shape == (2, LENGTH, VOCABULARY)


def test_encoding_records_serve_as_well_as_names() -> None:
    named = make("alibi")
    torch.manual_seed(0)
    records = posenc.create_layers("alibi", layers=2, heads=4)
    model = Decoder(named.config, encodings=records).eval()
    close(model(tokens()), named(tokens()))


def test_t5_is_causal_and_shared() -> None:
    first, second = (encoding.score for encoding in make("t5").encodings)
    assert first is second
    assert first is not None
    assert first.causal is True


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="alibi"):
        make("alibbi")
    with pytest.raises(ArgumentError, match="one per layer"):
        Decoder(make("nope").config, encodings=[posenc.Encoding()])
    with pytest.raises(ArgumentError, match="dropout"):
        make("nope", dropout=1.0)
    with pytest.raises(ArgumentError, match="heads"):
        make("nope", heads=5)
    with pytest.raises(ArgumentError, match="tokens"):
        make("nope")(torch.zeros(2, 3))
    with pytest.raises(UnknownNameError, match="norm"):
        make("nope", norm="group")
    with pytest.raises(UnknownNameError, match="activation"):
        make("nope", activation="tanh")


def test_learned_positions_end_with_an_error() -> None:
    with pytest.raises(LengthError, match="0 to 39"):
        make("learned")(tokens(length=41))


def test_cache_of_another_model_is_not_shared() -> None:
    model = make("rope")
    assert isinstance(model.new_cache(), Cache)
    assert model.new_cache()[0] is not model.new_cache()[0]


def test_options_may_repeat_the_models_shape_but_not_contradict_it() -> None:
    shape = {"vocabulary": 8, "dim": 16, "layers": 1, "heads": 2, "encoding": "conv"}
    Decoder(DecoderConfig(**shape, options={"causal": True}))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"options\['causal'\]: expected True, as the model"):
        Decoder(DecoderConfig(**shape, options={"causal": False}))  # type: ignore[arg-type]
