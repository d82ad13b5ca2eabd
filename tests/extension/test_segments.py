"""Long inputs read in overlapping segments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from posenc import Layout
from posenc.errors import ArgumentError, UnknownNameError
from posenc.extension import segments
from posenc.models import Decoder, DecoderConfig


class Told(nn.Module):
    """Notes what it is given, and answers with tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Layout]] = []

    def forward(self, tokens: Tensor, layout: Layout) -> Tensor:
        self.calls.append((tokens, layout))
        places = layout.positions[..., 0].expand_as(tokens)
        return torch.stack([tokens.float(), places], dim=-1)


def tokens(length: int, rows: int = 1) -> Tensor:
    return torch.arange(rows * length).view(rows, length)


@pytest.mark.parametrize("combine", ["before", "mean", "middle"])
def test_what_fits_is_read_as_it_is(combine: str) -> None:
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig(vocabulary=50, dim=16, layers=2, heads=2, encoding="learned", max_length=12)
    ).eval()
    read = segments(model, length=12, overlap=4, combine=combine)  # type: ignore[arg-type]
    given = torch.randint(50, (3, 12))
    torch.testing.assert_close(read(given), model(given), rtol=0, atol=0)


def test_each_segment_stands_where_training_was() -> None:
    model = Told()
    segments(model, length=8, overlap=3)(tokens(20))
    assert [call[1].start for call in model.calls] == [0, 0, 0, 0]
    assert [call[0][0, 0].item() for call in model.calls] == [0, 5, 10, 12]
    assert all(call[0].shape[1] == 8 for call in model.calls)


@pytest.mark.parametrize("combine", ["before", "mean", "middle"])
@pytest.mark.parametrize("length", [9, 16, 17, 31, 64])
@pytest.mark.parametrize("overlap", [0, 1, 4, 7])
def test_every_token_gets_its_own_output(combine: str, length: int, overlap: int) -> None:
    read = segments(Told(), length=8, overlap=overlap, combine=combine)  # type: ignore[arg-type]
    output = read(tokens(length, rows=2))
    torch.testing.assert_close(output[..., 0], tokens(length, rows=2).float())


def test_before_has_most_of_the_past() -> None:
    places = segments(Told(), length=6, overlap=3)(tokens(12))[0, :, 1]
    assert places.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5]


def test_middle_stays_away_from_cuts_but_not_from_ends() -> None:
    read = segments(Told(), length=6, overlap=4, combine="middle")
    assert read(tokens(10))[0, :, 1].tolist() == [0, 1, 2, 3, 2, 3, 2, 3, 4, 5]


def test_mean_is_the_mean() -> None:
    read = segments(Told(), length=4, overlap=2, combine="mean")
    assert read(tokens(8))[0, :, 1].tolist() == [0, 1, 1, 2, 1, 2, 2, 3]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_begin_where_they_begin(side: str) -> None:
    model = Told()
    layout = Layout.padded([20, 11], side=side)
    segments(model, length=8, overlap=3)(tokens(20, rows=2), layout)
    for _, given in model.calls:
        assert given.valid is not None
        for row in range(2):
            real = given.positions[row, given.valid[row], 0]
            if len(real):
                assert real.tolist() == list(range(len(real)))


def test_a_causal_model_is_exact_within_reach() -> None:
    """With a window shorter than the overlap, segments lose nothing but the first layer's edge."""
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig(vocabulary=50, dim=16, layers=1, heads=2, encoding="rope", window=4)
    ).eval()
    given = torch.randint(50, (2, 40))
    torch.testing.assert_close(segments(model, length=12, overlap=3)(given), model(given))


def test_documents_are_refused() -> None:
    with pytest.raises(ArgumentError, match="one text a row"):
        segments(Told(), length=4)(tokens(8), Layout.packed([4, 4]))


@pytest.mark.parametrize(
    ("options", "message"), [({"length": 1}, "length"), ({"overlap": 4}, "overlap")]
)
def test_bad_arguments(options: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        segments(Told(), **({"length": 4} | options))
    with pytest.raises(UnknownNameError, match="middle"):
        segments(Told(), length=4, combine="center")  # type: ignore[arg-type]
