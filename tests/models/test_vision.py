"""Image encoders with every 2-D encoding: sizes, padding, documents and class tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Layout
from posenc.errors import ArgumentError, LengthError, UnknownNameError
from posenc.layout.transforms import fitted
from posenc.models import DetrConfig, ImageConfig, ImageEncoder, VisionTransformer, pad_images
from posenc.models.vision import fit_image
from posenc.registry import ENCODINGS
from tests.models.drawing import draw_biases
from tests.models.image_encodings import IMAGE_ENCODINGS

NAMES = [*IMAGE_ENCODINGS, "learned2d+swin", "rope2d+irpe", "row_column+decomposed2d"]
TABLES = {"learned2d", "row_column", "swin", "decomposed2d"}
"""Those that have no position past the trained size."""


def make(encoding: str, **changes: object) -> VisionTransformer:
    torch.manual_seed(0)
    fields = {"size": (12, 8), "patch": 2, "channels": 1, "dim": 32, "layers": 2, "heads": 4}
    fields |= {"encoding": encoding, "classes": 5, **changes}
    model = VisionTransformer(ImageConfig(**fields)).eval()  # type: ignore[arg-type]
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".encoding." in name or name.startswith("head"):  # many start at zero
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=source))
    return model


def images(rows: int = 2, height: int = 12, width: int = 8) -> Tensor:
    return torch.randn(rows, 1, height, width, generator=torch.Generator().manual_seed(1))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("encoding", NAMES)
def test_position_matters_but_for_nope(encoding: str) -> None:
    model = make(encoding)
    flipped = images().flip(2).unflatten(2, (-1, 2)).flip(3).flatten(2, 3)  # patches, upside down
    same = torch.allclose(model(images()), model(flipped), atol=1e-5)
    assert same == (encoding in ("nope", "repo"))  # repo predicts positions from features


@pytest.mark.parametrize("encoding", NAMES)
def test_padded_equals_unpadded(encoding: str) -> None:
    model = make(encoding, size=(16, 16))
    draw_biases(model)
    large, small = images(1, 12, 16)[0], images(1, 16, 8)[0]
    batch, valid = pad_images([large, small], multiple=2)
    batch = batch.masked_fill(~valid.unsqueeze(1), float("nan"))
    logits = model(batch, valid=valid)
    close(logits[:1], model(large.unsqueeze(0)))
    close(logits[1:], model(small.unsqueeze(0)))


@pytest.mark.parametrize("encoding", NAMES)
def test_other_resolutions(encoding: str) -> None:
    model = make(encoding)
    larger = images(2, 20, 12)
    layout = model.encoder.layout(10, 6)
    if encoding == "row_column+decomposed2d":
        assert model(larger).isfinite().all()  # whose size is whose is not known: defaults
    elif TABLES & set(encoding.split("+")):
        with pytest.raises(LengthError, match=r"6 by 4|0 to 5|0 to 3"):
            model(larger)
    else:
        assert model(larger).isfinite().all()
    if encoding in ("conv", "sine2d"):
        with pytest.raises(ArgumentError, match="whole image"):
            model(larger, fitted(layout, cells=(6, 4)))
    else:
        assert model(larger, fitted(layout, cells=(6, 4))).isfinite().all()


@pytest.mark.parametrize("encoding", NAMES)
def test_without_class_token(encoding: str) -> None:
    model = make(encoding, special=0)
    assert model.encoder.special.shape == (0, 32)
    batch, valid = pad_images([images()[0], images(1, 6, 8)[0]])
    close(model(batch, valid=valid)[:1], model(images()[:1]))


@pytest.mark.parametrize("encoding", NAMES)
def test_every_parameter_gets_a_gradient(encoding: str) -> None:
    model = make(encoding, special=0)  # pairs with a class token have no offset, nor a bias
    model(images(8)).square().sum().backward()
    trained = [(n, p) for n, p in model.named_parameters() if p.numel()]
    without = [n for n, p in trained if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("encoding", [n for n, e in ENCODINGS.items() if e.claims.causal_only])
def test_causal_encodings_are_refused(encoding: str) -> None:
    with pytest.raises(ArgumentError, match="requires a causal mask"):
        make(encoding)


def test_text_encodings_are_refused() -> None:
    with pytest.raises(ArgumentError, match="ax"):
        make("alibi")(images())


def test_documents_keep_images_apart() -> None:
    """Two images in one row are two images: positions are data."""
    model = make("rope2d", special=0, size=(4, 4))
    left, right = images(1, 4, 4), images(2, 4, 4)[1:]
    both = torch.cat([left, right], dim=3)
    whole = Layout.image(2, 4)
    column = whole.positions[..., 1]
    cells = torch.stack([whole.positions[..., 0], column % 2], dim=-1)
    layout = Layout(cells, whole.order, document=(column >= 2).long())
    x, _ = model.encoder(both, layout)
    alone, _ = model.encoder(left)
    close(x[:, [0, 1, 4, 5]], alone)


def test_detr_pads_images_of_different_sizes() -> None:
    torch.manual_seed(0)
    config = DetrConfig(size=(16, 16), patch=4, dim=32, layers=2, heads=4)
    model = ImageEncoder(config).eval()
    first, second = torch.randn(3, 16, 10), torch.randn(3, 9, 20)
    batch, valid = pad_images([first, second], multiple=4)
    x, layout = model(batch, valid=valid)
    assert x.shape == (2, 4 * 5, 32)
    assert layout.valid is not None
    assert layout.valid.sum(1).tolist() == [4 * 3, 3 * 5]
    for row, image in enumerate((first, second)):
        alone, alone_valid = pad_images([image], multiple=4)
        close(x[row][layout.valid[row]], model(alone, valid=alone_valid)[0][0])


def test_detr_equals_transformers() -> None:
    """The encoder's layers with random weights, on a padded batch."""
    detr = pytest.importorskip("transformers.models.detr.modeling_detr")
    configuration = pytest.importorskip("transformers.models.detr.configuration_detr")
    torch.manual_seed(0)
    theirs = detr.DetrEncoder(
        configuration.DetrConfig(
            d_model=32,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=48,
            dropout=0.0,
            attn_implementation="eager",
        )
    ).eval()
    ours = ImageEncoder(
        DetrConfig(size=(12, 16), patch=4, dim=32, layers=2, heads=4, hidden=48)
    ).eval()
    for block, layer in zip(ours.blocks, theirs.layers, strict=True):
        given, norms = layer.self_attn, (layer.self_attn_layer_norm, layer.final_layer_norm)
        pairs = [
            (block.attention.query, given.q_proj),
            (block.attention.key, given.k_proj),
            (block.attention.value, given.v_proj),
            (block.attention.output, given.o_proj),
            (block.feed_forward.input, layer.mlp.fc1),
            (block.feed_forward.output, layer.mlp.fc2),
            (block.attention_norm, norms[0]),
            (block.feed_forward_norm, norms[1]),
        ]
        for mine, source in pairs:
            source.weight.data.uniform_(-0.3, 0.3)
            source.bias.data.uniform_(-0.3, 0.3)
            mine.load_state_dict(source.state_dict())
    batch, valid = pad_images([torch.randn(3, 12, 9), torch.randn(3, 6, 16)], multiple=4)
    x, layout = ours(batch, valid=valid)
    tokens, _, cells = ours.patches(batch, valid)
    sine = posenc.create("sine2d", dim=32).embed(torch.zeros_like(tokens), layout)
    assert layout.valid is not None
    assert cells is not None
    expected = theirs(
        inputs_embeds=tokens, attention_mask=layout.valid, spatial_position_embeddings=sine
    ).last_hidden_state
    close(x[layout.valid], expected[layout.valid])


def test_attention_positions_need_an_added_vector() -> None:
    for encoding in ("learned2d", "row_column", "sine2d", "fourier", "gaussian_fourier"):
        model = make(encoding, positions="attention")
        assert model.encoder.blocks.encodings[0].embedding is None
        assert model(images()).shape == (2, 5)
    with pytest.raises(ArgumentError, match="Conv"):
        make("conv", positions="attention")
    with pytest.raises(ArgumentError, match="query_key part"):
        make("sine2d+rope2d", positions="attention")


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="multiples of the patch"):
        make("nope", size=(9, 8))
    with pytest.raises(ArgumentError, match="classes"):
        make("nope", classes=None)
    with pytest.raises(UnknownNameError, match="positions"):
        make("nope", positions="middle")
    model = make("nope")
    with pytest.raises(ArgumentError, match="multiples of the patch"):
        model(images(2, 12, 7))
    with pytest.raises(ArgumentError, match="images"):
        model(torch.zeros(2, 3, 12, 8))
    with pytest.raises(ArgumentError, match="images"):
        model(torch.zeros(2, 1, 12, 8, dtype=torch.uint8))
    with pytest.raises(ArgumentError, match="valid"):
        model(images(), valid=torch.ones(2, 6, 4, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="layout"):
        model(images(), Layout.image(6, 4))
    with pytest.raises(ArgumentError, match="the same channels and dtype"):
        pad_images([torch.zeros(3, 4, 4), torch.zeros(1, 4, 4)])
    with pytest.raises(ArgumentError, match="none"):
        pad_images([])


def test_records_serve_but_cannot_be_saved(tmp_path: Path) -> None:
    named = make("rope2d")
    torch.manual_seed(0)
    records = posenc.create_layers("rope2d", layers=2, head_dim=8)
    model = VisionTransformer(named.config, encodings=records)
    model.head.load_state_dict(named.head.state_dict())
    close(model(images()), named(images()))
    with pytest.raises(ArgumentError, match="by name"):
        model.save(tmp_path)


def test_options_in_the_name_of_an_encoding() -> None:
    """They take the place of what would be set from the image."""
    sizes = {
        option: fit_image(name, {}, (3, 4), special=1)
        for option, name in (("plain", "learned2d"), ("named", "learned2d@size=5,6"))
    }
    assert sizes["plain"]["size"] == (3, 4)
    assert "size" not in sizes["named"]
