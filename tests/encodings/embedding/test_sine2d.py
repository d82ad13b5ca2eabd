"""DETR's sines against transformers, and the padded image worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.detr.modeling_detr import DetrSinePositionEmbedding

from posenc import Layout
from posenc.encodings.embedding.sine2d import Sine2d


def framed(height: int, width: int, sizes: list[tuple[int, int]]) -> Tensor:
    """Masks of images of these sizes, each in the upper left of a frame."""
    valid = torch.zeros(len(sizes), height, width, dtype=torch.bool)
    for row, (h, w) in enumerate(sizes):
        valid[row, :h, :w] = True
    return valid


def table(encoding: Sine2d, layout: Layout, dtype: torch.dtype = torch.float32) -> Tensor:
    zeros = torch.zeros(layout.batch, layout.length, encoding.dim, dtype=dtype)
    embedded: Tensor = encoding(zeros, layout)
    return embedded


@pytest.mark.parametrize("scale", [None, 2 * math.pi, 1.5])
@pytest.mark.parametrize("temperature", [10000, 20])
@pytest.mark.parametrize(
    ("height", "width", "sizes"),
    [
        (4, 4, [(3, 3)]),
        (5, 7, [(5, 7), (2, 7), (4, 3)]),
        (1, 6, [(1, 6), (1, 2)]),
        (6, 1, [(5, 1), (0, 0)]),
        (1, 1, [(1, 1)]),
    ],
)
def test_equals_detr(
    height: int, width: int, sizes: list[tuple[int, int]], temperature: int, scale: float | None
) -> None:
    """Masked cells too, and with an image of no real cell at all."""
    valid = framed(height, width, sizes)
    theirs = DetrSinePositionEmbedding(10, temperature, normalize=scale is not None, scale=scale)
    shape = torch.Size([len(sizes), 3, height, width])
    for mask in (valid, None):
        expected = theirs(shape, torch.device("cpu"), torch.float32, mask)
        expected = expected.flatten(2).mT[: 1 if mask is None else None]
        ours = Sine2d(dim=20, temperature=temperature, scale=scale)
        layout = Layout.image(height, width, valid=mask)
        torch.testing.assert_close(table(ours, layout), expected, atol=2e-6, rtol=1e-5)


def test_a_padded_image_worked_by_hand() -> None:
    """A 3×3 image padded to 4×4: sums of the mask; 10 features an axis, 20 in all, y first."""
    encoding = Sine2d(dim=20, scale=None)
    layout = Layout.image(4, 4, valid=framed(4, 4, [(3, 3)]))
    rows, columns = encoding.coordinates(layout).reshape(4, 4, 2).unbind(-1)
    assert rows.tolist() == [[1, 1, 1, 0], [2, 2, 2, 0], [3, 3, 3, 0], [3, 3, 3, 0]]
    assert columns.tolist() == [[1, 2, 3, 3], [1, 2, 3, 3], [1, 2, 3, 3], [0, 0, 0, 0]]
    features = table(encoding, layout).reshape(4, 4, 20)
    frequencies = [10000 ** (-2 * t / 10) for t in range(5)]
    for row in range(3):
        for column in range(3):
            expected = [
                wave(count * frequency)
                for count in (row + 1, column + 1)
                for frequency in frequencies
                for wave in (math.sin, math.cos)
            ]
            torch.testing.assert_close(features[row, column], torch.tensor(expected))
    scaled = Sine2d(dim=20).coordinates(layout).reshape(4, 4, 2)
    thirds = torch.tensor([1, 2, 3]) / (3 + 1e-6) * 2 * math.pi
    torch.testing.assert_close(scaled[:3, 0, 0], thirds)
    torch.testing.assert_close(scaled[0, :3, 1], thirds)
    assert scaled[2, 2].tolist() == pytest.approx([6.283183, 6.283183], abs=1e-6)


def test_padding_does_not_move_an_image() -> None:
    """Real cells get what they get alone, in any frame."""
    encoding = Sine2d(dim=12)
    alone = table(encoding, Layout.image(2, 3))
    layout = Layout.image(5, 4, valid=framed(5, 4, [(2, 3)]))
    inside = table(encoding, layout)[0, layout.valid[0]] if layout.valid is not None else None
    torch.testing.assert_close(inside, alone[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_not_taken_in_the_dtype_of_the_tokens(dtype: torch.dtype) -> None:
    """In bfloat16 the 257th cell would fall on the 256th, in float16 the 2049th on the 2048th."""
    encoding, layout = Sine2d(dim=4, scale=None), Layout.image(1, 2100)
    counts = encoding.to(dtype).coordinates(layout)[0, :, 1]
    assert len(set(counts.tolist())) == 2100
    got = table(encoding, layout, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got, table(encoding, layout).to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(table(encoding, layout), table(encoding, layout))


def test_single_cells_are_counted_from_their_positions() -> None:
    encoding, image = Sine2d(dim=8, scale=None), Layout.image(3, 4)
    some = Layout.at(image.positions[:, [7, 2, 11]])
    torch.testing.assert_close(table(encoding, some), table(encoding, image)[:, [7, 2, 11]])
    torch.testing.assert_close(table(encoding, image.slice(5, 9)), table(encoding, image)[:, 5:9])
    between = table(encoding, Layout.at(torch.tensor([[[0.5, -1.25]]])))
    expected = [
        wave(c * w) for c in (1.5, -0.25) for w in (1.0, 0.01) for wave in (math.sin, math.cos)
    ]
    torch.testing.assert_close(between[0, 0], torch.tensor(expected))
