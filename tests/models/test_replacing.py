"""Other encodings and windows in a trained model, whose weights are shared."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from benchmarks.replacing import encodings_of, with_encodings, with_window

from posenc import create
from posenc.errors import ArgumentError
from posenc.extension import extend_layers
from posenc.models import (
    Decoder,
    DecoderConfig,
    Encoder,
    EncoderConfig,
    ImageConfig,
    VisionTransformer,
)


def decoder(**fields: object) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(vocabulary=50, dim=16, layers=2, heads=2, **fields)  # type: ignore[arg-type]
    return Decoder(config).eval()


TOKENS = torch.arange(24).reshape(2, 12) % 50


@pytest.mark.parametrize("merged", [False, True])
def test_own_encodings_change_nothing_and_tensors_are_shared(merged: bool) -> None:
    model = decoder(merged=merged)
    twin = with_encodings(model, encodings_of(model))
    torch.testing.assert_close(twin(TOKENS), model(TOKENS), rtol=0, atol=0)
    mine, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    assert all(theirs[name] is tensor for name, tensor in mine.items())


def test_stretched_equals_a_model_made_so_and_leaves_the_original() -> None:
    model = decoder()
    before = model(TOKENS)
    records = extend_layers(encodings_of(model), "interpolate", factor=2)
    twin = with_encodings(model, records)
    made = Decoder(model.config, encodings=records).eval()
    made.load_state_dict(model.state_dict())
    torch.testing.assert_close(twin(TOKENS), made(TOKENS), rtol=0, atol=0)
    assert not torch.allclose(twin(TOKENS), before)
    torch.testing.assert_close(model(TOKENS), before, rtol=0, atol=0)


def test_new_encodings_read_the_projections_of_the_model() -> None:
    model, sizes = decoder(), {"dim": 16, "heads": 2, "head_dim": 8, "max_length": 12}
    records = [create("deberta", **sizes, projections="content") for _ in range(2)]
    made = Decoder(model.config, encodings=copy.deepcopy(records)).eval()
    twin = with_encodings(model, records)
    made.load_state_dict(twin.state_dict())
    torch.testing.assert_close(twin(TOKENS), made(TOKENS), rtol=0, atol=0)


def test_an_encoder_gets_a_longer_table() -> None:
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(vocabulary=50, dim=16, layers=2, heads=2, max_length=8)).eval()
    records = extend_layers(encodings_of(model), "hierarchical", factor=2)
    twin = with_encodings(model, records)
    assert twin(torch.zeros(1, 16, dtype=torch.int64)).shape == (1, 16, 16)
    short = TOKENS[:, :8]
    torch.testing.assert_close(twin(short), model(short))


def test_window_equals_a_model_made_with_it() -> None:
    model = decoder()
    made = Decoder(DecoderConfig(vocabulary=50, dim=16, layers=2, heads=2, window=3)).eval()
    made.load_state_dict(model.state_dict())
    torch.testing.assert_close(with_window(model, 3)(TOKENS), made(TOKENS))
    narrower = with_window(with_window(model, 2), 3)
    torch.testing.assert_close(narrower(TOKENS), with_window(model, 2)(TOKENS))


def test_one_record_a_block() -> None:
    model = decoder()
    with pytest.raises(ArgumentError, match="2, one per block, got 1"):
        with_encodings(model, encodings_of(model)[:1])


def test_a_classifier_with_other_encodings_cannot_be_saved(tmp_path: Path) -> None:
    """Its configuration names the encodings it was made with."""
    config = ImageConfig(
        size=(8, 8), patch=4, dim=16, layers=1, heads=2, classes=2, encoding="learned2d"
    )
    model = VisionTransformer(config)
    twin = with_encodings(model, encodings_of(model))
    model.save(tmp_path)
    with pytest.raises(ArgumentError, match="records"):
        twin.save(tmp_path)
