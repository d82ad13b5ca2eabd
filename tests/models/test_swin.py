"""Swin's windows are documents; shifted, padded and of any size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Layout
from posenc.errors import ArgumentError
from posenc.models import Swin, SwinConfig, pad_images
from posenc.models.stack import StackConfig
from posenc.models.swin import SwinStage, Windows
from posenc.registry import ENCODINGS
from tests.models.drawing import draw_biases
from tests.models.image_encodings import IMAGE_ENCODINGS

INSIDE = [
    n
    for n in IMAGE_ENCODINGS
    if ENCODINGS[n].claims.relative and "embedding" not in ENCODINGS[n].claims.sites
]
SHAPES = [((8, 8), 4), ((6, 10), 4), ((3, 9), 4), ((4, 4), 4), ((7, 5), 2)]


def make(encoding: str = "swin", **changes: object) -> Swin:
    torch.manual_seed(0)
    fields = {"size": (16, 16), "patch": 2, "channels": 1, "dim": 16, "depths": (2, 2)}
    fields |= {"heads": (2, 4), "window": 3, "encoding": encoding, "classes": 5, **changes}
    model = Swin(SwinConfig(**fields)).eval()  # type: ignore[arg-type]
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "encoding." in name or name.startswith("head"):  # many start at zero
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=source))
    return model


def images(rows: int = 2, height: int = 16, width: int = 16) -> Tensor:
    return torch.randn(rows, 1, height, width, generator=torch.Generator().manual_seed(1))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shift", [(0, 0), (1, 0), (2, 1)])
@pytest.mark.parametrize("extent", [(8, 9), (7, 5), (2, 3)])
def test_join_undoes_split(extent: tuple[int, int], shift: tuple[int, int]) -> None:
    windows = Windows(extent=extent, window=(3, 2), shift=shift)
    x = torch.randn(2, extent[0] * extent[1], 4)
    assert torch.equal(windows.join(windows.split(x)), x)
    assert windows.layout(2).length == 6


def test_what_shares_a_row_and_what_sees_each_other() -> None:
    windows = Windows(extent=(1, 6), window=(1, 2), shift=(0, 1))
    column = windows.split(torch.arange(6.0).view(1, 6, 1))[..., 0]
    assert column.tolist() == [[1, 2], [3, 4], [5, 0]]
    document = windows.layout(1).document
    assert document is not None
    assert (document[:, 0] == document[:, 1]).tolist() == [True, True, False]
    both = Windows(extent=(2, 4), window=(2, 2), shift=(1, 1)).layout(1).document
    assert both is not None
    assert [len(row.unique()) for row in both] == [2, 4]  # the last has cells of all four corners
    whole = Windows(extent=(1, 6), window=(1, 2)).layout(3)
    assert whole.document is None
    assert whole.valid is None
    filled = Windows(extent=(1, 5), window=(1, 2)).layout(1).valid
    assert filled is not None
    assert filled.tolist() == [[True, True], [True, True], [True, False]]


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize(("extent", "window"), SHAPES)
def test_windows_equal_documents_over_the_whole_image(
    name: str, extent: tuple[int, int], window: int
) -> None:
    """Windows folded into rows compute what one row with a document a window does."""
    torch.manual_seed(0)
    shape = StackConfig(dim=16, heads=2, activation="gelu", norm="layer", bias=True)
    options = {o: (window, window) for o in ("window", "size") if o in ENCODINGS[name].options()}
    encodings = posenc.create_layers(name, layers=2, dim=16, heads=2, max_length=8, **options)
    stage = SwinStage(shape, encodings=encodings, window=window).eval()
    for parameter in stage.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(2, extent[0] * extent[1], 16)
    image = Layout.image(*extent)
    expected = x
    for index, block in enumerate(stage.blocks):
        by = [window // 2 if index and side > window else 0 for side in extent]
        row = (image.positions[..., 0].long() + window - by[0]) // window
        column = (image.positions[..., 1].long() + window - by[1]) // window
        expected = block(expected, replace(image, document=row * 100 + column))
    close(stage(x, extent), expected)


@pytest.mark.parametrize("encoding", [*IMAGE_ENCODINGS, "learned2d+swin"])
def test_every_encoding_trains(encoding: str) -> None:
    model = make(encoding)
    model(images()).square().sum().backward()
    trained = [(n, p) for n, p in model.named_parameters() if p.numel()]
    assert [n for n, p in trained if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("encoding", ["swin", "swin_v2", "rope2d", "sine2d", "conv", "nope"])
def test_padded_equals_unpadded(encoding: str) -> None:
    model = make(encoding, size=(24, 24))
    draw_biases(model)
    large, small = images(1, 24, 18)[0], images(1, 16, 24)[0]
    batch, valid = pad_images([large, small], multiple=2)
    batch = batch.masked_fill(~valid.unsqueeze(1), float("nan"))
    logits = model(batch, valid=valid)
    close(logits[:1], model(large.unsqueeze(0)))
    close(logits[1:], model(small.unsqueeze(0)))


def test_other_sizes() -> None:
    assert make()(images(2, 22, 30)).isfinite().all()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="one per stage"):
        make(heads=(2,))
    with pytest.raises(ArgumentError, match="depths"):
        make(depths=(2, 0))
    with pytest.raises(ArgumentError, match="requires a causal mask"):
        make("forgetting")
