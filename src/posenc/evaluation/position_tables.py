"""Models with a learned table of positions: as trained, and with a longer or larger one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from posenc.encodings.embedding.learned import Learned
from posenc.encodings.embedding.learned2d import Learned2d
from posenc.errors import ArgumentError
from posenc.evaluation.candidates import CUT, SCALED, Candidate, Method, candidates_by, extended_by
from posenc.evaluation.suites.images import BySize, Size
from posenc.extension import extend, extend_layers
from posenc.models import ImageEncoder, VisionTransformer
from posenc.models.replacing import encodings_of, with_encodings

__all__ = ["goal_cells", "image_candidates", "table_candidates"]


def table_candidates(
    model: nn.Module, methods: Sequence[Method], *, goal: int, length: int, strict: bool
) -> Iterator[Candidate]:
    """An encoder with a table of positions, cut, and stretched to ``goal`` rows by each method.

    Args and Raises: as ``decoder_candidates``.
    """
    note = f"The model as trained, given {length} tokens and no more."
    yield Candidate(CUT, "baseline", None, model, limit=length, advice=(note,))

    def make(method: Method) -> Candidate:
        if method.of_model:
            middle = {"combine": "middle", "overlap": length // 4}
            options = {**middle, **method.options}
            return extended_by(model, replace(method, options=options), factor=1.0, length=length)
        first = int(method.options.get("prefix", 0))
        factor = (goal - first) / (length - first)
        made = extended_by(model, method, factor=factor, length=length)
        assert made.model is not None
        part = encodings_of(made.model)[0].embedding
        if not isinstance(part, Learned) or part.max_length < goal:
            raise ArgumentError(
                "method",
                expected=f"one that makes a table of {goal} positions",
                got=f"{method.name}, which leaves it as it is",
                remedy=f"Join it to one that does: hierarchical+{method.name}.",
            )
        return replace(made, factor=factor)

    yield from candidates_by(model, methods, make, strict=strict)


def image_candidates(
    model: ImageEncoder | VisionTransformer, methods: Sequence[Method], *, cells: Sequence[Size]
) -> Iterator[Candidate]:
    """A model of images shown at the trained size, and with a table for each size by each method.

    Args:
        model: as trained.
        methods: what to try.
        cells: the sizes in cells, trained at first.

    Raises:
        ArgumentError: when a method is not for images.
    """
    patch = model.config.patch
    height, width = (patch * side for side in cells[0])
    note = f"The model as trained, shown every image at {height} by {width} pixels."
    yield Candidate(SCALED, "baseline", None, model, limit=max(height, width), advice=(note,))

    def make(method: Method) -> Candidate:
        options = {name: value for name, value in method.options.items() if name != "size"}
        twins = {
            (patch * size[0], patch * size[1]): with_encodings(
                model, extend_layers(encodings_of(model), method.name, size=size, **options)
            )
            for size in cells
        }
        return Candidate(method.spec, "method", method, BySize(twins))

    yield from candidates_by(model, methods, make, strict=True)


def goal_cells(
    model: ImageEncoder | VisionTransformer, methods: Sequence[Method], *, factor: float
) -> Size:
    """How many cells the methods' tables have, (height, width): by ``size``, else by ``factor``.

    Raises:
        ArgumentError: when they differ, or a method makes no table.
    """
    found: set[Size] = set()
    for method in methods:
        _require_images(method)
        stretched = extend(encodings_of(model)[0], method.name, factor=factor, **method.options)
        assert isinstance(stretched.embedding, Learned2d)
        height, width = stretched.embedding.table.shape[:2]
        found.add((height, width))
    if len(found) != 1:
        raise ArgumentError(
            "method",
            expected="methods for one size of images",
            got=", ".join(f"{height}×{width} cells" for height, width in sorted(found)),
            remedy="Give size=(…) to all of them, or to none.",
        )
    return found.pop()


def _require_images(method: Method) -> None:
    if any("learned2d" not in entry.on for entry in method.entries):
        raise ArgumentError(
            "method",
            expected="a method for a table of positions in an image",
            got=method.name,
            remedy="Use interpolate, which makes one for any size.",
        )
