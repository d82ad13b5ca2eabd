"""Images at several sizes, preprocessed for a model, and measurements of it on them."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, interpolate

from posenc.errors import ArgumentError, CheckpointError, DataError
from posenc.lab.evaluation.results import StudyReading
from posenc.lab.evaluation.suites.next_token import BUDGET, cost, rounded, words
from posenc.storage import read_bytes
from posenc.transformers.checkpoints import SAVE_AGAIN, Fields, read_object
from posenc.transformers.live import LiveImages

Size = tuple[int, int]
"""(height, width) in pixels."""

FEWEST = 2
"""Least number of images."""

NUMBERS = 1 << 27
"""Largest number of pixel values in memory."""

MOST_BYTES, MOST_PIXELS = 1 << 30, 1 << 26
"""Limits of a file, and of an image in it."""

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
ARRAYS = (".npy", ".npz")


@dataclass(frozen=True, eq=False)
class Images:
    """Images, each at several sizes.

    Args:
        pixels: (height, width) → ``[N, P, height, width]``, normalised.
        labels: ``[N]`` class numbers, if known.
        name: description of the images.
        sha256: of their files.
    """

    pixels: Mapping[Size, Float[Tensor, "N P Y X"]]
    labels: Int[Tensor, " N"] | None
    name: str
    sha256: str


@dataclass(frozen=True)
class ImageSource:
    """Path of images, and their preprocessing for a model.

    Images are resized to the requested size regardless of aspect ratio, as transformers does for
    ViT, by bilinear interpolation with antialiasing.

    Args:
        path: a folder of image files, whose subfolders may be named as classes; or a file of NumPy
            arrays: ``.npy`` of images, or ``.npz`` of ``images`` and optionally ``labels``. Arrays
            are ``[N, Y, X]``, ``[N, Y, X, P]`` or ``[N, P, Y, X]``: integers from 0 to 255, or
            floats, which are not preprocessed.
        classes: name → number.
        scale: factor of integers.
        mean, std: of each channel, by which scaled images are normalised.
    """

    path: Path | None
    classes: Mapping[str, int] = field(default_factory=dict)
    scale: float = 1 / 255
    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.5,)

    @classmethod
    def of_checkpoint(cls, folder: Path, config: Fields, path: Path | None) -> ImageSource:
        """Preprocessing by a checkpoint's ``preprocessor_config.json``; by default that of ViT.

        Args:
            folder: of the checkpoint.
            config: its ``config.json``, which names the classes.
            path: of the images.

        Raises:
            CheckpointError: if a field of either file is not usable.
        """
        labels = config.values.get("label2id") or {}
        if not isinstance(labels, dict) or {type(number) for number in labels.values()} - {int}:
            raise CheckpointError(
                f"label2id in {config.path}",
                expected="numbers of classes by their names",
                got=str(labels)[:80],
                remedy=SAVE_AGAIN,
            )
        file = folder / "preprocessor_config.json"
        fields = Fields({"do_rescale": True, "do_normalize": True} | read_object(file), file)
        normalised = fields.flag("do_normalize")
        mean, std = (
            fields.numbers(name) if normalised and name in fields.values else [0.5]
            for name in ("image_mean", "image_std")
        )
        for name, values in (("image_mean", mean), ("image_std", std)):
            if len(values) not in (1, 3) or (values is std and min(map(abs, values)) == 0):
                raise fields.wrong(name, "a number a channel, none of them 0 for image_std", values)
        return cls(
            path,
            classes=labels,
            scale=fields.number("rescale_factor", 1 / 255) if fields.flag("do_rescale") else 1,
            mean=mean if normalised else [0.0],
            std=std if normalised else [1.0],
        )

    def read(self, sizes: Sequence[Size], *, channels: int, most: int) -> Images:
        """The images at some sizes.

        Args:
            sizes: (height, width) of each.
            channels: of the model.
            most: number of images; more are sampled evenly, also to fit into memory.

        Raises:
            ArgumentError: if there is no path, or Pillow is missing, which reads image files.
            DataError: if there are no images, or one cannot be read (it is named).
        """
        path = self._there()
        numbers = channels * sum(height * width for height, width in sizes)
        most = max(FEWEST, min(most, NUMBERS // numbers))
        digest = hashlib.sha256()
        rows: dict[Size, list[Tensor]] = {size: [] for size in sizes}
        labels: list[int | None] = []
        images = self._arrays(path, most) if path.is_file() else self._files(path, most, channels)
        for where, image, label, content in images:
            digest.update(content)
            labels.append(label)
            normal = self._normalised(where, image, channels)
            for size in sizes:
                resized = interpolate(normal[None], size=size, mode="bilinear", antialias=True)
                rows[size].append(normal if tuple(normal.shape[1:]) == size else resized[0])
        if len(labels) < FEWEST:
            raise _unusable(path, f"{len(labels)}", f"Give at least {FEWEST}.")
        numbered = [label for label in labels if label is not None]
        labelled = len(numbered) == len(labels)
        unknown = "" if labelled else ", whose classes are not known"
        return Images(
            pixels={size: torch.stack(images) for size, images in rows.items()},
            labels=torch.tensor(numbered) if labelled else None,
            name=f"{len(labels)} images of {path.resolve().name}{unknown}",
            sha256=digest.hexdigest(),
        )

    def _there(self) -> Path:
        if self.path is None:
            raise ArgumentError(
                "--images",
                expected="images, which such a model is measured on",
                got="none",
                remedy="Give a folder of image files, or a .npy or .npz file of arrays; or "
                "--no-report.",
            )
        if not self.path.exists():
            raise _unusable(self.path, "nothing there", "Check the path for a typing error.")
        if self.path.is_file() and self.path.suffix.lower() not in ARRAYS:
            raise _unusable(self.path, "another file", "Give the folder that it lies in.")
        return self.path

    def _files(
        self, folder: Path, most: int, channels: int
    ) -> Iterator[tuple[Path, Tensor, int | None, bytes]]:
        """Path, pixels ``[P, Y, X]``, class and content of image files, sampled evenly."""
        paths = sorted(
            path
            for path in folder.rglob("*")
            if path.suffix.lower() in SUFFIXES
            and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        )
        if not paths:
            raise _unusable(folder, "none", f"Their names end in {', '.join(SUFFIXES)}.")
        try:
            from PIL import Image, ImageOps
        except ImportError as error:
            raise ArgumentError(
                "--images",
                expected="the package Pillow, which reads image files",
                got="none installed",
                remedy="pip install 'posenc[extend]', or give a .npy or .npz file of arrays.",
            ) from error
        for path in (paths[at] for at in _spread(len(paths), most)):
            try:
                content = read_bytes(path, most=MOST_BYTES)
                with Image.open(BytesIO(content)) as opened:
                    if opened.width * opened.height > MOST_PIXELS:
                        raise ValueError(f"more than {MOST_PIXELS:,} pixels")
                    upright = ImageOps.exif_transpose(opened)
                    image = np.asarray(upright.convert("L" if channels == 1 else "RGB"))
            except Exception as error:  # Pillow raises whatever its decoders do
                raise DataError(
                    "--images",
                    expected=f"a readable image at {path}",
                    got=str(error) or type(error).__name__,
                    remedy="Take the file out of the folder, or save it again.",
                ) from error
            pixels = torch.from_numpy(image.copy()).reshape(*image.shape[:2], -1).movedim(-1, 0)
            yield path, pixels, self.classes.get(path.parent.name), content

    def _arrays(self, path: Path, most: int) -> Iterator[tuple[Path, Tensor, int | None, bytes]]:
        """Images of a file of arrays, in the form of ``_files``."""
        try:
            content = read_bytes(path, most=MOST_BYTES)
            if path.suffix.lower() == ".npz":
                with zipfile.ZipFile(BytesIO(content)) as archive:
                    if sum(member.file_size for member in archive.infolist()) > MOST_BYTES:
                        raise ValueError(f"more than {MOST_BYTES:,} bytes of arrays")
            loaded = np.load(BytesIO(content), allow_pickle=False)
            held = {"images": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
            images = held["images"]
            for array in held.values():
                torch.from_numpy(array[:0])  # refuses arrays of other things than numbers
        except Exception as error:  # NumPy raises whatever its decoders do
            raise _unusable(path, error, "Write it by numpy.savez(path, images=…).") from error
        labels = held.get("labels")
        if images.ndim not in (3, 4) or (labels is not None and labels.shape != images.shape[:1]):
            raise _unusable(
                path,
                f"arrays of shapes {', '.join(str(array.shape) for array in held.values())}",
                "Images are [N, Y, X], [N, Y, X, P] or [N, P, Y, X], labels [N].",
            )
        for at in _spread(len(images), most):
            image = np.ascontiguousarray(images[at])
            label = None if labels is None else int(labels[at])
            pixels = torch.from_numpy(image)
            if image.ndim == 2:
                pixels = pixels[None]
            elif image.shape[-1] in (1, 3):
                pixels = pixels.movedim(-1, 0)
            yield path, pixels, label, image.tobytes()

    def _normalised(self, where: Path, image: Tensor, channels: int) -> Float[Tensor, "P Y X"]:
        if image.shape[0] == 1 < channels:
            image = image.expand(channels, -1, -1)
        if image.shape[0] != channels:
            raise _unusable(
                where, f"{image.shape[0]} channels", f"The model takes {channels} channels."
            )
        if image.is_floating_point():
            return image.float()
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (image.float() * self.scale - mean) / std


def _spread(count: int, most: int) -> list[int]:
    """Indices of at most so many things, evenly over all."""
    chosen = min(most, count)
    return [index * count // chosen for index in range(chosen)]


def _unusable(path: Path, got: object, remedy: str) -> DataError:
    return DataError("--images", expected=f"images at {path}", got=str(got), remedy=remedy)


TOKENS_A_CALL = 4096

FEWEST_SHOWN, MOST_SHOWN = 64, 1024
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
    return min(MOST_SHOWN, max(FEWEST_SHOWN, 2 * BUDGET // cells))
