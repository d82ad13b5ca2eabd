"""``posenc extend``: extend a checkpoint to longer contexts and measure it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posenc.cli.completion import complete_methods
from posenc.cli.console import OUT, command_line, print_json, print_report
from posenc.cli.engines import engine_json, print_serving
from posenc.cli.options import ComputeDevice, Images, Json, Quiet, TextFile, TrainedLength, option
from posenc.cli.studies import StudyDisplay, print_study, study_json

if TYPE_CHECKING:
    from posenc.evaluation.extend import Extended

TUNING = "Fine-tuning"
"""Group of the options on it."""


def extend(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            show_default="a small model, trained first",
            help="Folder with config.json and safetensors, or of a run of posenc compare.",
        ),
    ] = None,
    method: Annotated[
        str,
        option(
            "Extension method, or several, comma-separated, or all; the best is written.",
            complete=complete_methods,
        ),
    ] = "yarn",
    factor: Annotated[float, option("New length as a multiple of the trained length.")] = 4.0,
    text: TextFile = None,
    images: Images = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Measure, or write one method unmeasured.")
    ] = True,
    out: Annotated[Path, option("Output folder for checkpoint and report.")] = Path(
        "posenc-extend"
    ),
    search: Annotated[int, option("Sets of longrope factors to try on the text.")] = 0,
    finetune_steps: Annotated[
        int, option("Fine-tuning steps of every extended model.", group=TUNING)
    ] = 0,
    positions: Annotated[
        str, option("Positions in fine-tuning: plain, randomized or skipped (PoSE).", group=TUNING)
    ] = "plain",
    finetune_rate: Annotated[
        float | None, option("Peak learning rate of fine-tuning.", "0.1 / width", group=TUNING)
    ] = None,
    trained_length: TrainedLength = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--for",
            show_default="none",
            help="Engine that is to serve it: only its methods, and what to type. vllm, sglang, "
            "llama.cpp, mlx or transformers.",
        ),
    ] = None,
    always: Annotated[
        bool,
        typer.Option(
            "--always", help="Write the best method even if it gains or has learned nothing."
        ),
    ] = False,
    seed: Annotated[int, option("Random seed of needles, masks and fine-tuning.")] = 0,
    device: ComputeDevice = "cpu",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Extend a checkpoint to longer contexts, measure it, and write it with a report.

    OUT becomes a checkpoint folder with a report: loss by length and position on the same tokens,
    needles by depth and length, copying, time and memory, compared with the original model and a
    plain sliding window. Masked language models (BERT, ModernBERT) are measured by the loss of
    masked tokens, sentence encoders by retrieval of long documents, ViT by classes and features
    at larger sizes. The input is not changed. An option of a method follows an @. If none of
    several methods is significantly better than the original, only the report is written; if
    the model does not beat the frequencies of bytes or tokens, the command fails. After Ctrl-C
    the same command continues.

    Examples:

        posenc extend llama --method yarn --factor 4 --text book.txt --out longer

        posenc extend llama --method all --factor 2 --out longer

        posenc extend llama --method yarn@alpha=0.5@beta=4,rerope+log_n

        posenc extend llama --method longrope --search 200 --text book.txt

        posenc extend posenc-compare/runs/rope/seed-0 --method all --out longer

        posenc extend bert --method all --factor 4 --text book.txt --out longer

        posenc extend vit --method all --factor 2 --images photos --out larger

        posenc extend llama --method all --factor 4 --for vllm

        posenc extend --method all --factor 2 --finetune-steps 50
    """
    from posenc.evaluation.choosing import require_learned
    from posenc.evaluation.demo_model import demo_checkpoint
    from posenc.evaluation.extend import extend_checkpoint
    from posenc.evaluation.finetuning import Tuning
    from posenc.extension.fitting import require_factor
    from posenc.storage import require_unused
    from posenc.training.interrupt import interruptible

    require_unused(out)
    require_factor(factor)
    tuning = Tuning(steps=finetune_steps, positions=positions, rate=finetune_rate, seed=seed)  # type: ignore[arg-type]  # checked there
    with StudyDisplay(shown=not quiet and not json) as display, interruptible() as stop:
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
            engine=engine,
            command=command_line(),
            progress=display,
            stop=stop,
        )
    if json:
        study = {} if extended.study is None else study_json(extended.study)
        served = {"transformers": extended.native, "engines": extended.engines}
        served |= engine_json(extended)
        print_json(study | {"out": str(out)} | served)
    else:
        _print(extended, out)
    if extended.study is not None and extended.method is None:
        require_learned(extended.study)


def _print(extended: Extended, out: Path) -> None:
    if extended.study is not None:
        print_study(extended.study)
    if extended.method is None:
        OUT.print("\nNo checkpoint was written (--always writes the best of them).")
    else:
        _print_written(out, extended)
    print_serving(extended)
    if extended.study is not None:
        print_report(out / "report/index.html", gap="")


def _print_written(out: Path, extended: Extended) -> None:
    where = f"transformers runs it as stretched.{_engines(extended.engines)}"
    if not extended.native:
        where = (
            "transformers does not know this method and would run the model as it was; "
            "posenc.integrations.transformers.stretch(model) stretches it once it is loaded."
        )
    OUT.print(f"\nCheckpoint: {out} ({extended.method}). {where}", soft_wrap=True)


def _engines(found: dict[str, str]) -> str:
    """Other programs that run a checkpoint as extended, and what the rest do."""
    from posenc.reporting.sentences import listed

    alike = [name for name, difference in found.items() if not difference]
    clauses = [f"{name} {difference}" for name, difference in found.items() if difference]
    if alike:
        clauses.insert(0, f"{listed(alike)} {'does' if len(alike) == 1 else 'do'} too")
    return f" By their published rules {'; '.join(clauses)}." if clauses else ""
