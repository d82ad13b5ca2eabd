"""Models of images at larger sizes: what is read, what is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posenc.errors import ArgumentError, DataError
from posenc.lab.evaluation.candidates import Method, methods_for
from posenc.lab.evaluation.checkpoint import Checkpoint
from posenc.lab.evaluation.choosing import baselines
from posenc.lab.evaluation.evaluate import evaluate
from posenc.lab.evaluation.images import ImageSource, images_for, sides
from posenc.lab.evaluation.report import study_page, write_study
from posenc.lab.evaluation.results import Study
from posenc.lab.evaluation.settings import Tuning
from posenc.lab.evaluation.study import ExtensionResult, measure_extensions
from posenc.lab.evaluation.summary import answer
from posenc.transformers.live import LiveImages
from tests.support.tiny_models import build

SIDE, PATCH = 8, 4
TUNING = Tuning(steps=0)


def subject(classes: int | None = 3, size: tuple[int, int] = (SIDE, SIDE)) -> Checkpoint:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "initializer_range": 0.25, "num_channels": 1}
    name = "ViTModel" if classes is None else "ViTForImageClassification"
    model = build(name, sizes, image_size=size, patch_size=PATCH, num_labels=classes or 2)
    return Checkpoint("tiny", "vit", LiveImages(model.eval().requires_grad_(False)), max(size))


def arrays(folder: Path, **held: Any) -> ImageSource:
    rng = np.random.default_rng(0)
    images = {"images": rng.integers(0, 256, (20, 24, 24), dtype=np.uint8)}
    np.savez(folder / "images.npz", **(images | held))
    return ImageSource(folder / "images.npz")


def pictures(folder: Path) -> ImageSource:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for number in range(3):
            pixels = rng.integers(0, 256, (12, 20, 3), dtype=np.uint8)
            image.fromarray(pixels).save(folder / name / f"{number}.png")
    (folder / "notes.txt").write_text("no image")
    return ImageSource(folder, classes={"cat": 4, "dog": 2})


def test_files_are_read_at_every_size_with_the_classes_of_their_folders(tmp_path: Path) -> None:
    images = pictures(tmp_path).read([(8, 8), (12, 20)], channels=3, most=99)
    assert images.pixels[8, 8].shape == (6, 3, 8, 8)
    assert images.labels.tolist() == [4, 4, 4, 2, 2, 2]
    own = images.pixels[12, 20]
    assert own.amin() >= -1
    assert own.amax() <= 1
    assert own.mean().abs() < 0.2
    first = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    expected = torch.from_numpy(first).movedim(-1, 0) / 127.5 - 1
    torch.testing.assert_close(own[0], expected)
    grey = ImageSource(tmp_path).read([(8, 8)], channels=1, most=4)
    assert grey.pixels[8, 8].shape == (4, 1, 8, 8)
    assert grey.labels is None
    assert "classes are not known" in grey.name


def test_arrays_of_floating_numbers_are_taken_as_they_are(tmp_path: Path) -> None:
    given = torch.randn(5, 8, 8)
    source = arrays(tmp_path, images=given.numpy(), labels=np.arange(5))
    images = source.read([(8, 8), (16, 16)], channels=1, most=3)
    torch.testing.assert_close(images.pixels[8, 8][:, 0], given[[0, 1, 3]])
    assert images.labels.tolist() == [0, 1, 3]
    flat = arrays(tmp_path, images=np.full((2, 4, 4), 255, dtype=np.uint8))
    bright = replace(flat, mean=[0.25], std=[0.5]).read([(16, 16)], channels=3, most=9)
    torch.testing.assert_close(bright.pixels[16, 16], torch.full((2, 3, 16, 16), 1.5))


def require_refused(source: ImageSource, message: str) -> None:
    with pytest.raises((ArgumentError, DataError), match=message):
        source.read([(8, 8)], channels=1, most=9)


def test_folders_without_usable_images_are_named(tmp_path: Path) -> None:
    require_refused(ImageSource(None), "--images: expected images, which such a model is measured")
    require_refused(ImageSource(tmp_path / "no"), "nothing there")
    require_refused(ImageSource(tmp_path), "Their names end in")
    source, file = pictures(tmp_path), tmp_path / "dog/0.png"
    require_refused(ImageSource(file), "Give the folder")
    file.write_bytes(b"no image")
    require_refused(source, r"a readable image at .*dog/0\.png")
    (tmp_path / "a.npz").write_bytes(b"none")
    require_refused(ImageSource(tmp_path / "a.npz"), "numpy.savez")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("images", (3, 8), r"arrays of shapes \(3, 8\)"),
        ("labels", (2,), "labels"),
        ("images", (1, 8, 8), "at least 2"),
        ("images", (4, 8, 8, 3), "takes 1 channels"),
    ],
)
def test_unusable_arrays_are_named(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    require_refused(arrays(tmp_path, **{name: np.zeros(shape)}), message)


def test_sizes_double_or_have_one_between() -> None:
    assert sides((2, 2), (8, 8)) == [(2, 2), (4, 4), (8, 8)]
    assert sides((2, 2), (4, 4)) == [(2, 2), (3, 3), (4, 4)]
    assert sides((2, 2), (3, 5)) == [(2, 2), (2, 4), (3, 5)]
    assert sides((2, 2), (2, 2))[-1] == (2, 2)
    assert images_for(10_000_000) < images_for(200) <= images_for(4)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> ExtensionResult:
    source = arrays(tmp_path_factory.mktemp("images"), labels=np.arange(20) % 3)
    tiny = subject()
    methods = methods_for("all", tiny.model, length=SIDE)
    return measure_extensions(tiny, source, methods, factor=2, tuning=TUNING, always=True)


def test_every_way_of_resampling_is_measured_beside_the_original(outcome: ExtensionResult) -> None:
    study = outcome.study
    ways = ("", "@antialias=True", "@mode=bilinear", "@align=corners")
    keys = [each.key for each in study.findings]
    assert keys == ["scaled", *(f"interpolate{way}" for way in ways)]
    assert {each.served for each in study.findings} == {"", "table"}
    assert study.lengths == (8, 12, 16)
    assert [metric.key for metric in study.metrics] == ["right", "agreement", "cosine"]
    readings = {each.key: reading for each, reading in study.ranked()}
    scaled = readings["scaled"]
    assert len(set(scaled.right.values())) == 1
    assert set(scaled.agreement.values()) == {1.0}
    for key, reading in readings.items():
        assert reading.right[8] == scaled.right[8]
        assert reading.agreement[8] == 1
        assert reading.cosine[8] == pytest.approx(1, abs=1e-5)
        assert key == "scaled" or reading.cosine[16] < 0.9999
    assert len({reading.cosine[16] for reading in readings.values()}) == 5, "they differ"
    features, logits = outcome.model(torch.zeros(1, 1, 16, 16))
    assert features.shape == (1, 16)
    assert logits.shape == (1, 3)
    assert outcome.model.cells == (4, 4)


def test_what_is_said_of_it(outcome: ExtensionResult, tmp_path: Path) -> None:
    study = outcome.study
    assert "20 images of images.npz" in study.text
    assert study.at(16) == "16 pixels a side"
    assert "scaled to 8" in " ".join(answer(study))
    page = write_study(study, tmp_path / "report").read_text()
    for title in ("Classified right by size", "Classified as by the original", "Features beside"):
        assert title in page
    assert "images/s" in page
    assert "by depth and length" not in page
    assert "images_per_second" in (tmp_path / "report/measurements.csv").read_text()


def test_where_the_original_is_the_measure_it_is_no_rival(outcome: ExtensionResult) -> None:
    unlabelled = replace(outcome.study, metrics=outcome.study.metrics[1:])
    assert "scaled" in baselines(outcome.study)
    assert "scaled" not in baselines(unlabelled)
    assert subject(classes=None).model.classes is None


def test_other_shapes_and_features_alone(tmp_path: Path) -> None:
    source = arrays(tmp_path)

    def measure(*methods: str, size: tuple[int, int] = (SIDE, SIDE)) -> Study:
        parsed = [Method.parse(method) for method in methods]
        given = subject(None, size), source, parsed
        return measure_extensions(*given, factor=4, tuning=TUNING).study

    other = "interpolate@size=(3,5)"
    study = measure(other)
    assert [metric.key for metric in study.metrics] == ["cosine"]
    assert study.lengths == (8, 16, 20)
    assert study.labels == {16: "8×16", 20: "12×20"}
    assert study.factor == 2.5
    assert study.at(20) == "12×20 pixels"
    assert "12×20" in write_study(study, tmp_path / "report").read_text()
    with pytest.raises(ArgumentError, match="one size of images, got 3×5 cells, 8×8 cells"):
        measure(other, "interpolate")
    with pytest.raises(ArgumentError, match="a table of positions in an image, got log_n"):
        measure("log_n")
    with pytest.raises(ArgumentError, match="longer sides differ"):
        measure("interpolate@size=(2,3)", size=(12, 8))


def test_evaluate_shows_larger_images_by_an_interpolated_table(tmp_path: Path) -> None:
    source = arrays(tmp_path, labels=np.arange(20) % 3)
    study = evaluate(subject(), source)
    assert study.lengths == (8, 12, 16)
    assert "Its table is interpolated for larger images." in study_page(study).render()
    assert evaluate(subject(), source, lengths=[24]).lengths == (8, 24)
    with pytest.raises(ArgumentError, match=r"multiples of the patch \(4\)"):
        evaluate(subject(), source, lengths=[21])
