"""``posenc translate``: train on a parallel text, and translate a file."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from posenc.cli.completion import complete_encoding
from posenc.cli.console import ERRORS, EXIT_CODES, OUT, Words, help_of, print_json
from posenc.errors import ArgumentError, OutputError

if TYPE_CHECKING:
    from posenc.experiments.translation.settings import TranslatorSettings
    from posenc.experiments.translation.training import Event, Report

__all__ = ["translate"]

translate = typer.Typer(
    name="translate",
    help="Train a translator on a parallel text of your own, and translate files with it.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)


def train(
    text: Annotated[
        Path | None,
        typer.Option(
            show_default="the text with --resume",
            help="A sentence, a tab and its translation a line; or sentences alone.",
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(show_default="none", help="The translations of --text, line by line."),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(
            show_default="sinusoidal",
            help="Of positions: rope, t5, …",
            autocompletion=complete_encoding,
        ),
    ] = None,
    cross_encoding: Annotated[
        str | None,
        typer.Option(show_default="nope", help="Of the attention from target to source."),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(show_default="2000", help="Subwords of both languages.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(show_default="128", help="Subwords of the longest line.")
    ] = None,
    width: Annotated[int | None, typer.Option(show_default="128", help="Model width.")] = None,
    layers: Annotated[
        int | None, typer.Option(show_default="2", help="Of encoder and of decoder.")
    ] = None,
    heads: Annotated[int | None, typer.Option(show_default="4", help="Attention heads.")] = None,
    dropout: Annotated[
        float | None, typer.Option(show_default="0.1", help="While training.")
    ] = None,
    smoothing: Annotated[float | None, typer.Option(show_default="0.1", help="Of labels.")] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(show_default="1024", help="Tokens a batch.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(show_default="4000", help="Training steps at most.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(show_default="200", help="Steps between two looks at the validation pairs."),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(show_default="5", help="Stop after so many looks without a lower loss."),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(show_default="400", help="Steps of a rising rate.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(show_default="0.002", help="At its peak.")
    ] = None,
    beams: Annotated[
        int | None, typer.Option(show_default="4", help="Of the search scored at the end.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(show_default="0", help="Of weights, order and dropout.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(show_default="cpu", help="cpu, cuda, cuda:N or mps.")
    ] = None,
    threads: Annotated[int | None, typer.Option(show_default="2", help="CPU threads.")] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out pairs with an empty or over-long side.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the translator.")] = Path("translator"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in OUT.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the translator that is in OUT.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Train on a parallel text until it no longer gets better, and score held-out sentences.

    A subword vocabulary is learned first; a tenth of the pairs is held out, half of it to know
    when to stop and half for the BLEU at the end. Ctrl-C saves; --resume goes on to the same bits.

    Examples:

        posenc translate train --text pairs.tsv --out german

        posenc translate train --text train.en --target train.de --encoding rope

        posenc translate train --resume --out german
    """
    chosen: dict[str, Any] = {
        "text": text,
        "target": target,
        "encoding": encoding,
        "cross_encoding": cross_encoding,
        "vocabulary": vocabulary,
        "max_length": max_length,
        "width": width,
        "layers": layers,
        "heads": heads,
        "dropout": dropout,
        "smoothing": smoothing,
        "batch_tokens": batch_tokens,
        "steps": steps,
        "every": every,
        "patience": patience,
        "warmup": warmup,
        "learning_rate": learning_rate,
        "beams": beams,
        "seed": seed,
        "device": device,
        "threads": threads,
        "skip_bad": skip_bad or None,
    }
    given = {name: value for name, value in chosen.items() if value is not None}
    settings = _settings(out, given, resume=resume, replace=replace)
    from posenc.experiments.translation.training import train_translator

    with _Display(settings, shown=not quiet and not json) as display:
        report = train_translator(settings, progress=display)
    if json:
        print_json(dataclasses.asdict(report) | {"model": str(out / "model")})
    else:
        _print_report(report, out)


def run(
    model: Annotated[Path, typer.Argument(help="Folder that posenc translate train has written.")],
    file: Annotated[
        Path | None, typer.Argument(help="Sentences, one a line; standard input by default.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", show_default="standard output", help="A file.")
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(show_default="none", help="Right translations, line by line: prints BLEU."),
    ] = None,
    beams: Annotated[int, typer.Option(help="1 always takes the likeliest subword.")] = 4,
    length_penalty: Annotated[float, typer.Option(help="More favours longer ones.")] = 0.6,
    drop_unknown: Annotated[
        bool, typer.Option("--drop-unknown", help="Leave out characters it was not trained on.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or mps.")] = "cpu",
) -> None:
    """Translate a file line by line; empty lines stay empty.

    Examples:

        posenc translate run german book.en --output book.de

        echo "the house" | posenc translate run german

        posenc translate run german test.en --reference test.de
    """
    from posenc.experiments.translation import Translator, read_lines
    from posenc.experiments.translation.parallel import decoded, require_equal
    from posenc.experiments.translation.scoring import bleu
    from posenc.storage import write_bytes

    if output is not None and output.is_dir():
        raise OutputError(
            "--output", expected="a file to write", got=f"{output}, a folder", remedy="Name a file."
        )
    folder = model / "model" if (model / "model").is_dir() else model
    translator = Translator.load(folder, device=device)
    where = "standard input" if file is None else str(file)
    lines = decoded(sys.stdin.buffer.read(), where) if file is None else read_lines(file)
    references = None if reference is None else read_lines(reference, "--reference")
    if references is not None:
        require_equal(lines, references, where, str(reference), "--reference")
    with _bar() as bar:
        task = bar.add_task("translates", total=len(lines), note="")
        written = translator.translate(
            lines,
            beams=beams,
            length_penalty=length_penalty,
            where=where,
            drop_unknown=drop_unknown,
            done=lambda count: bar.update(task, completed=count),
        )
    text = "".join(f"{line}\n" for line in written).encode()
    if output is None:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        write_bytes(output, text)
    if references is not None:
        score, signature = bleu(written, references)
        ERRORS.print(f"BLEU {score:.2f} ({signature})", markup=False, soft_wrap=True)


translate.command("train", help=help_of(train))(train)
translate.command("run", help=help_of(run))(run)


def _settings(
    out: Path, given: dict[str, Any], *, resume: bool, replace: bool
) -> TranslatorSettings:
    from posenc.experiments.translation.folder import load_settings
    from posenc.experiments.translation.settings import TranslatorSettings

    if resume and replace:
        raise ArgumentError(
            "--resume", expected="--resume or --replace", got="both", remedy="Leave one out."
        )
    if resume:
        return dataclasses.replace(load_settings(out), **given)
    if "text" not in given:
        raise ArgumentError(
            "--text",
            expected="a parallel text",
            got="none",
            remedy="Give --text FILE.tsv, or --text SOURCE --target TARGET.",
        )
    return TranslatorSettings(out=out, existing="replace" if replace else "refuse", **given)


def _bar() -> Progress:
    return Progress(
        Words("{task.description}"),
        BarColumn(bar_width=24),
        Words("{task.percentage:>3.0f}%"),
        Words("{task.fields[note]}", style="dim"),
        TimeRemainingColumn(compact=True),
        console=ERRORS,
        disable=not ERRORS.is_terminal,
        transient=True,
    )


class _Display:
    """Shows training: a bar on a terminal, and a line at every look at the validation pairs."""

    def __init__(self, settings: TranslatorSettings, *, shown: bool) -> None:
        self.settings, self.shown = settings, shown
        self.bar = _bar()
        self.bar.disable = self.bar.disable or not shown
        self.task = self.bar.add_task("trains", total=settings.steps, note="")

    def __enter__(self) -> _Display:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def say(self, text: str, style: str = "") -> None:
        if self.shown:
            ERRORS.print(text, style=style, markup=False, soft_wrap=True)

    def __call__(self, event: Event) -> None:
        from posenc.experiments.translation.training import Prepared

        if isinstance(event, Prepared):
            out = f", {event.skipped:,} left out" if event.skipped else ""
            self.say(
                f"{event.train:,} pairs to train on, {event.validation:,} to validate with, "
                f"{event.test:,} to test{out}; {event.vocabulary:,} subwords; "
                f"{event.parameters / 1e6:.1f} M parameters, {self.settings.encoding}"
            )
            if event.step:
                self.say(f"goes on after step {event.step}", "dim")
            self.bar.update(self.task, completed=event.step)
            return
        self.bar.update(self.task, completed=event.step, note=f"loss {event.loss:.3f}")
        if event.validation is not None:
            best = ", the lowest so far" if event.best else ""
            self.say(f"step {event.step}: validation {event.validation:.3f} nats a token{best}")


def _print_report(report: Report, out: Path) -> None:
    early = "stopped, as it no longer got better" if report.stopped_early else "all done"
    OUT.print(
        f"BLEU {report.bleu:.2f}, chrF {report.chrf:.2f} on {report.pairs[2]:,} held-out pairs "
        f"({report.signature})",
        style="bold",
        soft_wrap=True,
    )
    OUT.print(
        f"{report.steps} steps in {report.seconds:.0f} s, {early}; the model is that of step "
        f"{report.best_step}.",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("source", "translation", "reference"):
        table.add_column(title, overflow="fold")
    for row in report.examples:
        table.add_row(*(Text(cell) for cell in row))
    OUT.print(table)
    OUT.print(f"Translate with: posenc translate run {out} FILE", style="dim", soft_wrap=True)
