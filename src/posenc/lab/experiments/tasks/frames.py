"""Hidden frames of videos longer than in training, with time stretched by each method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from posenc.attention import Attention
from posenc.encoding import Encoding
from posenc.extension import extend
from posenc.lab.experiments.recipe import Recipe
from posenc.lab.experiments.results import Corpus
from posenc.lab.experiments.tasks.common.task import (
    Defaults,
    Task,
    TaskEntry,
    TaskSettings,
    times,
    training_loss,
)
from posenc.lab.experiments.tasks.temperature import Interpolator
from posenc.lab.reporting.judge import Metric
from posenc.lab.training.seeding import fingerprint, generator
from posenc.layout import Layout
from posenc.models.stack import LayersConfig

SIDE = 2
"""Cells a side of a frame."""

BASE = 100.0
"""Base of time. Of 4 pairs the second has a period of 20 frames, which 16 frames do not fill."""

WAVES, SLOWEST, FASTEST = 2, 52.0, 12.0
"""Sines that the blob's row and column are the sum of, and bounds of their periods in frames."""

RADIUS = 0.8
"""Radius of the blob in cells."""

HIDDEN = 0.5
"""Share of the frames that are hidden."""

VIDEOS, ROWS = 128, 16
"""Videos tested at a length, and at a time."""

METHODS: Mapping[str, str] = {
    "direct": "as it was trained",
    "interpolate": "with time interpolated",
    "ntk": "with time by NTK",
    "riflex": "with time by RIFLEx",
    "ultravico": "with UltraViCo, α = 0.5, beyond half the trained frames",
}
"""Ways to read a longer video, as they are described; keys of metrics."""


class Frames(Task):
    """Fill in hidden frames of a moving blob, in videos of more frames than any in training.

    Time has half of the pairs of ``axial_rope``, rows and columns the others. A trained model is
    tested as it is and with time stretched by each of ``METHODS``.

    Args:
        settings: of the comparison; lengths count frames.
    """

    axes = 3

    def __init__(self, settings: TaskSettings) -> None:
        length = settings.train_length
        pairs = settings.width // settings.heads // 2
        self.pairs = (pairs - 2 * (pairs // 4), pairs // 4, pairs // 4)
        turns = [2 * math.pi * BASE ** (t / self.pairs[0]) for t in range(self.pairs[0])]
        self.period = round(next((p for p in turns if length <= 0.9 * p), turns[-1]))
        super().__init__(
            settings,
            title="Hidden frames of a moving blob, in videos longer than any in training",
            corpus=Corpus(
                name=f"a blob that moves smoothly over {SIDE}×{SIDE} cells, generated",
                sha256=fingerprint(SIDE, WAVES, SLOWEST, FASTEST, RADIUS),
                files=0,
                train_bytes=0,
                held_out_bytes=0,
                unit="frames",
            ),
            metrics=_metrics(self.period),
            decisive=(length, BASE, HIDDEN),
            example_length=length * SIDE**2,
        )
        for size in self.lengths:
            for method in METHODS:
                run = partial(self._score, size=size, method=method)
                tokens = size * SIDE**2
                keys = (method, f"{method}_repeats") if size > self.period else (method,)
                self.add_probe(keys, size, run, rows=ROWS, length=tokens)

    def make_model(self, recipe: Recipe) -> Interpolator:
        """An ``Interpolator`` of cells."""
        arguments = self.model_arguments(recipe)
        if recipe.encoding == "axial_rope":
            own = {"pairs": self.pairs, "base": (BASE, 10.0, 10.0)}
            arguments["options"] = own | arguments["options"]
        return Interpolator(LayersConfig(activation="gelu", norm="layer", bias=True, **arguments))

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``values`` and ``hidden``, ``[batch, cells]``."""
        length = self.settings.train_length
        return _videos(self.settings.batch, length, generator(seed, step))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean squared error of hidden cells."""
        errors = _predicted(model, batch) - batch["values"]
        return errors.square()[batch["hidden"]].mean()

    @torch.inference_mode()
    def _score(self, model: nn.Module, size: int, method: str) -> tuple[float, ...]:
        """Error of hidden frames, and how much it is another frame of the video."""
        trained = self.settings.train_length
        view = stretched(model, method, factor=size / trained, length=trained)
        device = next(model.parameters()).device
        videos = _videos(VIDEOS, size, generator(size))
        parts = [
            _predicted(view, {key: x[begin : begin + ROWS].to(device) for key, x in videos.items()})
            for begin in range(0, VIDEOS, ROWS)
        ]
        cells = videos["values"].double().view(VIDEOS, size, -1)
        hidden = videos["hidden"].view(VIDEOS, size, -1)
        errors = torch.cat(parts).cpu().double().view_as(cells) - cells
        error = float(errors[hidden].square().mean() / cells.var())
        if size <= self.period:
            return (error,)
        return error, repeated(errors, cells, hidden, self.period)


def stretched(model: nn.Module, method: str, *, factor: float, length: int) -> nn.Module:
    """A model of the same weights whose layers have time stretched by one of ``METHODS``.

    Raises:
        ArgumentError: for layers without ``axial_rope``, unless the method is ``"direct"``.
    """
    if method == "direct":
        return model
    view = deepcopy(model)
    for layer in view.modules():
        if isinstance(layer, Attention):
            layer.encoding = _longer(layer.encoding, method, factor, length)
    return view.eval()


def _longer(encoding: Encoding, method: str, factor: float, length: int) -> Encoding:
    if method == "ultravico":
        return extend(encoding, method, length=length, alpha=0.5)
    return extend(encoding, "on_axis", factor=factor, length=length, method=method, axis=0)


def repeated(
    errors: Float[Tensor, "N T C"],
    cells: Float[Tensor, "N T C"],
    hidden: Bool[Tensor, "N T C"],
    lag: int,
) -> float:
    """Share of another frame in those predicted: errors, regressed on the difference of frames.

    1 where frame t is predicted as frame t - lag or t + lag, 0 where errors have nothing of it.
    """
    products = squares = 0.0
    for here, there in (
        (slice(lag, None), slice(None, -lag)),
        (slice(None, -lag), slice(lag, None)),
    ):
        other, asked = cells[:, there] - cells[:, here], hidden[:, here]
        products += float((errors[:, here] * other)[asked].sum())
        squares += float(other[asked].square().sum())
    return products / squares


def _predicted(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    values = batch["values"]
    layout = Layout.cells(values.shape[1] // SIDE**2, SIDE, SIDE, device=values.device)
    predicted: Tensor = model(values, batch["hidden"], layout)
    return predicted.float()


def _videos(rows: int, frames: int, source: torch.Generator) -> dict[str, Tensor]:
    """Values of cells by frame, row and column, and which frames are hidden."""

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, 2, WAVES, 1, generator=source)

    turns = torch.arange(frames) / uniform(FASTEST, SLOWEST) + uniform(0.0, 1.0)
    middle = (SIDE - 1) / 2
    places = middle + SIDE / 2 * (2 * math.pi * turns).sin().mean(2)  # [rows, 2, frames]
    away = (torch.arange(SIDE) - places.unsqueeze(-1)).square()  # [rows, 2, frames, SIDE]
    distance = away[:, 0, :, :, None] + away[:, 1, :, None, :]
    values = (-distance / (2 * RADIUS**2)).exp().flatten(1)
    hidden = torch.rand(rows, frames, generator=source) < HIDDEN
    return {"values": values, "hidden": hidden.repeat_interleave(SIDE**2, 1)}


def _metrics(period: int) -> tuple[Metric, ...]:
    errors = [
        Metric(
            key=method,
            label=f"Squared error of hidden frames, {how}",
            unit="share of the variance",
            axis="frames",
            lower_is_better=True,
            trivial=1.0,
            trivial_rule="always the mean",
            description=f"{HIDDEN:.0%} of the frames are hidden.",
            headline=method == "direct",
        )
        for method, how in METHODS.items()
    ]
    repeats = [
        Metric(
            key=f"{method}_repeats",
            label=f"Share of the frame {period} before or after, {how}",
            unit="share of another frame",
            axis="frames",
            lower_is_better=True,
            description="Errors, regressed on the difference of the two frames: 1 is a copy, and "
            "a blur of all frames has some of it too.",
        )
        for method, how in METHODS.items()
    ]
    return *errors, *repeats, training_loss("squared error of a cell")


ENTRY = TaskEntry(
    make=Frames,
    summary="Fill in hidden frames of videos longer than any in training",
    data="a blob that moves smoothly over 2×2 cells, generated; half of the frames hidden",
    metric="mean squared error as a share of the variance, and the share of the frame a period "
    "away, with time as trained and by interpolate, ntk, riflex and ultravico",
    expectation="Past the trained frames a video model with RoPE repeats what is a period of one "
    "of its frequencies away, which RIFLEx slows (Zhao et al. 2025), or loses itself among more "
    "frames, which UltraViCo weighs less (Zhao et al. 2025). Interpolation blurs near frames. The "
    "control nope must fail.",
    sample={"train_length": 8, "test_lengths": (24,), "width": 32},
    defaults=Defaults(
        encodings=("axial_rope",),
        references=("nope",),
        train_length=16,
        test_lengths=times(1, 2, 4),
        steps=800,
        learning_rate=3e-3,
    ),
    axes=3,
    length_unit="frames",
)
