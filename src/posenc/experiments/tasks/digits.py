"""Handwritten digits: trained at one size, then scaled, moved and padded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.errors import ArgumentError, DataError
from posenc.experiments.recipe import Recipe, describe
from posenc.experiments.results import Corpus, Measurement, Metric, Refusal
from posenc.experiments.tasks.common.task import (
    Defaults,
    Probe,
    TaskEntry,
    TaskSettings,
    probed,
    seen,
    times,
)
from posenc.layout import Layout
from posenc.models import ImageConfig, VisionTransformer
from posenc.training.memory_estimate import require_step, stack_bytes
from posenc.training.seeding import fingerprint, generator
from posenc.transforms import fitted

__all__ = ["ENTRY", "Digits"]

SIDE, CLASSES, HELD_OUT = 8, 10, 450
"""Pixels a side and labels of the data, and images that are never trained on."""

ROWS = 150
"""Images tested at a time."""


@dataclass(frozen=True, eq=False)
class Images:
    """``pixels`` ``[N, 1, 8, 8]`` from 0 (paper) to 2, and ``labels`` ``[N]``."""

    pixels: Float[Tensor, "N one Y X"]
    labels: Int[Tensor, " N"]


@dataclass(frozen=True, eq=False)
class View:
    """Test images as they are shown: ``pixels``, and which of them are no padding (None: all)."""

    pixels: Float[Tensor, "N one Y X"]
    valid: Bool[Tensor, "N Y X"] | None = None


class Digits:
    """A small ViT that learns 8×8 images and is shown the held-out ones larger and elsewhere.

    Args:
        settings: of the comparison; lengths are pixels a side.

    Raises:
        ArgumentError: on a size that is no multiple of the patch.
        DataError: when scikit-learn, which has the images, is not installed.
    """

    title = "Handwritten digits, learned at one size and shown larger and elsewhere"
    training_unit = 1.0

    def __init__(self, settings: TaskSettings) -> None:
        self._settings = settings
        self.lengths = settings.lengths
        self._patch: int = settings.options["patch"]
        self._overlap: int = settings.options["overlap"]
        for side in self.lengths:
            if side % max(self._patch, 1):
                raise ArgumentError(
                    "test_lengths",
                    expected=f"multiples of the patch ({self._patch})",
                    got=side,
                    remedy="Change the sizes or the option patch.",
                )
        self._train, self._test, digest = _load()
        count = len(self._train.labels)
        self.data = f"scikit-learn's 8×8 digits, {count} to train on, {HELD_OUT} held out"
        self.corpus = Corpus(
            name=self.data,
            files=1,
            train_bytes=count * SIDE * SIDE,
            held_out_bytes=HELD_OUT * SIDE * SIDE,
            sha256=digest,
            unit="pixels",
        )
        self.tokens_per_step = settings.batch * self._tokens(settings.train_length)
        self.fingerprint = fingerprint(
            digest,
            settings.train_length,
            settings.width,
            settings.layers,
            settings.heads,
            settings.batch,
            tuple(sorted(settings.options.items())),
        )
        self.metrics = self._metrics()
        self.subjects = describe(settings.variants, references=settings.references, axes=2)

    @property
    def held_out(self) -> Images:
        """The images that are never trained on."""
        return self._test

    def build(self, encoding: str) -> VisionTransformer:
        """A ``VisionTransformer``; tables end where the trained image ends."""
        recipe = Recipe.parse(encoding, axes=2)
        if recipe.positions != "plain":
            raise ArgumentError(
                "encoding",
                expected="positions at rows and columns",
                got=encoding,
                remedy="Positions are drawn at random in tasks of sequences only.",
            )
        settings = self._settings
        config = ImageConfig(
            size=(settings.train_length, settings.train_length),
            patch=self._patch,
            overlap=self._overlap,
            channels=1,
            dim=settings.width,
            layers=settings.layers,
            heads=settings.heads,
            encoding=recipe.encoding,
            options=recipe.options,
            classes=CLASSES,
            special=settings.options["special"],
            dropout=settings.options["dropout"],
        )
        return VisionTransformer(config)

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``images`` ``[batch, 1, Y, X]`` and ``labels`` ``[batch]``."""
        drawn = torch.randint(
            len(self._train.labels), (self._settings.batch,), generator=generator(seed, step)
        )
        pixels = _scaled(self._train.pixels[drawn], self._settings.train_length)
        return {"images": pixels, "labels": self._train.labels[drawn]}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy, in nats."""
        return F.cross_entropy(model(batch["images"]).float(), batch["labels"])

    def require_memory(self, model: nn.Module, available: int) -> None:
        """Refuse a training step that is estimated not to fit into ``available`` bytes."""
        rows, side = self._settings.batch, self._settings.train_length
        needed = self._bytes(model, rows, side, training=True)
        require_step(needed, available, rows=rows, length=self._tokens(side))

    def count(self, encoding: str) -> int:
        """One measurement a view and size, and one of images trained on."""
        return len(VIEWS) * len(self.lengths) + 1

    def measure(
        self, model: nn.Module, encoding: str, seed: int, *, available: int | None
    ) -> Iterator[list[Measurement | Refusal]]:
        """The share of images classified right, in every view at every size."""
        trained = self._settings.train_length
        known = Probe(
            metrics=("seen",),
            x=trained,
            run=lambda model: (self._score(model, self._train, "scaled", trained),),
        )
        yield from probed([known], model, subject=encoding, seed=seed, available=available)
        for metric in VIEWS:
            for side in self.lengths:
                probe = Probe(
                    metrics=(metric,),
                    x=side,
                    run=lambda model, metric=metric, side=side: (  # type: ignore[misc]
                        self._score(model, self._test, metric, side),
                    ),
                    needs=lambda model, side=side: self._bytes(  # type: ignore[misc]
                        model, ROWS, side, training=False
                    ),
                )
                try:
                    yield from probed(
                        [probe], model, subject=encoding, seed=seed, available=available
                    )
                except ArgumentError as error:  # of conv and sine2d, which take whole images
                    reason = f"it needs {error.expected}"
                    yield [Refusal(subject=encoding, metric=metric, x=side, reason=reason)]

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the model; ``VisionTransformer.load`` reads it."""
        cast(VisionTransformer, model).save(folder)

    @torch.inference_mode()
    def _score(self, model: nn.Module, images: Images, metric: str, side: int) -> float:
        vision = cast(VisionTransformer, model)
        device = next(model.parameters()).device
        pixels, trained = images.pixels[:HELD_OUT], self._settings.train_length
        view = VIEWS[metric](pixels, side, trained, self._patch)
        layout: Layout | None = None
        if metric == "fitted":
            cells = vision.encoder.layout(side // self._patch, side // self._patch)
            layout = cells
            if side != trained:
                layout = fitted(cells, cells=vision.config.cells)
        right = 0
        for begin in range(0, HELD_OUT, ROWS):
            rows = slice(begin, begin + ROWS)
            valid = None if view.valid is None else view.valid[rows].to(device)
            logits = vision(view.pixels[rows].to(device), layout, valid=valid)
            right += int((logits.argmax(1).cpu() == images.labels[rows]).sum().item())
        return right / HELD_OUT

    def _tokens(self, side: int) -> int:
        cells = side // self._patch
        return int(self._settings.options["special"]) + cells * cells

    def _bytes(self, model: nn.Module, rows: int, side: int, *, training: bool) -> int:
        return stack_bytes(
            cast(VisionTransformer, model).config,
            layers=self._settings.layers,
            vocabulary=0,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            rows=rows,
            length=self._tokens(side),
            training=training,
        )

    def _metrics(self) -> tuple[Metric, ...]:
        views = tuple(
            Metric(
                key=key,
                label=label,
                unit="share of images",
                axis="size (pixels a side)",
                lower_is_better=False,
                chance=1 / CLASSES,
                description=f"Share of held-out digits classified right {description}",
                headline=key == "scaled",
                log_x=False,
                learned=0.9 if key == "scaled" else None,
            )
            for key, (label, description) in DESCRIPTIONS.items()
        )
        loss = Metric(
            key="training_loss",
            label="Training loss",
            unit="nats per image",
            axis="training step",
            lower_is_better=True,
            chance=None,
            description="Mean over the steps since the point before.",
            headline=False,
            log_x=False,
        )
        return *views, loss, *(seen(view) for view in views if view.headline)


def _load() -> tuple[Images, Images, str]:
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
    return Images(pixels[train], labels[train]), Images(pixels[test], labels[test]), digest


def _scaled(pixels: Tensor, side: int) -> Tensor:
    """Images of ``side`` by ``side`` pixels, between neighbours where there are more."""
    if pixels.shape[-1] == side:
        return pixels
    return F.interpolate(pixels, size=(side, side), mode="bilinear", antialias=True)


def _shown_scaled(pixels: Tensor, side: int, trained: int, patch: int) -> View:
    return View(_scaled(pixels, side))


def _shown_moved(pixels: Tensor, side: int, trained: int, patch: int) -> View:
    """At the trained size, each somewhere on a sheet of paper, by whole patches."""
    return View(_on_sheet(pixels, side, trained, patch).pixels)


def _on_sheet(pixels: Tensor, side: int, trained: int, patch: int) -> View:
    """The same, of which all but the image itself is padding."""
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


def _make(settings: TaskSettings) -> Digits:
    return Digits(settings)


ENTRY = TaskEntry(
    make=_make,
    summary="Classify handwritten digits, learned at one size and shown larger and elsewhere",
    data="8×8 images of handwritten digits (scikit-learn), a quarter held out",
    metric="share of images classified right: scaled, scaled with fitted positions, moved, padded",
    expectation="At the trained size every 2-D encoding classifies at least 95 %. So does nearly "
    "the control nope: overlapping patches fit together in one way only; with option overlap=0 it "
    "must fail. At other sizes absolute tables have no positions "
    "unless fitted, and lose (Dosovitskiy et al. 2021; Chu et al. 2023: DeiT falls from 72 to 66 "
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
