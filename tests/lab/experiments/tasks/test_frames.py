"""The videos: what is shown, how a copy of another frame is told, and time that is stretched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from posenc.attention import Attention
from posenc.errors import ArgumentError
from posenc.extension import extend
from posenc.lab.experiments.tasks.frames import METHODS, SIDE, Frames, repeated, stretched
from tests.lab.experiments.tasks import small


def make(**changes: Any) -> Frames:
    return small.make("frames", Path(), **{"train_length": 16, "test_lengths": (32,), **changes})


def test_whole_frames_are_hidden_and_move_smoothly() -> None:
    task = make()
    batch = task.batch(0, 0)
    values, hidden = (batch[key].view(8, 16, SIDE**2) for key in ("values", "hidden"))
    assert (hidden.all(2) == hidden.any(2)).all()
    assert 0.3 < float(hidden.float().mean()) < 0.7
    assert values.min() > 0
    assert values.max() <= 1
    assert values.diff(dim=1).abs().max() < 0.5 < values.max()
    other = task.batch(0, 1)["values"]
    assert not torch.equal(values.flatten(1), other)


def test_a_copy_is_told_from_a_right_frame_and_from_another_lag() -> None:
    cells = torch.randn(4, 200, 3, dtype=torch.float64)
    hidden = torch.rand(4, 200, 1).expand(4, 200, 3) < 0.5
    assert repeated(torch.zeros_like(cells), cells, hidden, 7) == 0
    copied = cells.clone()
    copied[:, 7:] = cells[:, :-7]
    errors = copied - cells
    behind = 193 / (193 + 193)  # frames with one behind them, of those with one on either side
    noise = {"abs": 0.08}
    assert repeated(errors, cells, hidden, 7) == pytest.approx(behind + 0.5 * (1 - behind), **noise)
    assert repeated(errors, cells, hidden, 50) == pytest.approx(0.5, **noise)
    two = cells[:, :14].repeat(1, 2, 1)  # a video of period 14, of which the second half is asked
    two[:, 14:] += torch.randn(4, 14, 3, dtype=torch.float64)
    asked = torch.zeros(4, 28, 3, dtype=torch.bool)
    asked[:, 14:] = True
    copy = torch.cat([two[:, :14], two[:, :14]], dim=1) - two
    assert repeated(copy, two, asked, 14) == pytest.approx(1.0)
    assert repeated(copy / 4, two, asked, 14) == pytest.approx(0.25)


def test_the_period_is_of_the_pair_that_riflex_slows() -> None:
    task = make(width=32)
    assert task.pairs == (4, 2, 2)
    assert task.period == 20
    model = small.frozen(task, "axial_rope")
    longer = stretched(model, "riflex", factor=2.0, length=16)
    layers = [m for m in longer.modules() if isinstance(m, Attention)]
    for layer in layers:
        slowed = layer.encoding.query_key.divisors  # type: ignore[union-attr]
        assert [t for t, divisor in enumerate(slowed) if divisor != 1] == [1]
    assert len(layers) == 1
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), longer.parameters(), strict=True)
    )


@pytest.mark.parametrize("method", METHODS)
def test_time_alone_is_stretched(method: str) -> None:
    """Numbers change but for the direct ones, and are those of the encoding stretched by hand."""
    task = make(width=32)
    model = small.frozen(task, "axial_rope")
    torch.nn.init.normal_(model.output.weight)
    before = task._score(model, 32, "direct")
    got = task._score(model, 32, method)
    assert (got == before) == (method == "direct")
    if method in ("interpolate", "ntk"):
        (layer,) = (m for m in model.modules() if isinstance(m, Attention))
        layer.encoding = extend(layer.encoding, "on_axis", method=method, factor=2, axis=0)
        assert task._score(model, 32, "direct") == pytest.approx(got)


def test_who_has_no_axes_is_measured_as_it_is_alone() -> None:
    task = make()
    found = small.measured(task, "nope")
    assert isinstance(found["direct", 32], float)
    assert isinstance(found["riflex", 32], str)
    with pytest.raises(ArgumentError):
        stretched(small.frozen(task, "nope"), "ntk", factor=2.0, length=16)
