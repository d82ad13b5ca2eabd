"""The digits: what is shown, what is refused, and a model that learns them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from posenc.errors import ArgumentError
from posenc.lab.experiments.results import Measurement, RefusedMeasurement
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.tasks import TASKS
from posenc.lab.experiments.tasks.digits import HELD_OUT, VIEWS, Digits
from posenc.models import VisionTransformer
from tests.support.exhaustive import kept_in_suite

pytest.importorskip("sklearn", reason="scikit-learn has the images")


def make(tmp_path: Path, **changes: object) -> Digits:
    fields = {"out": tmp_path, "task": "digits", "width": 16, "heads": 2, "batch": 8}
    return Digits(ComparisonSettings(**(fields | changes)))  # type: ignore[arg-type]


def measured(
    task: Digits, encoding: str, model: torch.nn.Module
) -> dict[tuple[str, float], Measurement | RefusedMeasurement]:
    items: Sequence[Sequence[Measurement | RefusedMeasurement]] = list(
        task.measure(model, encoding, 0, available=None)
    )
    assert len(items) == task.count(encoding)
    return {(item.metric, item.x): item for (item,) in items}


def settled(task: Digits, encoding: str) -> VisionTransformer:
    """A model whose answers depend on everything, since its readout does not start at zero."""
    torch.manual_seed(0)
    model = task.build(encoding).eval().requires_grad_(requires_grad=False)
    model.head.weight.normal_()
    return model


def test_batches_are_a_function_of_seed_and_step(tmp_path: Path) -> None:
    first, again, other = make(tmp_path), make(tmp_path), make(tmp_path)
    assert torch.equal(first.batch(1, 2)["images"], again.batch(1, 2)["images"])
    assert not torch.equal(first.batch(1, 2)["images"], other.batch(1, 3)["images"])
    assert first.batch(0, 0)["images"].shape == (8, 1, 8, 8)


def test_held_out_images_are_not_trained_on(tmp_path: Path) -> None:
    task = make(tmp_path)
    train = {image.numpy().tobytes() for image in task._train.pixels}
    test = [image.numpy().tobytes() for image in task.held_out.pixels]
    assert len(test) == HELD_OUT
    assert sum(image in train for image in test) == 0
    assert len(set(task.held_out.labels.tolist())) == 10


def test_views_of_the_trained_size_are_the_image_itself(tmp_path: Path) -> None:
    pixels = make(tmp_path).held_out.pixels
    for name, view in VIEWS.items():
        assert torch.equal(view(pixels, 8, 8, 2).pixels, pixels), name


def test_moved_images_are_whole_and_on_the_grid(tmp_path: Path) -> None:
    pixels = make(tmp_path).held_out.pixels
    view = VIEWS["padded"](pixels, 14, 8, 2)
    assert view.valid is not None
    assert view.valid.flatten(1).sum(1).eq(64).all()
    inside = view.pixels[:, 0][view.valid].view(-1, 1, 8, 8)
    assert torch.equal(inside, pixels)
    corner = view.valid.flatten(1).long().argmax(1)
    places = {divmod(int(index), 14) for index in corner}
    assert places == {(y, x) for y in range(0, 8, 2) for x in range(0, 8, 2)}
    assert torch.equal(VIEWS["moved"](pixels, 14, 8, 2).pixels, view.pixels)


@pytest.mark.parametrize("special", [0, 1])
@pytest.mark.parametrize("encoding", ["rope2d", "swin", "irpe", "decomposed2d", "swin_v2"])
def test_what_knows_offsets_alone_does_not_notice_padding(
    tmp_path: Path, encoding: str, special: int
) -> None:
    """A class token has no offset; RoPE does not turn it, and so sees where the others are."""
    task = make(tmp_path, options={"special": special})
    model = settled(task, encoding)
    for name, parameter in model.named_parameters():
        if ".query." in name or ".key." in name:
            parameter.mul_(4)  # attention that is far from even
    pixels = task.held_out.pixels[:20]
    view = VIEWS["padded"](pixels, 16, 8, 2)
    alike = torch.allclose(model(view.pixels, valid=view.valid), model(pixels), atol=1e-3)
    assert alike == (encoding != "rope2d" or special == 0)


def test_what_cannot_be_shown_is_refused_with_the_reason(tmp_path: Path) -> None:
    task = make(tmp_path)
    table = measured(task, "learned2d", settled(task, "learned2d"))
    assert isinstance(table["scaled", 8], Measurement)
    assert isinstance(table["fitted", 16], Measurement)
    for metric in ("scaled", "moved", "padded"):
        refusal = table[metric, 16]
        assert isinstance(refusal, RefusedMeasurement)
        assert "0 to 3" in refusal.reason
    whole = measured(task, "conv", settled(task, "conv"))
    assert isinstance(whole["fitted", 8], Measurement)
    assert "whole image" in getattr(whole["fitted", 16], "reason", "")


@pytest.mark.parametrize("encoding", kept_in_suite(["learned2d", "swin"], ["swin"]))
def test_a_short_training_learns(tmp_path: Path, encoding: str) -> None:
    task = make(tmp_path, width=32, batch=32)
    torch.manual_seed(1)
    model = task.build(encoding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(250):
        optimizer.zero_grad()
        task.loss(model, task.batch(0, step)).backward()
        optimizer.step()
    found = measured(task, encoding, model.eval())["scaled", 8]
    assert isinstance(found, Measurement)
    assert found.value > 0.7


def test_models_are_saved(tmp_path: Path) -> None:
    task = make(tmp_path)
    model = settled(task, "rope2d")
    task.save(model, tmp_path / "model")
    images = task.held_out.pixels[:3]
    loaded = VisionTransformer.load(tmp_path / "model")
    state = loaded.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    torch.testing.assert_close(loaded(images), model(images))


def test_every_default_encoding_is_made(tmp_path: Path) -> None:
    task = make(tmp_path)
    defaults = TASKS["digits"].defaults
    for encoding in (*defaults.encodings, *defaults.references):
        task.require_memory(task.build(encoding), 1 << 40)
    with pytest.raises(ArgumentError, match="batch"):
        task.require_memory(task.build("nope"), 1000)


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="multiples of the patch"):
        make(tmp_path, test_lengths=(8, 11))
    with pytest.raises(ArgumentError, match="positions of 2 axes"):
        make(tmp_path, encodings=("alibi",))
    with pytest.raises(ArgumentError, match="plain positions"):
        make(tmp_path).build("rope2d@randomized")
    with pytest.raises(ArgumentError, match="requires a causal mask"):
        make(tmp_path).build("forgetting")
