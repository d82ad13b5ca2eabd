"""SeqPE against GPT-2 reading strings of digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2Model

from posenc import Layout
from posenc.encodings.embedding.seqpe import Seqpe
from posenc.errors import LengthError

DIM = 12


def made(**options: Any) -> Seqpe:
    arguments: dict[str, Any] = {"dim": DIM, "heads": 3, "digits": 4} | options
    encoding: Seqpe = Seqpe(**arguments).double().eval()
    with torch.no_grad():
        for parameter in encoding.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return encoding


def gpt2(encoding: Seqpe) -> Any:
    """GPT-2 with the same weights: token 10 is the summary, whose place is empty."""
    count = encoding.places.shape[0]
    config = GPT2Config(
        vocab_size=11, n_positions=count + 1, n_embd=DIM, n_layer=2, n_head=3, attn_pdrop=0.0
    )
    model: Any = GPT2Model(config)
    model = model.double().eval()
    places: Tensor = encoding.places
    if encoding.axis is not None:
        places = places + encoding.axis.repeat_interleave(encoding.digits, dim=0)
    with torch.no_grad():
        model.wte.weight.copy_(torch.cat([encoding.symbols, encoding.summary[None]]))
        model.wpe.weight.copy_(torch.cat([places, torch.zeros(1, DIM)]))
        for theirs, ours in zip(model.h, encoding.blocks, strict=True):
            for conv, name in (
                (theirs.attn.c_attn, "projection"),
                (theirs.attn.c_proj, "joined"),
                (theirs.mlp.c_fc, "widen"),
                (theirs.mlp.c_proj, "narrow"),
            ):
                linear = getattr(ours, name)
                conv.weight.copy_(linear.weight.mT)
                conv.bias.copy_(linear.bias)
    return model


def strings(positions: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    """Ids and mask of each position ``[N, A]``, the summary last, written out by Python."""
    ids, masks = [], []
    for position in positions.long().tolist():
        row, mask = [], []
        for number in position:
            text = str(number)
            row += [int(letter) for letter in text.rjust(digits, "0")]
            mask += [0] * (digits - len(text)) + [1] * len(text)
        ids.append([*row, 10])
        masks.append([*mask, 1])
    return torch.tensor(ids), torch.tensor(masks)


@pytest.mark.parametrize(
    "positions", [[[0], [9], [10], [1234], [9999], [100]], [[0, 0], [7, 10], [305, 0], [99, 9999]]]
)
def test_equals_gpt2(positions: list[list[int]]) -> None:
    places = torch.tensor(positions, dtype=torch.float32)
    encoding = made(axes=places.shape[1])
    model = gpt2(encoding)
    ids, mask = strings(places, 4)
    read = model(ids, attention_mask=mask, position_ids=torch.arange(ids.shape[1])[None])
    expected = encoding.output(read.last_hidden_state[:, -1])
    x = torch.randn(1, len(positions), DIM, dtype=torch.float64)
    got = encoding(x, Layout.at(places[None]))
    torch.testing.assert_close(got[0], x[0] + expected)
    (wanted,) = torch.autograd.grad(expected.sin().sum(), model.wte.weight)
    parameters = [encoding.symbols, encoding.summary]
    symbols, summary = torch.autograd.grad((got - x).sin().sum(), parameters)
    torch.testing.assert_close(torch.cat([symbols, summary[None]]), wanted)


def test_digits_by_hand() -> None:
    """Position 305 is 3, 0, 5 after a hidden leading zero, which may hold anything."""
    encoding = made()
    before = encoding.read(torch.tensor([[305], [1305], [5], [0]]))
    with torch.no_grad():
        encoding.places[0] += torch.arange(DIM)
    after = encoding.read(torch.tensor([[305], [1305], [5], [0]]))
    changed = (before - after).abs().amax(-1) > 1e-6
    assert changed.tolist() == [False, True, False, False]
    with torch.no_grad():
        encoding.symbols[3] += torch.arange(DIM)
    changed = (encoding.read(torch.tensor([[305], [5]])) - after[[0, 2]]).abs().amax(-1) > 1e-6
    assert changed.tolist() == [True, False]


def test_fractions_are_interpolated() -> None:
    encoding = made(axes=2)
    x = torch.zeros(1, 1, DIM, dtype=torch.float64)
    got = encoding(x, Layout.at(torch.tensor([[[2.25, 9.5]]])))[0, 0]
    corners = encoding.read(torch.tensor([[2, 9], [2, 10], [3, 9], [3, 10]]))
    weights = torch.tensor([0.375, 0.375, 0.125, 0.125], dtype=torch.float64)
    torch.testing.assert_close(got, weights @ corners)


def test_a_large_image_and_its_cells() -> None:
    encoding = made(axes=2)
    image = Layout.image(3, 11, prefix=1)
    x = torch.randn(1, 34, DIM, dtype=torch.float64)
    got = encoding(x, image)
    torch.testing.assert_close(got[:, :1], x[:, :1])
    torch.testing.assert_close(got[:, 1:], encoding(x[:, 1:], Layout.at(image.positions[:, 1:])))


@pytest.mark.parametrize(
    "layout", [Layout.sequence(2, start=9999), Layout.at(torch.tensor([-1.0]))]
)
def test_beyond_its_digits_it_refuses(layout: Layout) -> None:
    with pytest.raises(LengthError, match="more digits"):
        made()(torch.zeros(1, layout.length, DIM), layout)


def test_the_last_position_is_served() -> None:
    encoding = made()
    last, before = (
        encoding(torch.zeros(1, 1, DIM), Layout.at(torch.tensor([t]))) for t in (9999.0, 9998.0)
    )
    assert last.isfinite().all()
    assert not torch.equal(last, before)
