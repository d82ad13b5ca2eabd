"""Settings of ``evaluate`` and ``extend``; without imports that slow a command down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from posenc.arguments import EXACT, Interval, Length, Natural, Option, Rate, check_fields

MEASURING, TUNING = "Model and data", "Fine-tuning"
"""Groups of options."""

Positions = Literal["plain", "randomized", "skipped"]


@dataclass(frozen=True, kw_only=True)
class MeasuringSettings:
    """Settings of every measurement.

    Args:
        text, images: data to measure on, see ``Checkpoint.data``.
        trained_length: overrides ``config.json``.
        seed: of needles, words, masks and fine-tuning.
        device: of a folder's model.

    Raises:
        ArgumentError: for a value outside its domain.
        UnknownNameError: for an unknown name among several.
    """

    text: Annotated[
        Path | None, Option("Text file or folder to measure on.", "posenc's own source", MEASURING)
    ] = None
    images: Annotated[
        Path | None,
        Option(
            "Images to measure a ViT on: a folder of image files (in subfolders named as the "
            "classes, if known), or a .npy or .npz file of arrays.",
            "none",
            MEASURING,
        ),
    ] = None
    trained_length: Annotated[
        Length | None,
        Option("Length the model was trained at, in tokens.", "max_position_embeddings", MEASURING),
    ] = None
    seed: Annotated[int, Option("Random seed.", group=MEASURING)] = 0
    device: Annotated[str, Option("Device: cpu, cuda or cuda:N.", group=MEASURING)] = "cpu"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(MeasuringSettings):
    """Settings of ``evaluate``; also

    Args:
        lengths: of contexts (of images, sides in pixels); None: half, once and twice the trained.
    """

    lengths: Annotated[
        Sequence[Annotated[int, Interval(8, EXACT)]] | None,
        Option(
            "Context lengths in tokens (image sides in pixels), comma-separated.",
            "half, once and twice the trained length",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Settings of fine-tuning, the same for all models.

    Args:
        steps: of AdamW, its rate rising over the first tenth and falling linearly to 0.
        positions: ``"plain"``: windows of the new length; ``"randomized"`` (Ruoss et al. 2023) or
            ``"skipped"`` (PoSE, Zhu et al. 2024): windows of the trained length at positions drawn
            from the new one, which costs less.
        rate: peak learning rate; 0.1 / C for a model of width C by default.
        seed: of the data's order and of positions.

    Raises:
        ArgumentError: for a value outside its domain.
        UnknownNameError: for unknown positions.
    """

    steps: Annotated[
        Natural,
        Option("Fine-tuning steps of every extended model.", group=TUNING, name="finetune_steps"),
    ] = 0
    positions: Annotated[
        Positions,
        Option("Positions in fine-tuning: plain, randomized or skipped (PoSE).", group=TUNING),
    ] = "plain"
    rate: Annotated[
        Rate | None,
        Option("Peak learning rate of fine-tuning.", "0.1 / width", TUNING, "finetune_rate"),
    ] = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)

    def described(self, width: int) -> dict[str, object]:
        """Its fields for a report, with the rate for a model of this width."""
        return {**vars(self), "rate": self.rate_for(width)}

    def rate_for(self, width: int) -> float:
        """``rate``, or its default."""
        return 0.1 / width if self.rate is None else self.rate


@dataclass(frozen=True, kw_only=True)
class ExtensionSettings(MeasuringSettings):
    """Settings of ``extend_checkpoint``; also

    Args:
        methods: comma-separated names, with options after ``@``; ``all``: every one that fits.
        factor: extension of the trained length.
        report: measure; otherwise the only method is written unmeasured.
        search: sets of factors to try for longrope.
        tuning: of every extended model; none by default.
        always: write the best of several methods even if it gains nothing.
    """

    methods: Annotated[
        str,
        Option(
            "Extension method, or several, comma-separated, or all; the best is written.",
            name="method",
        ),
    ] = "yarn"
    factor: Annotated[
        float,
        Interval(1, EXACT, remedy="4 stretches 512 positions to 2048; 1 changes nothing."),
        Option("New length as a multiple of the trained length."),
    ] = 4.0
    report: Annotated[bool, Option("Measure, or write one method unmeasured.")] = True
    search: Annotated[Natural, Option("Sets of longrope factors to try on the text.")] = 0
    always: Annotated[
        bool, Option("Write the best method even if it gains or has learned nothing.")
    ] = False
    tuning: Tuning = Tuning()
