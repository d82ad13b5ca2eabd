"""Handwritten digits: trained at one size, then scaled, moved and padded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.errors import ArgumentError, DataError
from posenc.lab.experiments.recipe import Recipe
from posenc.lab.experiments.results import Corpus
from posenc.lab.experiments.tasks.common.task import (
    Defaults,
    Task,
    TaskEntry,
    TaskSettings,
    seen,
    times,
    training_loss,
)
from posenc.lab.reporting.judge import Metric
from posenc.lab.training.seeding import generator
from posenc.layout import Layout
from posenc.layout.transforms import fitted
from posenc.models import ImageConfig, VisionTransformer

SIDE, CLASSES, HELD_OUT = 8, 10, 450
"""Pixels a side and labels of the data, and images that are never trained on."""

ROWS = 150
"""LabelledImages tested at a time."""


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """``pixels`` ``[N, 1, 8, 8]`` from 0 (paper) to 2, and ``labels`` ``[N]``."""

    pixels: Float[Tensor, "N one Y X"]
    labels: Int[Tensor, " N"]


@dataclass(frozen=True, eq=False)
class View:
    """Test images as they are shown: ``pixels``, and which of them are no padding (None: all)."""

    pixels: Float[Tensor, "N one Y X"]
    valid: Bool[Tensor, "N Y X"] | None = None


class Digits(Task):
    """A small ViT that learns 8×8 images and is shown the held-out ones larger and elsewhere.

    Args:
        settings: of the comparison; lengths are pixels a side.

    Attributes:
        held_out: the images that are never trained on.

    Raises:
        ArgumentError: for a size that is no multiple of the patch.
        DataError: if scikit-learn, which has the images, is not installed.
    """

    axes = 2

    def __init__(self, settings: TaskSettings) -> None:
        options, side = settings.options, settings.train_length
        self._patch: int = options["patch"]
        self._special: int = options["special"]
        for size in settings.lengths:
            if size % max(self._patch, 1):
                raise ArgumentError(
                    "test_lengths",
                    expected=f"multiples of the patch ({self._patch})",
                    got=size,
                    remedy="Change the sizes or the option patch.",
                )
        self._train, self.held_out, digest = _load()
        count = len(self._train.labels)
        super().__init__(
            settings,
            title="Handwritten digits, learned at one size and shown larger and elsewhere",
            corpus=Corpus(
                name=f"scikit-learn's 8×8 digits, {count} to train on, {HELD_OUT} held out",
                sha256=digest,
                files=1,
                train_bytes=count * SIDE * SIDE,
                held_out_bytes=HELD_OUT * SIDE * SIDE,
                unit="pixels",
            ),
            metrics=_metrics(),
            decisive=(digest, side),
            also_decisive=(tuple(sorted(options.items())),),
            example_length=self._tokens(side),
        )
        run = partial(self._score, images=self._train, metric="scaled", side=side)
        self.add_probe(("seen",), side, run)
        for metric, size in product(VIEWS, self.lengths):
            run = partial(self._score, images=self.held_out, metric=metric, side=size)
            self.add_probe((metric,), size, run, rows=ROWS, length=self._tokens(size))

    def make_model(self, recipe: Recipe) -> VisionTransformer:
        """A ``VisionTransformer``; tables end where the trained image ends."""
        options = self.settings.options
        config = ImageConfig(
            size=(self.settings.train_length, self.settings.train_length),
            patch=self._patch,
            overlap=options["overlap"],
            channels=1,
            dim=self.settings.width,
            layers=self.settings.layers,
            heads=self.settings.heads,
            encoding=recipe.encoding,
            options=recipe.options,
            classes=CLASSES,
            special=self._special,
            dropout=options["dropout"],
        )
        return VisionTransformer(config)

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``images`` ``[batch, 1, Y, X]`` and ``labels`` ``[batch]``."""
        source = generator(seed, step)
        rows = torch.randint(len(self._train.labels), (self.settings.batch,), generator=source)
        pixels = _scaled(self._train.pixels[rows], self.settings.train_length)
        return {"images": pixels, "labels": self._train.labels[rows]}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy, in nats."""
        return F.cross_entropy(model(batch["images"]).float(), batch["labels"])

    @torch.inference_mode()
    def _score(
        self, model: nn.Module, images: LabelledImages, metric: str, side: int
    ) -> tuple[float]:
        """Share of images classified right in a view."""
        vision = cast(VisionTransformer, model)
        device = next(model.parameters()).device
        trained = self.settings.train_length
        view = VIEWS[metric](images.pixels[:HELD_OUT], side, trained, self._patch)
        layout: Layout | None = None
        if metric == "fitted":
            layout = vision.encoder.layout(side // self._patch, side // self._patch)
            if side != trained:
                layout = fitted(layout, cells=vision.config.cells)
        right = 0
        for begin in range(0, HELD_OUT, ROWS):
            rows = slice(begin, begin + ROWS)
            valid = None if view.valid is None else view.valid[rows].to(device)
            logits = vision(view.pixels[rows].to(device), layout, valid=valid)
            right += int((logits.argmax(1).cpu() == images.labels[rows]).sum().item())
        return (right / HELD_OUT,)

    def _tokens(self, side: int) -> int:
        cells = side // self._patch
        return self._special + cells * cells


def _metrics() -> tuple[Metric, ...]:
    views = [
        Metric(
            key=key,
            label=label,
            unit="share of images",
            axis="size (pixels a side)",
            lower_is_better=False,
            trivial=1 / CLASSES,
            description=f"Share of held-out digits classified right {description}",
            headline=key == "scaled",
            learned=0.9 if key == "scaled" else None,
        )
        for key, (label, description) in DESCRIPTIONS.items()
    ]
    return *views, training_loss("nats per image"), seen(views[0])


def _load() -> tuple[LabelledImages, LabelledImages, str]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "task",
            expected="the package scikit-learn, which has the images",
            got="none",
            remedy="Install posenc[lab].",
        ) from error
    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / SIDE
    labels = torch.tensor(data.target, dtype=torch.int64)
    digest = hashlib.sha256(data.images.tobytes() + data.target.tobytes()).hexdigest()
    order = torch.randperm(len(labels), generator=generator(0))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return (
        LabelledImages(pixels[train], labels[train]),
        LabelledImages(pixels[test], labels[test]),
        digest,
    )


def _scaled(pixels: Tensor, side: int) -> Tensor:
    """Images of ``side`` by ``side`` pixels, between neighbours where there are more."""
    if pixels.shape[-1] == side:
        return pixels
    return F.interpolate(pixels, size=(side, side), mode="bilinear", antialias=True)


def _shown_scaled(pixels: Tensor, side: int, trained: int, patch: int) -> View:
    return View(_scaled(pixels, side))


def _shown_moved(pixels: Tensor, side: int, trained: int, patch: int) -> View:
    """Images of the trained size at random places of larger empty ones, moved by whole patches."""
    return View(_on_sheet(pixels, side, trained, patch).pixels)


def _on_sheet(pixels: Tensor, side: int, trained: int, patch: int) -> View:
    """``_shown_moved`` with everything outside the image marked as padding."""
    images = _scaled(pixels, trained)
    sheet = images.new_zeros(len(images), 1, side, side)
    valid = torch.zeros(len(images), side, side, dtype=torch.bool)
    free = (side - trained) // patch + 1
    corners = patch * torch.randint(free, (len(images), 2), generator=generator(side))
    for row, (down, right) in enumerate(corners.tolist()):
        place = (slice(down, down + trained), slice(right, right + trained))
        sheet[row, 0, place[0], place[1]] = images[row, 0]
        valid[row, place[0], place[1]] = True
    return View(sheet, valid)


VIEWS: Mapping[str, Callable[[Tensor, int, int, int], View]] = {
    "scaled": _shown_scaled,
    "fitted": _shown_scaled,
    "moved": _shown_moved,
    "padded": _on_sheet,
}
"""View of the test images, by metric."""

DESCRIPTIONS = {
    "scaled": ("Digits scaled", "after scaling to this size, patches at their own cells."),
    "fitted": (
        "Digits scaled, positions fitted",
        "after scaling to this size, positions brought onto the cells of the trained one.",
    ),
    "moved": (
        "Digits moved",
        "at the trained size somewhere on a sheet of paper of this size, moved by whole patches.",
    ),
    "padded": (
        "Digits moved, the rest padding",
        "at the trained size somewhere in an image of this size of which the rest is padding: "
        "what knows offsets alone does not notice. RoPE does, by the class token, which is not "
        "turned.",
    ),
}


ENTRY = TaskEntry(
    make=Digits,
    summary="Classify handwritten digits, learned at one size and shown larger and elsewhere",
    data="8×8 images of handwritten digits (scikit-learn), a quarter held out",
    metric="share of images classified right: scaled, scaled with fitted positions, moved, padded",
    expectation="At the trained size every 2-D encoding classifies at least 95 %. So does nearly "
    "the control nope: overlapping patches fit together in one way only; with option overlap=0 it "
    "must fail. At other sizes absolute tables have no positions "
    "unless fitted, and lose (Dosovitskiy et al. 2020; Chu et al. 2021: DeiT falls from 72 to 66 "
    "between 224 and 512 pixels, CPVT does not); RoPE in two axes holds better (Heo et al. 2024). "
    "Biases by offset, and sines counted over real cells, classify a padded image wherever it is "
    "alike; so does RoPE where no class token stands still (option special=0).",
    sample={"test_lengths": (12,)},
    defaults=Defaults(
        encodings=(
            "learned2d",
            "row_column",
            "sine2d",
            "conv",
            "rope2d",
            "rope_mixed",
            "swin",
            "swin_v2",
            "irpe",
            "decomposed2d",
        ),
        references=("nope",),
        train_length=SIDE,
        test_lengths=times(1, 1.5, 2),
        steps=1200,
        learning_rate=3e-3,
    ),
    options={"patch": 2, "overlap": 1, "special": 1, "dropout": 0.1},
    axes=2,
    length_unit="pixels a side",
)
