"""Special tokens, which stand nowhere, are not rotated, and no vector is added to them."""

from __future__ import annotations

import pytest
import torch

from posenc import Grid, Layout, create
from posenc.registry import ENCODINGS
from posenc.testing.subject import HEAD_DIM, HEADS, Subject, fold

NAMES = (
    *(
        "axial_rope",
        "comrope",
        "fope",
        "grape_multiplicative",
        "lierope",
        "mrope",
        "p_rope",
        "pope",
        "rope",
    ),
    *("rope2d", "rope_mixed", "rope_pp"),
)


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_not_rotated(name: str) -> None:
    subject = Subject.of_entry(name, ENCODINGS[name])
    transform = subject.layer(dtype=torch.float32).encoding.query_key
    assert transform is not None
    special = torch.tensor([[True, False, False]])
    positions, order = torch.tensor([[[9.0], [13.0], [6.0]]]), torch.arange(3).unsqueeze(0)
    layout = fold(Layout(positions, order, special=special), subject.axes)
    nowhere = layout.with_positions(torch.zeros_like(layout.positions))
    x = torch.randn(1, HEADS, 3, HEAD_DIM)
    marked, unmarked, still = (
        transform(x, x, Grid.of(side, causal=True))
        for side in (layout, fold(Layout(positions, order), subject.axes), nowhere)
    )
    for rotated, others, unmoved in zip(marked, unmarked, still, strict=True):
        torch.testing.assert_close(rotated[:, :, :1], unmoved[:, :, :1])
        torch.testing.assert_close(rotated[:, :, 1:], others[:, :, 1:])
        assert not torch.allclose(rotated[:, :, 1:], unmoved[:, :, 1:])


@pytest.mark.parametrize("name", ["fourier@axes=2", "gaussian_fourier@axes=2", "sine2d"])
def test_special_tokens_pass_unchanged(name: str) -> None:
    encoding, x = create(name, dim=8), torch.randn(1, 7, 8)
    got = encoding.embed(x, Layout.image(2, 3, prefix=1))
    torch.testing.assert_close(got[:, :1], x[:, :1])
    torch.testing.assert_close(got[:, 1:], encoding.embed(x[:, 1:], Layout.image(2, 3)))
