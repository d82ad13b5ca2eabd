"""DeBERTa: its Enhanced Mask Decoder against transformers and against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc import Layout
from posenc.errors import ArgumentError, UnknownNameError
from posenc.models import Deberta, DebertaConfig
from tests.models.transformers_weights import copy_weights

VERSION_2 = {"buckets": 8, "max_distance": 32, "projections": "content", "normalize": True}
RELEASED = {**VERSION_2, "lookup": "released", "clamp": "after"}


def make(**changes: object) -> Deberta:
    torch.manual_seed(0)
    fields: dict[str, object] = {"vocabulary": 19, "dim": 32, "layers": 3, "heads": 4}
    fields |= {"options": VERSION_2, "max_length": 40, **changes}
    model = Deberta(DebertaConfig(**fields)).eval()  # type: ignore[arg-type]
    with torch.no_grad():  # initial values are small: let every part count
        for name, parameter in model.named_parameters():
            if ".encoding." in name or name.startswith("absolute."):
                parameter.normal_()
    return model


def tokens(rows: int = 2, length: int = 14) -> Tensor:
    return torch.randint(19, (rows, length), generator=torch.Generator().manual_seed(1))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def steps(model: Deberta, text: Tensor, count: int, *, absolute: bool) -> Tensor:
    """The decoder's output from the definition, through the blocks' own layers."""
    layout = Layout.sequence(text.shape[1])
    hidden = model.encoder.embed(text, layout)
    for block in model.encoder.blocks[:-1]:
        hidden = block(hidden, layout)
    last = model.encoder.blocks[-1]
    table = model.absolute.embedding.table
    x = hidden + table[: text.shape[1]] if absolute else hidden
    for _ in range(count):
        attended = last.attention(x, layout, context=hidden, context_layout=layout)
        x = last.attention_norm(x + attended)
        x = last.feed_forward_norm(x + last.feed_forward(x))
    return model.head(x, model.encoder.embedding)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_absolute_positions_enter_where_decoding_begins(count: int) -> None:
    model = make(steps=count)
    close(model(tokens()), steps(model, tokens(), count, absolute=True))
    assert not torch.allclose(
        model(tokens()), steps(model, tokens(), count, absolute=False), atol=1e-2
    )


def test_the_encoder_knows_no_absolute_positions() -> None:
    model = make()
    here, there = Layout.sequence(14), Layout.sequence(14, start=20)
    close(model.encoder(tokens(), here), model.encoder(tokens(), there))
    assert not torch.allclose(model(tokens(), here), model(tokens(), there), atol=1e-2)


@pytest.mark.parametrize("count", [1, 2])
def test_without_absolute_positions_it_is_transformers(count: int) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.DebertaV2Model(
        transformers.DebertaV2Config(
            vocab_size=19,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=128,
            hidden_act="gelu",
            max_position_embeddings=32,
            relative_attention=True,
            position_buckets=8,
            max_relative_positions=32,
            pos_att_type=["c2p", "p2c"],
            share_att_key=True,
            norm_rel_ebd="layer_norm",
            position_biased_input=False,
            type_vocab_size=0,
        )
    ).eval()
    model = make(options=RELEASED, steps=count, norm_eps=1e-7, embedding_scale=1.0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    ours = copy_weights(theirs, model.encoder)
    model.absolute.embedding.table.data.zero_()
    text = tokens(length=30)

    close(model.fine_tuned()(text), theirs(text).last_hidden_state)
    states = theirs(text, output_hidden_states=True).hidden_states
    encoder, mask, query = theirs.encoder, torch.ones_like(text), states[-1]
    for _ in range(count - 1):  # as its z_steps does, were its hidden states still a list
        query = encoder.layer[-1](
            states[-2],
            encoder.get_attention_mask(mask),
            query_states=query,
            relative_pos=encoder.get_rel_pos(states[0]),
            rel_embeddings=encoder.get_rel_embedding(),
        )[0]
    close(model(text), model.head(query, ours.embedding))


def test_padding_changes_nothing() -> None:
    model = make()
    logits = model(tokens(), Layout.padded([14, 6]))
    close(logits[1, :6], model(tokens()[1:, :6])[0])


def test_any_encoding_may_be_the_relative_one() -> None:
    for encoding, norm_first in (("t5", True), ("rope", False), ("floater", False)):
        model = make(encoding=encoding, options={}, norm_first=norm_first)
        assert model(tokens()).isfinite().all()


def test_every_parameter_gets_a_gradient() -> None:
    model = make().train()
    model(tokens()).logsumexp(-1).sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="layers"):
        make(layers=1)
    with pytest.raises(ArgumentError, match="steps"):
        make(steps=0)
    for name in ("alibi", "floater", "sinusoidal+rope"):
        with pytest.raises(ArgumentError, match=r"absolute.*embedding part only"):
            make(absolute=name)
    with pytest.raises(UnknownNameError, match="learned"):
        make(absolute="learnd")
