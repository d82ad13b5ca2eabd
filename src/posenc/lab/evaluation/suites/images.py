"""Measurements of a model of images: classes and features by size, time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from posenc.errors import ArgumentError
from posenc.lab.evaluation.images import Images, ImageSource, Size
from posenc.lab.evaluation.results import StudyReading
from posenc.lab.evaluation.suites.next_token import BUDGET, cost, rounded, words
from posenc.transformers.live import LiveImages

TOKENS_A_CALL = 4096

FEWEST, MOST = 64, 1024
"""Number of images, if available."""


class BySize(nn.Module):
    """A model of images with a position table for each size; all else is shared.

    Args:
        models: by (height, width) in pixels, the requested size last.
    """

    def __init__(self, models: Mapping[Size, LiveImages]) -> None:
        super().__init__()
        self._sizes = list(models)
        self.models = nn.ModuleList(models.values())

    @property
    def goal(self) -> LiveImages:
        """The model for the requested size."""
        return cast(LiveImages, self.models[-1])

    @property
    def served(self) -> str:
        """See ``LiveModel``."""
        return self.goal.served

    def at(self, size: Size) -> LiveImages:
        """The model for images of one size."""
        return cast(LiveImages, self.models[self._sizes.index(size)])

    def forward(self, images: Float[Tensor, "B P Y X"]) -> Any:
        """The output of the model for this size."""
        return self.at((images.shape[-2], images.shape[-1]))(images)


@dataclass(frozen=True, eq=False)
class ImageSuite:
    """Measurements of models of images on the same images at several sizes.

    Args:
        images: at all sizes.
        sizes: longer side in pixels → (height, width), the trained one first.
        original: the model compared with, shown the images at the first size.
    """

    images: Images
    sizes: Mapping[int, Size]
    original: LiveImages

    @classmethod
    def of(cls, model: LiveImages, source: ImageSource, cells: Sequence[Size]) -> ImageSuite:
        """The suite of a model, with the default number of images.

        Args:
            model: as trained.
            source: of the images.
            cells: sizes in cells, the trained one first.

        Raises:
            ArgumentError: if two sizes have the same longer side, or there is no path.
            DataError: if images cannot be read.
        """
        patch = model.patch
        pixels = [(patch * height, patch * width) for height, width in cells]
        sizes = {max(size): size for size in pixels}
        if len(sizes) < len(pixels):
            raise ArgumentError(
                "method",
                expected="sizes of images whose longer sides differ",
                got=", ".join(f"{height}×{width}" for height, width in pixels),
                remedy="Give another size.",
            )
        most = images_for(max(height * width for height, width in cells))
        return cls(source.read(pixels, channels=model.channels, most=most), sizes, model)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The sizes' longer sides."""
        return tuple(self.sizes)

    def measure(self, model: nn.Module, *, limit: int | None = None) -> StudyReading:
        """See ``Suite``; images are scaled to ``limit``."""
        features, classes = self._outputs(self.original, self.lengths[0])
        values: dict[str, dict[int, Tensor]] = {"right": {}, "agreement": {}, "cosine": {}}
        for length in self.lengths:
            outputs, named = self._outputs(model, limit or length)
            values["cosine"][length] = cosine_similarity(outputs, features)
            if named is not None and classes is not None:
                values["agreement"][length] = (named == classes).float()
                if self.images.labels is not None:
                    values["right"][length] = (named == self.images.labels).float()
        last = limit or self.lengths[-1]
        batch = self._batch(last)
        spent = cost(model, self.images.pixels[self.sizes[last]][:batch], count=batch)
        means: dict[str, Any] = {
            key: {length: float(value.mean()) for length, value in by_size.items()}
            for key, by_size in values.items()
        }
        pieces = {
            key: {length: rounded(value) for length, value in by_size.items()}
            for key, by_size in values.items()
            if by_size
        }
        return StudyReading(**means, **spent._asdict(), pieces=pieces)

    def facts(self, unit: str) -> dict[str, Any]:
        """See ``Suite``."""
        called = {length: self._called(length) for length in self.lengths}
        keys = ["cosine"]
        if self.original.classes is not None:
            keys = [*(["right"] if self.images.labels is not None else []), "agreement", "cosine"]
        named = words(
            "images",
            deciding="accuracy" if keys[0] == "right" else keys[0],
            unit=unit,
            goal=called[self.lengths[-1]],
            first=called[self.lengths[0]],
            count=len(self.images.pixels[self.sizes[self.lengths[0]]]),
        )
        trivial: dict[str, Any] = {}
        if keys[0] == "right":
            classes = self.original.classes or 1  # there are some
            trivial = {"trivial": 1 / classes, "trivial_rule": f"a guess among {classes} classes"}
        return trivial | {
            "guide": named["guide"],
            "metrics": tuple(metric for metric in named["metrics"] if metric.key in keys),
            "labels": {length: name for length, name in called.items() if name != str(length)},
            "sample": "images",
            "counted": "images",
        }

    def _called(self, length: int) -> str:
        height, width = self.sizes[length]
        return str(length) if height == width else f"{height}×{width}"

    def _batch(self, length: int) -> int:
        height, width = self.sizes[length]
        patch = self.original.patch
        pixels = self.images.pixels[self.sizes[length]]
        return max(1, min(len(pixels), TOKENS_A_CALL * patch * patch // (height * width)))

    @torch.inference_mode()
    def _outputs(self, model: nn.Module, length: int) -> tuple[Tensor, Tensor | None]:
        """Features ``[N, C]`` and classes ``[N]`` of the images at one size."""
        size = self.sizes[length]
        device = next(model.parameters()).device
        features, classes = [], []
        for images in torch.split(self.images.pixels[size], self._batch(length)):
            pooled, logits = model(images.to(device))
            features.append(pooled.float().cpu())
            if logits is not None:
                classes.append(logits.argmax(-1).cpu())
        return torch.cat(features), torch.cat(classes) if classes else None


def sides(trained: Size, goal: Size) -> list[Size]:
    """The sizes to measure in cells: the trained one, its doubles or one between, the goal."""
    between = []
    for factor in (2, 4, 8):
        doubled = (factor * trained[0], factor * trained[1])
        if max(doubled) < max(goal) and doubled[0] * goal[1] == doubled[1] * goal[0]:
            between.append(doubled)
    if not between:
        halfway = (round((trained[0] + goal[0]) / 2), round((trained[1] + goal[1]) / 2))
        between = [halfway] if max(trained) < max(halfway) < max(goal) else []
    return [trained, *between, goal]


def cells_of(model: LiveImages, lengths: Sequence[int] | None) -> list[Size]:
    """The trained size in cells, and sizes by their longer sides in pixels.

    Raises:
        ArgumentError: for a side that is not a multiple of the patch.
    """
    height, width = model.cells
    patch, side = model.patch, max(height, width)
    if lengths is None:
        return sides((height, width), (2 * height, 2 * width))
    cells = [(height, width)]
    for length in sorted(set(lengths) - {patch * side}):
        if length % patch:
            raise ArgumentError(
                "lengths",
                expected=f"sides in pixels, multiples of the patch ({patch})",
                got=length,
                remedy=f"Try {max(patch, round(length / patch) * patch)}.",
            )
        factor = length / patch / side
        cells.append((max(1, round(factor * height)), max(1, round(factor * width))))
    return cells


def images_for(cells: int) -> int:
    """Number of images to measure, of so many cells each."""
    return min(MOST, max(FEWEST, 2 * BUDGET // cells))
