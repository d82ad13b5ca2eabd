"""The digits: what is shown, what is refused, and a model that learns them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from posenc.errors import ArgumentError
from posenc.lab.experiments.tasks import TASKS
from posenc.lab.experiments.tasks.digits import HELD_OUT, VIEWS, Digits
from posenc.models import VisionTransformer
from tests.lab.experiments.tasks import small
from tests.lab.experiments.tasks.small import measured
from tests.support.exhaustive import kept_in_suite

pytest.importorskip("sklearn", reason="scikit-learn has the images")


def make(**changes: Any) -> Digits:
    return small.make("digits", Path(), **{"layers": TASKS["digits"].defaults.layers, **changes})


def settled(task: Digits, encoding: str) -> VisionTransformer:
    """A model whose answers depend on everything, since its readout does not start at zero."""
    torch.manual_seed(0)
    model = task.build(encoding).eval().requires_grad_(requires_grad=False)
    model.head.weight.normal_()
    return model


def test_held_out_images_are_not_trained_on() -> None:
    task = make()
    assert task.batch(0, 0)["images"].shape == (8, 1, 8, 8)
    train = {image.numpy().tobytes() for image in task._train.pixels}
    test = [image.numpy().tobytes() for image in task.held_out.pixels]
    assert len(test) == HELD_OUT
    assert sum(image in train for image in test) == 0
    assert len(set(task.held_out.labels.tolist())) == 10


def test_moved_images_are_whole_and_on_the_grid() -> None:
    pixels = make().held_out.pixels
    for name, view in VIEWS.items():  # of the trained size: the image itself
        assert torch.equal(view(pixels, 8, 8, 2).pixels, pixels), name
    padded = VIEWS["padded"](pixels, 14, 8, 2)
    assert padded.valid.flatten(1).sum(1).eq(64).all()
    inside = padded.pixels[:, 0][padded.valid].view(-1, 1, 8, 8)
    assert torch.equal(inside, pixels)
    corner = padded.valid.flatten(1).long().argmax(1)
    places = {divmod(int(index), 14) for index in corner}
    assert places == {(y, x) for y in range(0, 8, 2) for x in range(0, 8, 2)}
    assert torch.equal(VIEWS["moved"](pixels, 14, 8, 2).pixels, padded.pixels)


@pytest.mark.parametrize("special", [0, 1])
@pytest.mark.parametrize("encoding", ["rope2d", "swin", "irpe", "decomposed2d", "swin_v2"])
def test_what_knows_offsets_alone_does_not_notice_padding(encoding: str, special: int) -> None:
    """A class token has no offset; RoPE does not turn it, and so sees where the others are."""
    task = make(options={"special": special})
    model = settled(task, encoding)
    for name, parameter in model.named_parameters():
        if ".query." in name or ".key." in name:
            parameter.mul_(4)  # attention that is far from even
    pixels = task.held_out.pixels[:20]
    view = VIEWS["padded"](pixels, 16, 8, 2)
    alike = torch.allclose(model(view.pixels, valid=view.valid), model(pixels), atol=1e-3)
    assert alike == (encoding != "rope2d" or special == 0)


def test_what_cannot_be_shown_is_refused_with_the_reason() -> None:
    task = make()
    table, whole = (measured(task, name, settled(task, name)) for name in ("learned2d", "conv"))
    for value in (table["scaled", 8], table["fitted", 16], whole["fitted", 8]):
        assert isinstance(value, float)
    for metric in ("scaled", "moved", "padded"):
        assert "0 to 3" in table[metric, 16]
    assert "whole image" in whole["fitted", 16]


@pytest.mark.parametrize("encoding", kept_in_suite(["learned2d", "swin"], ["swin"]))
def test_a_short_training_learns(encoding: str) -> None:
    task = make(width=32, batch=32)
    torch.manual_seed(1)
    model = task.build(encoding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(250):
        optimizer.zero_grad()
        task.loss(model, task.batch(0, step)).backward()
        optimizer.step()
    assert measured(task, encoding, model.eval())["scaled", 8] > 0.7


def test_models_are_saved(tmp_path: Path) -> None:
    task = make()
    model = settled(task, "rope2d")
    task.save(model, tmp_path / "model")
    images = task.held_out.pixels[:3]
    torch.testing.assert_close(VisionTransformer.load(tmp_path / "model")(images), model(images))


def test_every_default_encoding_is_made() -> None:
    task = make()
    for encoding in task.settings.trained:
        task.require_memory(task.build(encoding), 1 << 40)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ArgumentError, match="multiples of the patch"):
        make(test_lengths=(8, 11))
    with pytest.raises(ArgumentError, match="positions of 2 axes"):
        make(encodings=("alibi",))
