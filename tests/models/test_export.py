"""Models exported with a dynamic batch, and their errors inside compiled graphs."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

import posenc
import posenc.errors
from posenc import Grid, Layout
from posenc.models import Decoder, DecoderConfig, ImageConfig, Swin, SwinConfig, VisionTransformer

IMAGE = {"size": (16, 16), "patch": 2, "channels": 1, "dim": 16, "classes": 3}


def make_decoder() -> tuple[nn.Module, Tensor]:
    config = DecoderConfig(vocabulary=11, dim=16, layers=2, heads=2, encoding="t5")
    return Decoder(config), torch.arange(12).view(2, 6) % 11


def make_vision() -> tuple[nn.Module, Tensor]:
    config = ImageConfig(**IMAGE, layers=2, heads=2, encoding="rope2d")
    return VisionTransformer(config), torch.rand(2, 1, 16, 16)


def make_swin() -> tuple[nn.Module, Tensor]:
    config = SwinConfig(**IMAGE, depths=(2, 2), heads=(1, 2), window=4)
    return Swin(config), torch.rand(2, 1, 16, 16)


@pytest.mark.parametrize(
    "make",
    [
        make_decoder,
        make_swin,  # shifts and merges patches; else as the other
        pytest.param(make_vision, marks=pytest.mark.exhaustive),
    ],
)
def test_an_exported_model_takes_any_batch(make: object) -> None:
    torch.manual_seed(0)
    model, x = make()  # type: ignore[operator]
    model.eval()
    sizes = {0: torch.export.Dim("batch")}
    if x.dim() == 2:
        sizes[1] = torch.export.Dim("length", min=2)
    program = torch.export.export(model, (x,), dynamic_shapes=(sizes,)).module()
    with torch.no_grad():
        for rows in (2, 5, 1):
            given = torch.cat([x, x, x])[:rows]
            given = given if x.dim() > 2 else given.repeat(1, 3)
            torch.testing.assert_close(program(given), model(given))


def test_a_compiled_graph_reports_the_whole_error() -> None:
    encoding = posenc.create("alibi", heads=4)

    @torch.compile(fullgraph=True, backend="eager")
    def run(q: Tensor, k: Tensor) -> Tensor:
        return posenc.attend(q, k, k, Grid.of(Layout.sequence(5), causal=True), encoding)

    with pytest.raises(Unsupported) as caught:
        run(torch.randn(1, 4, 5, 8), torch.randn(1, 3, 5, 8))
    told = "".join(traceback.format_exception(caught.value))
    assert "expected a number of heads that k's 3 divide, got 4" in told
    assert "Grouped-query heads need H_q to be a multiple of H_kv." in told


def test_without_fullgraph_the_error_itself_is_raised() -> None:
    encoding = posenc.create("learned", dim=8, max_length=4)

    @torch.compile(backend="eager")
    def run(x: Tensor) -> Tensor:
        return encoding.embed(x, Layout.sequence(9))

    with pytest.raises(posenc.errors.LengthError, match="range of the learned table"):
        run(torch.zeros(1, 9, 8))
