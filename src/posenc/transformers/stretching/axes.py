"""Rotations on several axes in models of diffusers, identified by running them, and stretched.

Modules are called by the names of their arguments, and where tokens are is read from the angles
that they give, so that there is no list of models.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from posenc.arguments import Natural, check
from posenc.encoding import Encoding
from posenc.encodings.query_key.axial_rope import AxialRope, by_axis
from posenc.errors import ArgumentError
from posenc.extension import extend
from posenc.layout import Layout
from posenc.transformers.stretching.axis_tables import (
    Ladders,
    StretchedTable,
    map_tables,
    read_ladders,
    tables_of,
)
from posenc.transformers.stretching.changes import Change, StretchedPart
from posenc.transformers.stretching.configs import Request
from posenc.transformers.stretching.frequencies import describe

MOST_AXES, LARGEST_PATCH = 4, 8
"""Largest numbers of axes, and of cells of latents a token, that are tried."""

TABLES = "image_rotary_emb"
"""Argument by which pipelines give a model its tables, if it has no module for them."""

FREQUENCIES = "pos_frequencies"
"""Argument by which a model gives a module learned frequencies ``[A, H, T]``."""

COORDINATES = ("video_coords", "coords")
"""Arguments that are coordinates ``[B, A, L]`` in seconds and pixels (LTX-Video)."""

FINEST = -14
"""Power of 2 of a step of such coordinates in which the fastest pair turns by less than π."""

ARGUMENTS = (
    *("hidden_states", "attention_mask", "ids", "video_fhw", "fhw", "max_txt_seq_len"),
    *(
        "frame_indices",
        "num_frames",
        "height",
        "width",
        "device",
        "dtype",
        FREQUENCIES,
        *COORDINATES,
    ),
)
"""Names of arguments that values are known for."""


@dataclass(eq=False)
class AxialRotation:
    """Tables that a module returns.

    Args:
        path: of the module in the model.
        owner: the module whose ``forward`` is changed.
        ladders: frequencies of the tables.
    """

    path: str
    owner: nn.Module
    ladders: Ladders

    @property
    def rope(self) -> AxialRope:
        """Axial RoPE of the module's frequencies."""
        return self.ladders.rope

    def stretched(self, after: AxialRope, axis: int) -> Callable[..., Any]:
        """The owner's ``forward`` with the rotation ``after`` along an axis."""
        forward, change = self.owner.forward, StretchedTable(self.ladders, after, axis)

        @functools.wraps(forward)
        def rotate(*args: Any, **kwargs: Any) -> Any:
            return map_tables(forward(*args, **kwargs), change)

        return rotate


class GivenTables(AxialRotation):
    """Tables that a model is called with (CogVideoX)."""

    def stretched(self, after: AxialRope, axis: int) -> Callable[..., Any]:
        change = StretchedTable(self.ladders, after, axis, verified=False)

        def stretched(tables: Any) -> Any:
            if tables is None:
                raise ArgumentError(
                    TABLES,
                    expected="tables, which are stretched",
                    got=None,
                    remedy="restore(model) undoes the stretch.",
                )
            return map_tables(tables, change)

        return _with(self.owner.forward, TABLES, stretched)


class LearnedFrequencies(AxialRotation):
    """Frequencies ``[A, H, T]`` that a module is called with (Mochi)."""

    @property
    def rope(self) -> AxialRope:
        pairs = tuple(map(len, self.ladders.theta))
        return AxialRope(head_dim=2 * sum(pairs), heads=1, pairs=pairs, learned=True)

    def stretched(self, after: AxialRope, axis: int) -> Callable[..., Any]:
        steps = by_axis(after.step, len(self.ladders.theta))

        def scaled(frequencies: Tensor) -> Tensor:
            return frequencies * frequencies.new_tensor(steps).view(-1, 1, 1)

        return _with(self.owner.forward, FREQUENCIES, scaled)


@dataclass(eq=False)
class ModuleProbe:
    """Calls of a rotary module for a box of tokens; see ``axis_tables.TableProbe``.

    Args:
        module: that is called.
        names: of the arguments that it is called with.
        axes: of the tokens' coordinates.
        device: of tensors.
    """

    module: nn.Module
    names: frozenset[str]
    axes: int
    device: torch.device

    def __post_init__(self) -> None:
        fine = not self.names.isdisjoint(COORDINATES)
        self.steps: Sequence[float] = [2.0**power for power in range(FINEST if fine else 0, 1)]
        self.patch = [1] * self.axes
        if self.names & {"hidden_states", "height"} and not fine:
            self.patch = [self._patch(axis) for axis in range(self.axes)]

    def __call__(self, sizes: tuple[int, ...], step: float = 1.0) -> Any:
        latents = [n * size for n, size in zip(sizes, self.patch, strict=True)]
        return self._call(latents, sizes, step)

    def _call(self, latents: list[int], sizes: tuple[int, ...], step: float = 1.0) -> Any:
        cells = Layout.cells(*sizes, device=self.device).positions  # [1, L, A]
        mask = torch.ones(1, sizes[0], dtype=torch.long, device=self.device)  # of words
        shown = latents[1:] if "attention_mask" in self.names else latents
        known: dict[str, Any] = {
            "hidden_states": torch.zeros(1, 1, *shown, device=self.device),
            "attention_mask": mask,
            "ids": cells[0],
            "video_fhw": [sizes],
            "fhw": sizes,
            "max_txt_seq_len": 1,
            "frame_indices": torch.arange(latents[0], device=self.device),
            "device": self.device,
            "dtype": torch.float32,
            FREQUENCIES: 0.01 * torch.eye(self.axes, device=self.device).unsqueeze(2),
            **dict.fromkeys(COORDINATES, cells.mT * step),
            **dict(zip(("num_frames", "height", "width"), latents, strict=False)),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of autocast, on devices that lack it
            try:
                return self.module(**{name: known[name] for name in self.names})
            except Exception:  # of any class of diffusers
                return None

    def _patch(self, axis: int) -> int:
        """Cells of latents a token along an axis."""
        for size in range(1, LARGEST_PATCH + 1):
            latents = [size if other == axis else LARGEST_PATCH for other in range(self.axes)]
            tables = tables_of(self._call(latents, tuple(latents)))
            if tables and all(cosine.numel() for cosine, _ in tables):
                return size
        return 1


class VideoProbe:
    """Calls of the function by which pipelines of diffusers make tables for ``TABLES``."""

    axes = 3
    steps: Sequence[float] = (1.0,)

    def __init__(self, model: nn.Module) -> None:
        config = getattr(model, "config", None)
        video = getattr(config, "sample_frames", None) is not None
        self.head_dim = getattr(config, "attention_head_dim", None) if video else None

    def __call__(self, sizes: tuple[int, ...], step: float = 1.0) -> Any:
        if self.head_dim is None:
            return None
        from diffusers.models.embeddings import get_3d_rotary_pos_embed

        frames, *sides = sizes
        return get_3d_rotary_pos_embed(self.head_dim, ((0, 0), tuple(sides)), tuple(sides), frames)


def stretch_axis(
    model: nn.Module, request: Request, axis: int, changes: list[Any]
) -> tuple[StretchedPart, ...]:
    """Stretch all rotations of a model along an axis; those without that axis are left alone.

    Raises:
        ArgumentError: if it has none that is known, or as ``posenc.extension.on_axis``.
    """
    axis = check("axis", Natural, axis)
    found = list(rotations(model))
    if not found:
        raise ArgumentError(
            "model",
            expected="tables of latents, sizes or ids, with a ladder of frequencies an axis",
            got=type(model).__name__,
            remedy="Without axis=…, stretch takes models of transformers.",
        )
    some = any(axis < len(rotation.ladders.theta) for rotation in found)
    parts = []
    for rotation in found:
        kind = type(rotation.owner).__name__
        if some and axis >= len(rotation.ladders.theta):
            parts.append(StretchedPart(rotation.path, kind, False, f"it has no axis {axis}"))
            continue
        extended = _extended(rotation.rope, request, axis)
        after = extended.query_key
        assert isinstance(after, AxialRope)
        changes.append(Change.of(rotation.owner, "forward", rotation.stretched(after, axis)))
        told = describe(extended)
        if after.learned:
            told = f"learned frequencies divided by {1 / by_axis(after.step, axis + 1)[axis]:.4g}"
        parts.append(StretchedPart(rotation.path, kind, True, told))
    return tuple(parts)


def _extended(rope: AxialRope, request: Request, axis: int) -> Encoding:
    """The rotation as the method stretches it along an axis.

    Raises:
        ArgumentError: as ``posenc.extension.on_axis``.
    """
    options = "".join(f"@{name}={value}" for name, value in request.options.items())
    return extend(
        Encoding(query_key=rope),
        "on_axis",
        factor=request.factor,
        length=request.length,
        method=request.method + options,
        axis=axis,
    )


def rotations(model: nn.Module) -> Iterator[AxialRotation]:
    """Rotations on axes in a model, found by calls of its modules."""
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    for path, module in model.named_modules():
        parameters = signature(module.forward).parameters
        if module is model and TABLES in parameters:
            ladders = read_ladders(VideoProbe(model))
            if ladders is not None:
                yield GivenTables(path, module, ladders)
        if any(True for _ in module.children()) or any(True for _ in module.parameters()):
            continue
        names = {name for name in parameters if name in ARGUMENTS}
        if any(p.default is p.empty and n not in names for n, p in parameters.items()):
            continue
        kind = LearnedFrequencies if FREQUENCIES in names else AxialRotation
        for axes in range(MOST_AXES, 0, -1):
            ladders = read_ladders(ModuleProbe(module, frozenset(names), axes, device))
            if ladders is not None:
                yield kind(path, module, ladders)
                break


def _with(
    forward: Callable[..., Any], name: str, change: Callable[[Any], Any]
) -> Callable[..., Any]:
    """A ``forward`` that is called with one argument changed."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature(forward).bind(*args, **kwargs)
        bound.arguments[name] = change(bound.arguments.get(name))
        return forward(*bound.args, **bound.kwargs)

    return call
