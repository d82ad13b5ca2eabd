"""Candidates for models of images, whose tables of positions are for a size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from posenc.encodings.embedding.learned2d import Learned2d
from posenc.errors import ArgumentError
from posenc.extension import extend
from posenc.lab.evaluation.candidates import SCALED, Candidate, Method, candidates_by
from posenc.lab.evaluation.images import Size
from posenc.lab.evaluation.suites.images import BySize
from posenc.transformers.live import LiveImages


def image_candidates(
    model: LiveImages, methods: Sequence[Method], *, cells: Sequence[Size]
) -> Iterator[Candidate]:
    """A model of images scaled to its trained size, and with a table for each size by each method.

    Args:
        model: as trained.
        methods: to extend it by.
        cells: the sizes in cells, the trained one first.

    Raises:
        ArgumentError: for a method that is not for images.
    """
    patch = model.patch
    height, width = (patch * side for side in cells[0])
    note = f"The model as trained, shown every image at {height} by {width} pixels."
    yield Candidate(SCALED, model, limit=max(height, width), advice=(note,))

    def make(method: Method) -> Candidate:
        models = {
            (patch * size[0], patch * size[1]): model.extended(
                method.name, factor=None, length=None, options={**method.options, "size": size}
            )
            for size in cells
        }
        return Candidate(method.spec, BySize(models), method)

    yield from candidates_by(methods, make, trained=model.trained_encoding, strict=True)


def goal_cells(model: LiveImages, methods: Sequence[Method], *, factor: float) -> Size:
    """Size in cells of the tables that the methods make, by their ``size`` or by ``factor``.

    Raises:
        ArgumentError: if sizes differ, or a method makes no table.
    """
    sizes: set[Size] = set()
    for method in methods:
        if any("learned2d" not in entry.on for entry in method.entries):
            raise ArgumentError(
                "method",
                expected="a method for a table of positions in an image",
                got=method.name,
                remedy="Use interpolate, which makes one for any size.",
            )
        extended = extend(model.trained_encoding(), method.name, factor=factor, **method.options)
        assert isinstance(extended.embedding, Learned2d)
        height, width = extended.embedding.table.shape[:2]
        sizes.add((height, width))
    if len(sizes) != 1:
        raise ArgumentError(
            "method",
            expected="methods for one size of images",
            got=", ".join(f"{height}×{width} cells" for height, width in sorted(sizes)),
            remedy="Give size=(…) to all of them, or to none.",
        )
    return sizes.pop()
