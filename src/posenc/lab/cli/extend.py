"""``posenc extend``: extend a checkpoint to longer contexts and measure it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posenc.lab.cli.completion import complete_methods
from posenc.lab.cli.console import OUT, command_line, print_json, print_report
from posenc.lab.cli.engines import engine_json, print_serving
from posenc.lab.cli.options import Json, Quiet, option, with_settings
from posenc.lab.cli.studies import StudyDisplay, print_study, study_json
from posenc.lab.evaluation.settings import ExtensionSettings, Tuning

if TYPE_CHECKING:
    from posenc.lab.evaluation.extend import Extended


@with_settings(ExtensionSettings, complete={"methods": complete_methods})
@with_settings(Tuning, to="tuning")
def extend(
    *,
    fields: dict[str, Any],
    tuning: dict[str, Any],
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            show_default="a small model, trained first",
            help="Folder with config.json and safetensors, or of a run of posenc compare; or "
            "org/name@revision of the hub.",
        ),
    ] = None,
    out: Annotated[Path, option("Output folder for checkpoint and report.")] = Path(
        "posenc-extend"
    ),
    engine: Annotated[
        str | None,
        option(
            "Engine that is to serve it, or several joined by commas: only their methods, and what "
            "to type. vllm, sglang, llama.cpp, mlx or transformers.",
            "none",
            "--for",
        ),
    ] = None,
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
    from posenc.lab.evaluation.choosing import require_learned
    from posenc.lab.evaluation.demo_model import demo_checkpoint
    from posenc.lab.evaluation.extend import extend_checkpoint
    from posenc.lab.training.interrupt import interruptible
    from posenc.storage import require_unused

    require_unused(out)
    settings = ExtensionSettings(**fields)
    settings = replace(settings, tuning=Tuning(**tuning, seed=settings.seed))
    with StudyDisplay(shown=not quiet and not json) as display, interruptible() as stop:
        if checkpoint is None:
            checkpoint = demo_checkpoint(
                out.with_name(f"{out.name}-subject"),
                text=settings.text,
                progress=display,
                stop=stop,
                command=command_line(),
            )
        extended = extend_checkpoint(
            checkpoint,
            out,
            settings,
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
            "posenc.transformers.stretch(model) stretches it once it is loaded."
        )
    OUT.print(f"\nCheckpoint: {out} ({extended.method}). {where}", soft_wrap=True)


def _engines(differences: dict[str, str]) -> str:
    """A sentence on other programs: those that run the extension, and differences of the others."""
    from posenc.lab.reporting.sentences import listed

    alike = [name for name, difference in differences.items() if not difference]
    clauses = [f"{name} {difference}" for name, difference in differences.items() if difference]
    if alike:
        clauses.insert(0, f"{listed(alike)} {'does' if len(alike) == 1 else 'do'} too")
    return f" By their published rules {'; '.join(clauses)}." if clauses else ""
