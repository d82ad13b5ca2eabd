"""UltraViCo, by loops from the formula of its authors' kernels."""

from __future__ import annotations

import pytest
import torch

from posenc import Encoding, Grid, Layout, attend, create
from posenc.encodings.query_key.axial_rope import PRESETS
from posenc.errors import ArgumentError
from posenc.extension import NotApplicable, extend

FRAMES, HEIGHT, WIDTH, DIM = 9, 2, 2, 16


def by_loops(plain: Encoding, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Half of 5 frames, 0.8 beyond, 0.3 at 4 ± 0.5 and 8 ± 0.5; negative logits as they are."""
    rotation = plain.query_key
    assert rotation is not None
    layout = Layout.cells(FRAMES, HEIGHT, WIDTH)
    q, k = rotation(q, k, Grid.of(layout))
    frames = [t for t in range(FRAMES) for _ in range(HEIGHT * WIDTH)]
    output = torch.empty_like(v)
    for head in range(q.shape[1]):
        for i in range(len(frames)):
            logits = []
            for j in range(len(frames)):
                logit = float(q[0, head, i] @ k[0, head, j]) * DIM**-0.5
                frames_apart = abs(frames[i] - frames[j])
                if logit > 0 and frames_apart in (4, 8):
                    logit *= 0.3
                elif logit > 0 and frames_apart > 2.5:
                    logit *= 0.8
                logits.append(logit)
            weights = torch.tensor(logits, dtype=v.dtype).softmax(0)
            output[0, head, i] = weights @ v[0, head]
    return output


def test_equals_loops() -> None:
    q, k, v = torch.randn(3, 1, 2, FRAMES * HEIGHT * WIDTH, DIM, dtype=torch.float64).unbind()
    plain = create("axial_rope", head_dim=DIM, pairs=(4, 2, 2), base=100.0)
    longer = extend(plain, "ultravico", length=5, alpha=0.8, beta=0.3, period=4, width=0.5)
    layout = Layout.cells(FRAMES, HEIGHT, WIDTH)
    got = attend(q, k, v, Grid.of(layout), longer)
    torch.testing.assert_close(got, by_loops(plain, q, k, v), rtol=1e-12, atol=1e-12)


def test_factors_of_the_authors_kernels() -> None:
    """HunyuanVideo: half of 33 frames, and four around each multiple of 50; Wan: half of 21."""
    hunyuan = create("axial_rope", head_dim=128, **PRESETS["hunyuan_video"])
    score = extend(hunyuan, "ultravico", length=33, period=50).score
    distance = torch.arange(220.0)
    expected = [
        0.6 if t >= 46 and min(t % 50, 50 - t % 50) <= 4 else 0.9 if t > 16.5 else 1.0
        for t in range(220)
    ]
    assert score.factor(distance).tolist() == pytest.approx(expected)  # type: ignore[union-attr]
    wan = extend(create("axial_rope", head_dim=128), "ultravico", length=21).score
    factors = wan.factor(torch.arange(20.0)).tolist()  # type: ignore[union-attr]
    assert factors == pytest.approx([1.0] * 11 + [0.9] * 9)


def test_special_tokens_are_as_they_were() -> None:
    """Text is no frame: attention to it alone stays, at any distance."""
    longer = extend(create("rope", head_dim=8), "ultravico", length=4, alpha=0.0)
    q = torch.ones(1, 1, 31, 8)
    grid = Grid.of(Layout.sequence(30, prefix=1))
    scores = longer.score(q, q, grid, scale=1.0)[0, 0]  # type: ignore[misc]
    assert (scores[0] == 0).all()
    assert (scores[:, 0] == 0).all()
    assert scores[1].tolist() == [0.0] * 4 + [-8.0] * 27


def test_what_does_not_fit_is_named() -> None:
    for encoding in (create("alibi", heads=2), create("rope", head_dim=8) + create("t5", heads=2)):
        with pytest.raises(NotApplicable):
            extend(encoding, "ultravico", length=8)
    longer = extend(create("rope", head_dim=8), "ultravico", length=8, axis=1)
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ArgumentError) as refused:
        attend(q, q, q, Grid.of(Layout.sequence(5)), longer)
    assert refused.value.argument == "axis"
