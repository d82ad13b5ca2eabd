"""The encoder with every encoding that sees both sides, its masked-LM head, and saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Layout
from posenc.errors import ArgumentError
from posenc.models import EncoderConfig, MaskedLM
from posenc.registry import ENCODINGS
from tests.models.text_encodings import TEXT_ENCODINGS, one_of_each_kind

BOTH_SIDES = [n for n in TEXT_ENCODINGS if not ENCODINGS[n].claims.causal_only]


def config(encoding: str = "rope", **changes: object) -> EncoderConfig:
    fields: dict[str, object] = {"vocabulary": 19, "dim": 32, "layers": 2, "heads": 4}
    fields |= {"encoding": encoding, "max_length": 40, **changes}
    return EncoderConfig(**fields)  # type: ignore[arg-type]


def make(encoding: str = "rope", **changes: object) -> MaskedLM:
    torch.manual_seed(0)
    return MaskedLM(config(encoding, **changes)).eval()


def tokens(rows: int = 3, length: int = 12) -> Tensor:
    return torch.randint(19, (rows, length), generator=torch.Generator().manual_seed(1))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("encoding", one_of_each_kind(BOTH_SIDES))
def test_padded_equals_unpadded(encoding: str) -> None:
    for norm_first in (True, False):
        model, lengths = make(encoding, norm_first=norm_first), [12, 5, 9]
        logits = model(tokens(), Layout.padded(lengths))
        for row, length in enumerate(lengths):
            close(logits[row, :length], model(tokens()[row : row + 1, :length])[0])


@pytest.mark.parametrize("encoding", sorted(set(TEXT_ENCODINGS) - set(BOTH_SIDES)))
def test_encodings_that_only_count_back_are_refused(encoding: str) -> None:
    with pytest.raises(ArgumentError, match=rf"bidirectional.*{encoding}"):
        make(encoding)


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_norm_stands_where_blocks_have_none(norm_first: bool) -> None:
    encoder = make(norm_first=norm_first).encoder
    entering = encoder.embed(tokens(), Layout.sequence(12))
    leaving = encoder(tokens())
    assert bool(entering.mean(-1).abs().max() < 1e-5) is not norm_first
    assert leaving.mean(-1).abs().max() < 1e-5


def test_segments() -> None:
    model, kinds = make(types=2), (torch.arange(12) >= 6).long().expand(3, -1)
    close(model(tokens()), model(tokens(), types=torch.zeros_like(kinds)))
    assert not torch.allclose(model(tokens()), model(tokens(), types=kinds), atol=1e-3)
    with pytest.raises(ArgumentError, match="types"):
        make()(tokens(), types=kinds)


def test_the_head_is_tied_and_has_its_own_bias() -> None:
    model = make()
    with torch.no_grad():
        model.head.bias.normal_()
    x = model.encoder(tokens())
    dense = model.head.dense
    hidden = torch.nn.functional.gelu(x @ dense.weight.T + dense.bias)
    hidden = (hidden - hidden.mean(-1, keepdim=True)) / (
        hidden.var(-1, correction=0, keepdim=True) + 1e-5
    ).sqrt()
    close(model(tokens()), hidden @ model.encoder.embedding.weight.T + model.head.bias)


def test_records_serve_as_well_as_names(tmp_path: Path) -> None:
    records = posenc.create_layers("alibi", layers=2, heads=4)
    torch.manual_seed(0)
    model = MaskedLM(config("nope"), encodings=records).eval()
    close(model(tokens()), make("alibi")(tokens()))
    with pytest.raises(ArgumentError, match="by name"):
        model.save(tmp_path)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="tokens"):
        make()(tokens().float())
    with pytest.raises(ArgumentError, match="types"):
        make(types=-1)
    with pytest.raises(ArgumentError, match="layers"):
        make(layers=0)
