"""Image files and arrays at several sizes, preprocessed for a model."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import interpolate

from posenc.errors import ArgumentError, CheckpointError, DataError
from posenc.storage import read_bytes
from posenc.transformers.checkpoints.folder import SAVE_AGAIN, Fields, read_object

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
