"""``posenc extend``: a checkpoint for longer contexts, and what that costs."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TaskID, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from posenc.cli.checkpoints import (
    Opened,
    open_checkpoint,
    publish,
    require_free,
    write_checkpoint,
    write_report,
)
from posenc.cli.completion import complete_methods
from posenc.cli.console import ERRORS, OUT, Countdown, Words, print_json
from posenc.cli.material import material_of
from posenc.errors import ArgumentError, Interrupted

if TYPE_CHECKING:
    from posenc.evaluation.candidates import Method
    from posenc.evaluation.finetuning import Tuning
    from posenc.evaluation.results import Metric, Study
    from posenc.evaluation.stretching import Subject

__all__ = ["Display", "extend", "print_study", "subject_of"]


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
    from posenc.evaluation.candidates import methods_for
    from posenc.evaluation.finetuning import Tuning
    from posenc.evaluation.searching import require_search, searched
    from posenc.evaluation.stretching import stretch
    from posenc.evaluation.texts import Text as Read
    from posenc.extension.fitting import require_factor
    from posenc.training.interrupt import interruptible

    require_free(out)
    require_factor(factor)
    tuning = Tuning(steps=finetune_steps, positions=positions, rate=finetune_rate, seed=seed)  # type: ignore[arg-type]  # checked there
    with Display(shown=not quiet and not json) as display:
        if checkpoint is None:
            checkpoint = _subject(out, text, display)
        opened = open_checkpoint(
            checkpoint, trained_length=trained_length, device=device, to_write=True
        )
        methods = methods_for(method, opened.model, length=opened.length)
        require_search(search, methods)
        if not report:
            known = _write_unmeasured(opened, methods, tuning, factor=factor, out=out)
            if json:
                print_json({"out": str(out), "transformers": known})
            else:
                _print_written(out, methods[0].spec, known)
            return
        subject = subject_of(opened)
        material = material_of(
            opened, text=text, images=images, training=bool(finetune_steps or search)
        )
        if search:
            state = out.with_name(f"{out.name}-search.json")
            with interruptible() as stop, continued_by_the_same_command(state):
                assert isinstance(material, Read)  # what is searched for fits decoders alone
                methods = searched(
                    subject,
                    material,
                    methods,
                    factor=factor,
                    budget=search,
                    state=state,
                    tell=display.tell,
                    stop=stop,
                )
        outcome = stretch(
            subject,
            material,
            methods,
            factor=factor,
            tuning=tuning,
            seed=seed,
            always=always,
            tell=display.tell,
        )
    study = replace(outcome.study, command=shlex.join(["posenc", *sys.argv[1:]]))
    if not any(each.writable for each in study.findings):
        raise ArgumentError(
            "--method",
            expected="a method that a checkpoint can hold",
            got=method,
            remedy="Choose another method; posenc evaluate measures a model as it is.",
        )
    known = False
    if outcome.model is None or outcome.method is None:
        write_report(study, out)
    else:
        known = write_checkpoint(
            opened, outcome.model, outcome.method, factor=outcome.factor, out=out, study=study
        )
    if json:
        print_json(study.to_json() | {"out": str(out), "transformers": known})
        return
    print_study(study)
    if outcome.method is None:
        OUT.print("\nNo checkpoint was written (--always writes the best of them).")
    else:
        _print_written(out, outcome.method.spec, known)
    OUT.print(
        Text.assemble("Report: ", (str((out / "report/index.html").resolve()), "bold")),
        soft_wrap=True,
    )


def subject_of(opened: Opened) -> Subject:
    """What the lab measures."""
    from posenc.evaluation.stretching import Subject

    return Subject(opened.folder.resolve().name, opened.family, opened.model, opened.length)


def print_study(study: Study) -> None:
    """The answer and a table, least loss at the longest context first."""
    from posenc.evaluation.verdict import findings, headline

    OUT.print()
    for sentence in headline(study):
        OUT.print(Text(sentence, "bold" if sentence == headline(study)[0] else ""))
    for title, told in findings(study):
        OUT.print(Text(f"\n{title}", "dim"))
        for sentence in told:
            OUT.print(Text(sentence))
    for tuned in (False, True) if study.tuned else (False,):
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        table.add_column("method", style="bold", no_wrap=True)
        for metric in study.metrics:
            for length in _shown(study, metric):
                deciding = metric == study.deciding
                name = f"at {study.called(length)}" if deciding else metric.name
                table.add_column(name, justify="right")
        table.add_column(f"{study.counted}/s", justify="right")
        for each, reading in study.ranked(tuned=tuned):
            values = [
                metric.shown(reading.of(metric)[length])
                for metric in study.metrics
                for length in _shown(study, metric)
            ]
            table.add_row(each.key, *values, reading.speed)
        when = ", after fine-tuning" if tuned else ", without training" if study.tuned else ""
        title = f"\n{study.deciding.name.capitalize()}, {study.deciding.axis}{when}"
        if len(study.metrics) > 1:
            title += f"; the others at {study.called(study.goal)}"
        OUT.print(Text(title, "dim"))
        OUT.print(table)
    for each in study.findings:
        if each.refusal:
            OUT.print(Text(f"{each.key} does not go: {each.refusal}.", "dim"))


def _shown(study: Study, metric: Metric) -> tuple[int, ...]:
    """Lengths that the table has: all of what decides, of others the last."""
    return study.lengths if metric == study.deciding else study.lengths[-1:]


def _print_written(out: Path, spec: str, known: bool) -> None:
    where = "transformers and posenc run it as stretched."
    if not known:
        where = (
            "transformers does not know this method and would run the model as it was; "
            "posenc.integrations.transformers.load reads posenc_extension in its config.json."
        )
    OUT.print(f"\nCheckpoint: {out} ({spec}). {where}", soft_wrap=True)


def _write_unmeasured(
    opened: Opened, methods: Sequence[Method], tuning: Tuning, *, factor: float, out: Path
) -> bool:
    """Stretch a model by one method, and write it; whether transformers runs it so."""
    from posenc.extension import extend_layers
    from posenc.models.replacing import encodings_of, with_encodings

    if len(methods) != 1 or methods[0].of_model or tuning.steps:
        raise ArgumentError(
            "--no-report",
            expected="one method that a checkpoint can hold, and no fine-tuning",
            got=", ".join(method.spec for method in methods)
            + (f" and {tuning.steps} steps" if tuning.steps else ""),
            remedy="Without measuring none can be chosen.",
        )
    (method,) = methods
    stretched = extend_layers(
        encodings_of(opened.model),
        method.name,
        factor=factor,
        length=opened.length,
        **method.options,
    )
    model = with_encodings(opened.model, stretched)
    return write_checkpoint(opened, model, method, factor=factor, out=out, study=None)


def _subject(out: Path, text: Path | None, display: Display) -> Path:
    """The lab's own model beside the output folder, trained if it is not there yet."""
    from posenc.evaluation.demo_model import SUBJECT_STEPS, train_subject
    from posenc.integrations.transformers import save
    from posenc.storage import make_folder
    from posenc.training.interrupt import interruptible
    from posenc.training.loop import Watch

    folder = out.with_name(f"{out.name}-subject")
    if (folder / "config.json").exists():
        return folder
    require_free(folder)
    work = folder.with_name(f"{folder.name}-training")
    make_folder(work)
    with interruptible() as stop, continued_by_the_same_command(work):
        watch = Watch(
            stop=stop,
            stepped=lambda step, loss, speed: display.tell(
                f"training a small model, step {step}, loss {float(loss):.3f}", step, SUBJECT_STEPS
            ),
        )
        model = train_subject(work, text=text, watch=watch)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    save(model, partial)
    publish(partial, folder)
    shutil.rmtree(work, ignore_errors=True)
    return folder


@contextmanager
def continued_by_the_same_command(state: Path) -> Iterator[None]:
    """Say of an interruption where its state is, and how to go on."""
    try:
        yield
    except Interrupted as error:
        command = shlex.join(["posenc", *sys.argv[1:]])
        error.remedy = f"What was done is kept in {state}. To go on: {command}"
        raise


class Display:
    """A bar on a terminal, elsewhere a line for each model."""

    def __init__(self, *, shown: bool) -> None:
        self.shown = shown
        self.live = shown and ERRORS.is_terminal
        self.said = ""
        self.bar = Progress(
            Words("{task.percentage:>3.0f}%"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            Words("{task.fields[left]}"),
            Words("{task.description}", style="dim"),
            console=ERRORS,
            disable=not self.live,
            transient=True,
        )
        self.task: TaskID = self.bar.add_task("", total=1.0, left="")
        self.countdown = Countdown()

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def tell(self, what: str, done: int, total: int) -> None:
        """What is done now, and how much of all."""
        left = self.countdown.left(done / total, 1.0)
        if self.live:
            self.bar.update(self.task, completed=done / total, description=what, left=left)
            return
        brief = what.partition(", step")[0]
        if self.shown and brief != self.said:
            self.said = brief
            ending = f", {left}" if left else ""
            ERRORS.print(f"[{done}/{total}] {brief}{ending}", markup=False)
