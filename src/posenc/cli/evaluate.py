"""``posenc evaluate``: a checkpoint measured at short and long contexts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from posenc.cli.console import OUT, print_json
from posenc.cli.studies import Display, command_line, print_study
from posenc.errors import ArgumentError

__all__ = ["evaluate"]


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors.")],
    text: Annotated[
        Path | None,
        typer.Option(show_default="posenc's own source", help="Text file or folder to measure on."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            show_default="none",
            help="Images to measure a ViT on: a folder of image files, or a .npy or .npz file.",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            show_default="half, once and twice the trained length",
            help="Context lengths in tokens (image sides in pixels), comma-separated.",
        ),
    ] = None,
    trained_length: Annotated[
        int | None,
        typer.Option(
            show_default="max_position_embeddings",
            help="Length the model was trained at, in tokens.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Output folder for the report.")] = Path(
        "posenc-evaluate"
    ),
    seed: Annotated[int, typer.Option(help="Random seed of needles, words and masks.")] = 0,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or cuda:N.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Measure a checkpoint without extending it, as posenc extend does.

    Longer inputs of text encoders (BERT) are cut to the length of their position table; for larger
    images the table of a ViT is interpolated.

    Examples:

        posenc evaluate llama-folder --text book.txt

        posenc evaluate longer --lengths 512,1024,2048,4096

        posenc evaluate vit-folder --images photos
    """
    from posenc.evaluation.checkpoint import Checkpoint
    from posenc.evaluation.report.page import write_study
    from posenc.evaluation.study import evaluate as measure
    from posenc.storage import output_folder, require_unused

    require_unused(out)
    wanted = None if lengths is None else _numbers(lengths)
    with Display(shown=not quiet and not json) as display:
        opened = Checkpoint.open(checkpoint, trained_length=trained_length, device=device)
        data = opened.data(text=text, images=images)
        study = measure(opened, data, lengths=wanted, seed=seed, progress=display)
    study = replace(study, command=command_line())
    with output_folder(out) as partial:
        write_study(study, partial)
    if json:
        print_json(study.to_json())
        return
    print_study(study)
    OUT.print(
        Text.assemble("\nReport: ", (str((out / "index.html").resolve()), "bold")), soft_wrap=True
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(item) for item in text.split(",") if item.strip())
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 8:
        raise ArgumentError(
            "--lengths",
            expected="whole numbers, 8 or more",
            got=repr(text),
            remedy="Write 512,1024, for example.",
        )
    return numbers
