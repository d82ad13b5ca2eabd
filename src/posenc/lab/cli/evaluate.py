"""``posenc evaluate``: a checkpoint measured at short and long contexts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.lab.cli.console import command_line, print_json, print_report
from posenc.lab.cli.options import Json, Quiet, option, with_settings
from posenc.lab.cli.studies import StudyDisplay, print_study, study_json
from posenc.lab.evaluation.settings import EvaluationSettings


@with_settings(EvaluationSettings)
def evaluate(
    *,
    fields: dict[str, Any],
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder with config.json and safetensors, or org/name@revision.")
    ],
    out: Annotated[Path, option("Output folder for the report.")] = Path("posenc-evaluate"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a checkpoint as it is, and say how far it reads.

    The effective length is the longest up to which loss, needles and answers (RULER's tasks and
    more, made for the tokenizer) are within --margin of their own values at the trained length,
    or at the length up to which the model really was trained, if config.json overstates it. After
    Ctrl-C the same command continues.

    Longer inputs of text encoders (BERT) are cut to the length of their position table; for larger
    images the table of a ViT is interpolated. A model that does not beat the frequencies of bytes
    or tokens has its figures reported, but fails.

    Examples:

        posenc evaluate llama-folder --text book.txt

        posenc evaluate longer --lengths 512,1024,2048,4096

        posenc evaluate qwen3 --device cuda --dtype bfloat16 --minutes 30

        posenc evaluate vit-folder --images photos
    """
    from posenc.lab.evaluation.checkpoint import Checkpoint
    from posenc.lab.evaluation.choosing import require_learned
    from posenc.lab.evaluation.evaluate import evaluate as measure
    from posenc.lab.evaluation.progress import kept
    from posenc.lab.evaluation.report import write_study
    from posenc.lab.training.interrupt import interruptible
    from posenc.storage import output_folder, require_unused

    require_unused(out)
    settings = EvaluationSettings(**fields)
    state = out.with_name(f"{out.name}-measured.json")
    with (
        StudyDisplay(shown=not quiet and not json) as display,
        interruptible() as stop,
        kept(state, command_line()),
    ):
        opened = Checkpoint.open(
            checkpoint,
            trained_length=settings.trained_length,
            device=settings.device,
            dtype=settings.dtype,
        )
        data = opened.data(text=settings.text, images=settings.images)
        study = measure(opened, data, settings, progress=display, state=state, stop=stop)
    study = replace(study, command=command_line())
    with output_folder(out) as partial:
        write_study(study, partial)
    state.unlink(missing_ok=True)
    if json:
        print_json(study_json(study))
    else:
        print_study(study)
        print_report(out / "index.html")
    require_learned(study)
