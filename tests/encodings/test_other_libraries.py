"""Recipes of docs/guides/move.md against the libraries, where they are installed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.extension import extend

LENGTH, HEADS, WIDTH = 60, 4, 8
DIM = HEADS * WIDTH
HERE = Layout.sequence(LENGTH)
GRIDS = {False: Grid.of(HERE), True: Grid.of(HERE, causal=True)}

queries = torch.randn(2, HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
tokens = torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(1))


def near(got: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(got).detach(), expected, rtol=1e-5, atol=2e-5)


def apart(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def rotated(encoding: Encoding | None = None, **options: Any) -> Tensor:
    encoding = encoding or posenc.create("rope", head_dim=WIDTH, **options)
    result: Tensor = encoding.query_key(queries, queries, GRIDS[False])[0]
    return result


def sinusoids(arrangement: str = "interleaved", dim: int = DIM) -> Tensor:
    encoding = posenc.create("sinusoidal", dim=dim, arrangement=arrangement)
    return encoding.embed(torch.zeros(1, LENGTH, dim), HERE)


def transformer_xl(weight: Tensor, content: Tensor, position: Tensor) -> Encoding:
    """With the weights of a library that has sines and cosines in turn."""
    encoding = posenc.create("transformer_xl", dim=DIM, heads=HEADS, head_dim=WIDTH)
    by_head = weight.detach().unflatten(0, (HEADS, WIDTH))
    score: Any = encoding.score
    score.weight.data.copy_(torch.cat([by_head[..., 0::2], by_head[..., 1::2]], -1))
    score.biases.content.data.copy_(content)
    score.biases.position.data.copy_(position)
    return encoding.requires_grad_(False)


def keras_layers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    module: ModuleType = pytest.importorskip("keras_hub.layers", reason="needs keras-hub")
    return module


def test_keras_hub_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = keras_layers(monkeypatch)
    near(
        layers.RotaryEmbedding(max_wavelength=500.0, sequence_axis=2)(queries), rotated(base=500.0)
    )
    rope = posenc.create("rope", head_dim=WIDTH)
    longer = rotated(extend(rope, "interpolate", factor=4.0))
    near(layers.RotaryEmbedding(scaling_factor=4.0, sequence_axis=2)(queries), longer)
    yarn = rotated(extend(rope, "yarn", factor=4.0, length=16))
    options = {"rope_type": "yarn", "original_max_position_embeddings": 16}
    near(layers.RotaryEmbedding(scaling_factor=4.0, sequence_axis=2, **options)(queries), yarn)


def test_keras_hub_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = keras_layers(monkeypatch)
    near(layers.SinePositionEncoding()(torch.zeros(1, LENGTH, DIM)), sinusoids())
    table = layers.PositionEmbedding(sequence_length=80)
    expected = table(tokens)
    learned = posenc.create("learned", dim=DIM, max_length=80)
    learned.embedding.table.data.copy_(torch.as_tensor(table.position_embeddings.value))
    near(learned.embed(tokens, HERE) - tokens, torch.as_tensor(expected).detach())
    mask = GRIDS[True].visible
    for heads in (4, 6):
        bias = posenc.create("alibi", heads=heads).bias(GRIDS[True])
        of_keys = layers.AlibiBias()(torch.zeros(1, heads, LENGTH, LENGTH))
        weights, theirs = (x.masked_fill(~mask, -torch.inf).softmax(-1) for x in (bias, of_keys))
        near(theirs, weights)


def test_equinox_rotates() -> None:
    equinox = pytest.importorskip("equinox", reason="needs equinox")
    import jax
    import jax.numpy as jnp
    import numpy as np

    layer = equinox.nn.RotaryPositionalEmbedding(WIDTH, theta=10000.0)
    theirs = jax.vmap(jax.vmap(layer))(jnp.array(queries.numpy()))
    near(np.array(theirs), rotated())


def test_curated_transformers() -> None:
    layers = pytest.importorskip("curated_transformers.layers", reason="needs curated-transformers")
    near(layers.RotaryEmbeddings(WIDTH, base=500)(queries), rotated(base=500.0))
    both = layers.QueryKeyRotaryEmbeddings(fraction=0.5, head_width=WIDTH)
    near(both(query=queries, key=queries)[0], rotated(fraction=0.5))
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    for normalize, size in ((True, (2 / DIM) ** 0.5), (False, 1.0)):
        options = {"width": DIM, "max_len": LENGTH, "normalize": normalize}
        near(layers.SinusoidalPositionalEmbedding(**options)(ids), size * sinusoids()[0])
    for causal, grid in GRIDS.items():
        options = {"n_attention_heads": 6, "is_causal": causal, "is_inverted": False}
        scores = torch.zeros(1, 6, LENGTH, LENGTH)
        theirs = layers.AttentionLinearBiases(**options)(attention_scores=scores)
        bias = posenc.create("alibi", heads=6).bias(grid)
        near(*(x.masked_fill(~grid.visible, -torch.inf).softmax(-1) for x in (theirs, bias)))


def test_speechbrain_adds_and_rotates() -> None:
    attention = pytest.importorskip("speechbrain.nnet.attention", reason="needs speechbrain")
    from speechbrain.lobes.models.transformer.Transformer import PositionalEncoding

    near(PositionalEncoding(DIM)(tokens), sinusoids())
    layer = attention.RoPEMHA(DIM, HEADS).eval().requires_grad_(False)
    rope = posenc.create("rope", head_dim=WIDTH, pairing="adjacent")
    mixed = attend(*projected(layer), GRIDS[False], rope, scale=DIM**-0.5)
    near(layer(tokens, tokens, tokens)[0], layer.out_proj(mixed.transpose(1, 2).flatten(2)))


def projected(layer: Any) -> tuple[Tensor, ...]:
    """Queries, keys and values of SpeechBrain, which lie side by side in each head."""
    together = torch.nn.functional.linear(tokens, layer.in_proj_weight)
    return together.unflatten(-1, (HEADS, 3 * WIDTH)).transpose(1, 2).chunk(3, -1)


@pytest.mark.parametrize("causal", [False, True])
def test_speechbrain_has_the_same_sines_before_and_after(causal: bool) -> None:
    """So it equals Transformer-XL under a causal mask, and once its sines are odd."""
    attention = pytest.importorskip("speechbrain.nnet.attention", reason="needs speechbrain")
    layer = attention.RelPosMHAXL(DIM, HEADS).eval().requires_grad_(False)
    for weight in (layer.linear_pos.weight, layer.pos_bias_u, layer.pos_bias_v):
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(2))
    vectors = (bias.view(HEADS, WIDTH) for bias in (layer.pos_bias_u, layer.pos_bias_v))
    encoding = transformer_xl(layer.linear_pos.weight, *vectors)
    mixed = attend(*projected(layer), GRIDS[causal], encoding, scale=DIM**-0.5)
    ours = layer.out_proj(mixed.transpose(1, 2).flatten(2))
    positions = attention.RelPosEncXL(DIM)(tokens)
    mask = ~GRIDS[causal].visible[0, 0]
    same = layer(tokens, tokens, tokens, positions, attn_mask=mask)[0]
    positions[:, LENGTH:, 0::2] *= -1
    near(layer(tokens, tokens, tokens, positions, attn_mask=mask)[0], ours)
    assert apart(same, ours) < 1e-5 if causal else apart(same, ours) > 0.05


def of_espnet(name: str) -> ModuleType:
    path = f"espnet.nets.pytorch_backend.transformer.{name}"
    module: ModuleType = pytest.importorskip(path, reason="needs espnet")
    return module


def test_espnet_adds() -> None:
    embedding = of_espnet("embedding")
    near(embedding.PositionalEncoding(DIM, 0.0)(tokens), tokens * DIM**0.5 + sinusoids())
    theirs = embedding.ConvolutionalPositionalEmbedding(DIM, 0.0).requires_grad_(False)
    options = {"kernel": 128, "groups": 16, "activation": "gelu", "causal": False}
    conv = posenc.create("conv", dim=DIM, **options)
    conv.embedding.load_state_dict({x: getattr(theirs.convs[0], x) for x in ("weight", "bias")})
    near(theirs(tokens), (conv.embed(tokens, HERE) - tokens).detach())
    theirs = embedding.LearnableFourierPosEnc(DIM, hidden_dim=24).requires_grad_(False)
    fourier = posenc.create("fourier", dim=DIM, hidden=24)
    fourier.embedding.frequencies.data.copy_(theirs.w_r.T)
    fourier.embedding.input.load_state_dict(theirs.mlp[0].state_dict())
    fourier.embedding.output.load_state_dict(theirs.mlp[2].state_dict())
    near(theirs(tokens), fourier.embed(tokens, HERE).detach())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("legacy", ["", "Legacy"])
def test_espnet_has_relative_positions(legacy: str, causal: bool) -> None:
    """The older form is the same under a causal mask, given the length as ``max_len``."""
    attention, embedding = of_espnet("attention"), of_espnet("embedding")
    name = f"{legacy}RelPositionMultiHeadedAttention"
    layer = getattr(attention, name)(HEADS, DIM, 0.0).eval().requires_grad_(False)
    encoding = transformer_xl(layer.linear_pos.weight, layer.pos_bias_u, layer.pos_bias_v)
    q, k, v = (
        project(tokens).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        for project in (layer.linear_q, layer.linear_k, layer.linear_v)
    )
    mixed = attend(q, k, v, GRIDS[causal], encoding)
    ours = layer.linear_out(mixed.transpose(1, 2).flatten(2))

    def theirs(max_len: int) -> Tensor:
        form = getattr(embedding, f"{legacy}RelPositionalEncoding")
        _, positions = form(DIM, 0.0, max_len=max_len)(tokens)
        output: Tensor = layer(tokens, tokens, tokens, positions, GRIDS[causal].visible[0])
        return output

    if legacy:
        assert apart(theirs(5000), ours) > 0.01
        assert apart(theirs(LENGTH), ours) < 1e-5 if causal else apart(theirs(LENGTH), ours) > 0.01
    else:
        near(theirs(5000), ours)


def test_diffusers() -> None:
    theirs = pytest.importorskip("diffusers.models.embeddings", reason="needs diffusers")
    places = torch.arange(float(LENGTH))
    near(theirs.SinusoidalPositionalEmbedding(DIM, LENGTH)(tokens), tokens + sinusoids())
    near(theirs.get_timestep_embedding(places, DIM), sinusoids("whisper")[0])
    flipped = theirs.get_timestep_embedding(places, DIM, True, downscale_freq_shift=0)
    near(flipped.roll(DIM // 2, -1), sinusoids("concatenated")[0])
    wave = theirs.get_1d_rotary_pos_embed(WIDTH, LENGTH, use_real=True)
    near(theirs.apply_rotary_emb(queries, wave), rotated(pairing="adjacent"))
    cells = Layout.image(7, 9).positions[0] * torch.tensor([16 / 7, 16 / 9])
    axis: Any = posenc.create("sinusoidal", dim=16, arrangement="concatenated").embedding
    rows, columns = (axis.table(x) for x in cells.unbind(-1))
    image = theirs.get_2d_sincos_pos_embed(DIM, (7, 9), output_type="pt")
    near(image.float(), torch.cat([columns, rows], -1))
