"""``posenc extend``: a checkpoint for longer contexts, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from posenc.cli.completion import complete_methods
from posenc.cli.console import OUT, print_json
from posenc.cli.studies import Display, command_line, print_study

__all__ = ["extend"]


def extend(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="Folder with config.json and safetensors, or of a run of posenc compare; "
            "without one a small model is trained."
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="Or several, joined by commas, of which the best is written; or all.",
            autocompletion=complete_methods,
        ),
    ] = "yarn",
    factor: Annotated[float, typer.Option(help="How many times the trained length.")] = 4.0,
    text: Annotated[
        Path | None,
        typer.Option(show_default="posenc's own source", help="A file or folder to measure on."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            show_default="none",
            help="To measure a ViT on: a folder of image files (in subfolders called like the "
            "classes, if these are known), or a .npy or .npz file of arrays.",
        ),
    ] = None,
    report: Annotated[
        bool,
        typer.Option("--report/--no-report", help="Measure; without, one method is just written."),
    ] = True,
    out: Annotated[Path, typer.Option(help="New folder for checkpoint and report.")] = Path(
        "posenc-extend"
    ),
    search: Annotated[
        int,
        typer.Option(help="Sets of factors to try for longrope, on the text; stopped, it resumes."),
    ] = 0,
    finetune_steps: Annotated[
        int, typer.Option(help="Train every method so many steps after stretching, all alike.")
    ] = 0,
    positions: Annotated[
        str, typer.Option(help="Of fine-tuning: plain, randomized or skipped (PoSE).")
    ] = "plain",
    finetune_rate: Annotated[
        float | None, typer.Option(show_default="0.1 / width", help="At its peak.")
    ] = None,
    trained_length: Annotated[
        int | None,
        typer.Option(show_default="max_position_embeddings", help="The length it was trained at."),
    ] = None,
    always: Annotated[
        bool,
        typer.Option("--always", help="Write the best of several even if it gains nothing."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of needles and of fine-tuning.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Stretch a checkpoint past its trained length, measure what that does, and write it.

    OUT becomes a checkpoint folder with a report in it: loss by length and position on the same
    tokens, needles by depth and length, copying, time and memory, beside the model as it was and a
    plain sliding window. Of models of masked tokens (BERT) it is the loss of these; of sentence
    encoders how well long documents are found; of ViT classes and features at larger sizes. The
    input is never touched. An option of a method follows an @. If none of several methods surely
    gains anything over the model as it is, the report alone is written.

    Examples:

        posenc extend llama --method yarn --factor 4 --text book.txt --out longer

        posenc extend llama --method all --factor 2 --out longer

        posenc extend llama --method yarn@alpha=0.5@beta=4,rerope+log_n

        posenc extend llama --method longrope --search 200 --text book.txt

        posenc extend posenc-compare/runs/rope/seed-0 --method all --out longer

        posenc extend bert --method all --factor 4 --text book.txt --out longer

        posenc extend vit --method all --factor 2 --images photos --out larger

        posenc extend --method all --factor 2 --finetune-steps 50
    """
    from posenc.evaluation.demo_model import demo_checkpoint
    from posenc.evaluation.extend import extend_checkpoint
    from posenc.evaluation.finetuning import Tuning
    from posenc.extension.fitting import require_factor
    from posenc.storage import require_unused
    from posenc.training.interrupt import interruptible

    require_unused(out)
    require_factor(factor)
    tuning = Tuning(steps=finetune_steps, positions=positions, rate=finetune_rate, seed=seed)  # type: ignore[arg-type]  # checked there
    with Display(shown=not quiet and not json) as display, interruptible() as stop:
        if checkpoint is None:
            demo = out.with_name(f"{out.name}-subject")
            checkpoint = demo_checkpoint(
                demo, text=text, progress=display, stop=stop, command=command_line()
            )
        extended = extend_checkpoint(
            checkpoint,
            out,
            methods=method,
            factor=factor,
            text=text,
            images=images,
            report=report,
            search=search,
            tuning=tuning,
            trained_length=trained_length,
            always=always,
            seed=seed,
            device=device,
            command=command_line(),
            progress=display,
            stop=stop,
        )
    if json:
        study = {} if extended.study is None else extended.study.to_json()
        print_json(study | {"out": str(out), "transformers": extended.native})
        return
    if extended.study is not None:
        print_study(extended.study)
    if extended.method is None:
        OUT.print("\nNo checkpoint was written (--always writes the best of them).")
    else:
        _print_written(out, extended.method, extended.native)
    if extended.study is not None:
        page = (out / "report/index.html").resolve()
        OUT.print(Text.assemble("Report: ", (str(page), "bold")), soft_wrap=True)


def _print_written(out: Path, method: str, native: bool) -> None:
    where = "transformers and posenc run it as stretched."
    if not native:
        where = (
            "transformers does not know this method and would run the model as it was; "
            "posenc.integrations.transformers.load reads posenc_extension in its config.json."
        )
    OUT.print(f"\nCheckpoint: {out} ({method}). {where}", soft_wrap=True)
