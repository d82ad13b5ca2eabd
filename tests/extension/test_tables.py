"""Learned tables, images, windows and digits at a new size."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import ViTConfig
from transformers.models.vit.modeling_vit import ViTEmbeddings

from posenc import Encoding, Grid, Layout, create
from posenc.encodings.embedding.learned import Learned
from posenc.encodings.embedding.learned2d import Learned2d
from posenc.encodings.embedding.radix import Radix
from posenc.encodings.score.swin import Swin
from posenc.errors import ArgumentError, LengthError, UnknownNameError
from posenc.extension import NotApplicable, extend


def learned(rows: int = 10, **options: Any) -> Encoding:
    torch.manual_seed(1)
    return spread(create("learned", dim=6, max_length=rows, **options))


def spread(encoding: Encoding) -> Encoding:
    """The encoding with rows that differ."""
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(torch.randn(parameter.shape))
    return encoding


def table(encoding: Encoding) -> Tensor:
    part = encoding.embedding
    assert isinstance(part, Learned)
    return part.table.detach()


def vectors(encoding: Encoding, layout: Layout, dim: int = 6) -> Tensor:
    return encoding.embed(torch.zeros(1, layout.length, dim), layout).detach()[0]


@pytest.mark.parametrize("method", ["interpolate", "hierarchical", "random_tail"])
@pytest.mark.parametrize("prefix", [0, 2])
def test_factor_one_keeps_the_table(method: str, prefix: int) -> None:
    encoding = learned()
    same = table(extend(encoding, method, factor=1, prefix=prefix))
    torch.testing.assert_close(same, table(encoding))


@pytest.mark.parametrize("method", ["interpolate", "hierarchical", "random_tail"])
def test_prefix_rows_stay_and_the_original_too(method: str) -> None:
    encoding = learned()
    before = table(encoding).clone()
    longer = extend(encoding, method, factor=3, prefix=2)
    assert len(table(longer)) == 2 + 3 * 8
    assert torch.equal(table(longer)[:2], before[:2])
    assert not torch.allclose(table(longer)[5:10], before[5:10]) or method != "interpolate"
    longer.embedding.table.data.zero_()  # type: ignore[union-attr, operator]
    assert torch.equal(table(encoding), before)


@pytest.mark.parametrize("align", ["corners", "centers"])
def test_linear_interpolation_in_loops(align: str) -> None:
    encoding = learned(rows=5)
    trained = table(encoding)
    longer = table(extend(encoding, "interpolate", factor=2.4, align=align))
    assert len(longer) == 12
    for row in range(12):
        at = row * 4 / 11 if align == "corners" else (row + 0.5) * 5 / 12 - 0.5
        at = min(max(at, 0.0), 4.0)
        low = min(int(at), 3)
        expected = (1 - at + low) * trained[low] + (at - low) * trained[low + 1]
        torch.testing.assert_close(longer[row], expected, rtol=1e-5, atol=1e-5)


def test_a_longer_table_serves_longer_texts() -> None:
    encoding = learned()
    with pytest.raises(LengthError, match="interpolate, hierarchical"):
        vectors(encoding, Layout.sequence(11))
    assert vectors(extend(encoding, "interpolate", factor=4), Layout.sequence(40)).shape[0] == 40


@pytest.mark.parametrize("method", ["hierarchical", "random_tail"])
def test_trained_positions_stay_exactly(method: str) -> None:
    encoding = learned()
    assert torch.equal(table(extend(encoding, method, factor=3))[:10], table(encoding))


def test_hierarchical_in_loops() -> None:
    encoding = learned(rows=4)
    trained = table(encoding)
    longer = table(extend(encoding, "hierarchical", factor=4, alpha=0.3))
    base = [(row - 0.3 * trained[0]) / 0.7 for row in trained]
    for place in range(16):
        expected = 0.3 * base[place // 4] + 0.7 * base[place % 4]
        torch.testing.assert_close(longer[place], expected, rtol=1e-5, atol=1e-5)


def test_hierarchical_ends_at_the_square() -> None:
    with pytest.raises(ArgumentError, match="n rows make n²"):
        extend(learned(rows=4), "hierarchical", factor=5)


@pytest.mark.parametrize("prefix", [0, 2])
def test_random_tail_has_the_trained_mean_and_spread(prefix: int) -> None:
    """Those of positions, however far from them other rows are."""
    encoding = learned(rows=500)
    part = cast(Learned, encoding.embedding)
    with torch.no_grad():
        part.table.mul_(torch.arange(1, 7)).add_(torch.arange(6) * 3)
        part.table[:prefix] = 1000
    tail = table(extend(encoding, "random_tail", factor=9, prefix=prefix))[500:]
    trained = part.table.detach()[prefix:]
    torch.testing.assert_close(tail.mean(0), trained.mean(0), rtol=0.0, atol=0.4)
    torch.testing.assert_close(tail.std(0), trained.std(0), rtol=0.1, atol=0.0)


def test_random_tail_is_drawn_by_its_seed_alone() -> None:
    encoding = learned()
    state = torch.get_rng_state()
    first = table(extend(encoding, "random_tail", factor=3, seed=5))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, table(extend(encoding, "random_tail", factor=3, seed=5)))
    assert not torch.equal(first, table(extend(encoding, "random_tail", factor=3, seed=6)))


@pytest.mark.parametrize("method", ["interpolate", "hierarchical", "random_tail"])
def test_dtype_and_training_stay(method: str) -> None:
    encoding = learned().bfloat16().eval()
    encoding.requires_grad_(False)
    longer = extend(encoding, method, factor=2)
    assert table(longer).dtype == torch.bfloat16
    assert not longer.training or not longer.embedding.training  # type: ignore[union-attr]
    assert not any(p.requires_grad for p in longer.parameters())


def test_multiplied_tables_stay_multiplied() -> None:
    encoding = create("learned", dim=6, max_length=10, fusion="multiply")
    assert cast(Learned, extend(encoding, "interpolate", factor=2).embedding).fusion == "multiply"


@pytest.mark.parametrize("name", ["sinusoidal", "radix"])
def test_positions_are_divided(name: str) -> None:
    options: dict[str, Any] = {"base": 4, "digits": 3} if name == "radix" else {}
    encoding = create(name, dim=6, **options)
    squeezed = extend(encoding, "interpolate", factor=4)
    expected = vectors(encoding, Layout.at(torch.arange(60) / 4.0))
    torch.testing.assert_close(vectors(squeezed, Layout.sequence(60)), expected)
    again = extend(squeezed, "interpolate", factor=2)
    torch.testing.assert_close(
        vectors(again, Layout.sequence(60)), vectors(encoding, Layout.at(torch.arange(60) / 8.0))
    )


def test_vit_reads_the_same_table() -> None:
    """transformers' ViT at another image size, class token kept."""
    config = ViTConfig(hidden_size=8, image_size=16, patch_size=4, num_attention_heads=2)
    theirs = ViTEmbeddings(config)
    torch.nn.init.normal_(theirs.position_embeddings)
    torch.nn.init.normal_(theirs.cls_token)
    encoding = create("learned2d", dim=8, size=(4, 4), special=1)
    part = cast(Learned2d, encoding.embedding)
    with torch.no_grad():
        part.special.copy_(theirs.position_embeddings[0, :1])
        part.table.copy_(theirs.position_embeddings[0, 1:].view(4, 4, 8))
    pixels = torch.randn(2, 3, 24, 32)
    expected = theirs(pixels, interpolate_pos_encoding=True)
    patches = theirs.patch_embeddings.projection(pixels).flatten(2).transpose(1, 2)
    tokens = torch.cat([theirs.cls_token.expand(2, -1, -1), patches], dim=1)
    resized = extend(encoding, "interpolate", size=(6, 8))
    got = resized.embed(tokens, Layout.image(6, 8, prefix=1))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_sizes_are_exact() -> None:
    """dino #8, dinov2 #378: a factor of the side rounds to a size one cell off."""
    encoding = create("learned2d", dim=4, size=(37, 37))
    for side in (1, 11, 38, 53):
        part = cast(Learned2d, extend(encoding, "interpolate", size=(side, 5)).embedding)
        assert part.table.shape[:2] == (side, 5)
    part = cast(Learned2d, extend(encoding, "interpolate", factor=16 / 37 * 4).embedding)
    assert part.table.shape[:2] == (64, 64)


def test_antialias_is_an_option() -> None:
    """timm smooths before it shrinks, transformers does not."""
    encoding = create("learned2d", dim=4, size=(12, 12))
    original = cast(Learned2d, encoding.embedding).table.detach().movedim(-1, 0)[None]
    for antialias in (False, True):
        part = extend(encoding, "interpolate", size=(5, 7), antialias=antialias).embedding
        expected = interpolate(original, size=(5, 7), mode="bicubic", antialias=antialias)
        torch.testing.assert_close(cast(Learned2d, part).table.detach(), expected[0].movedim(0, -1))


def test_bilinear_is_an_option() -> None:
    encoding = create("learned2d", dim=4, size=(3, 4))
    table = cast(Learned2d, encoding.embedding).table.detach()
    part = extend(encoding, "interpolate", size=(6, 4), mode="bilinear").embedding
    grown = cast(Learned2d, part).table.detach()
    torch.testing.assert_close(grown[0], table[0])
    torch.testing.assert_close(grown[1], 0.75 * table[0] + 0.25 * table[1])
    with pytest.raises(UnknownNameError, match="bilinear"):
        extend(encoding, "interpolate", size=(6, 4), mode="nearest")


def bicubic_by_loops(values: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """One axis, cells keeping their share, a = -3/4, edges repeated."""

    def weight(x: float) -> float:
        x = abs(x)
        if x < 1:
            return 1.25 * x**3 - 2.25 * x**2 + 1
        return -0.75 * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0

    out = np.zeros((size, *values.shape[1:]))
    for to in range(size):
        at = (to + 0.5) * len(values) / size - 0.5
        for near in range(int(np.floor(at)) - 1, int(np.floor(at)) + 3):
            out[to] += weight(at - near) * values[min(max(near, 0), len(values) - 1)]
    return out


def test_swin_in_loops() -> None:
    encoding = create("swin", heads=3, window=(3, 4))
    part = cast(Swin, encoding.score)
    with torch.no_grad():
        part.table.normal_()
    larger = extend(encoding, "interpolate", size=(5, 6))
    planes = part.table.detach().double().numpy().reshape(3, 5, 7).transpose(1, 2, 0)
    rows = bicubic_by_loops(planes, 9)
    expected = bicubic_by_loops(rows.transpose(1, 0, 2), 11).transpose(2, 1, 0).reshape(3, -1)
    resized = cast(Swin, larger.score)
    torch.testing.assert_close(
        resized.table.detach().double(), torch.tensor(expected), rtol=1e-4, atol=1e-5
    )
    q = torch.randn(1, 3, 30, 4)
    assert resized(q, q, Grid.of(Layout.image(5, 6)), scale=1.0).shape == (1, 3, 30, 30)


def radix(**options: Any) -> Encoding:
    torch.manual_seed(1)
    return spread(create("radix", dim=6, base=4, digits=2, **options))


def test_radix_base_in_loops() -> None:
    encoding = radix()
    tables = cast(Radix, encoding.embedding).tables.detach()
    larger = extend(encoding, "radix_base", factor=2)
    assert cast(Radix, larger.embedding).base == 6  # 6² ≥ 2 · 4²
    got = vectors(larger, Layout.sequence(36))
    for place in range(36):
        expected = torch.zeros(6)
        for t, digit in enumerate((place % 6, place // 6)):
            at = digit * 3 / 5
            low = min(int(at), 2)
            rows = tables[t]
            expected = expected + (1 - at + low) * rows[low] + (at - low) * rows[low + 1]
        torch.testing.assert_close(got[place], expected, rtol=1e-5, atol=1e-5)


def test_digits_side_by_side_stay_so() -> None:
    larger = extend(radix(join="concatenate"), "radix_base", factor=2)
    assert vectors(larger, Layout.sequence(30)).shape == (30, 6)


@pytest.mark.parametrize(
    ("encoding", "method", "options", "message"),
    [
        (learned, "interpolate", {"factor": 0.5}, "1 or more"),
        (learned, "interpolate", {}, "factor: expected how many"),
        (learned, "interpolate", {"factor": 2, "prefix": 10}, "prefix"),
        (learned, "random_tail", {"factor": 2, "prefix": -1}, "prefix"),
        (learned, "hierarchical", {"factor": 2, "alpha": 0.5}, "alpha"),
        (radix, "radix_base", {"factor": 2, "base": 5}, "base: expected 4 or more"),
        (radix, "radix_base", {"factor": 1, "base": 3}, "base: expected 4 or more"),
    ],
)
def test_bad_arguments(encoding: Any, method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        extend(encoding(), method, **options)


def test_bad_names() -> None:
    with pytest.raises(UnknownNameError, match="corners"):
        extend(learned(), "interpolate", factor=2, align="corner")
    with pytest.raises(ArgumentError, match="size"):
        extend(create("swin", heads=1), "interpolate", size=(0, 3))


@pytest.mark.parametrize("method", ["hierarchical", "random_tail", "radix_base"])
def test_other_encodings_are_refused(method: str) -> None:
    with pytest.raises(NotApplicable, match="got Alibi"):
        extend(create("alibi", heads=2), method, factor=2)
