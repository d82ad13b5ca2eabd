"""Command line of the translator: ``train`` and ``run``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import examples.translation
from examples.translation.settings import Settings
from examples.translation.training import Existing, load_settings, train_translator
from examples.translation.translator import Translator
from posenc.errors import ArgumentError, OutputError, PosencError
from posenc.lab.cli.console import exit_code, print_error, print_json
from posenc.lab.experiments.sequences import bleu, decoded, read_lines, require_equal
from posenc.storage import write_bytes


def train(arguments: argparse.Namespace) -> None:
    """Train, and print scores and examples."""
    given: dict[str, Any] = vars(arguments)
    out, quiet = given["out"], given["quiet"] or given["json"]
    existing: Existing = "refuse"
    if given["resume"] and given["replace"]:
        raise ArgumentError(
            "--resume", expected="--resume or --replace", got="both", remedy="Leave one out."
        )
    chosen = {f.name: given[f.name] for f in dataclasses.fields(Settings) if f.name in given}
    if given["resume"]:
        existing, settings = "resume", dataclasses.replace(load_settings(out), **chosen)
    else:
        if "text" not in chosen:
            remedy = "Give --text FILE.tsv, or --text SOURCE --target TARGET."
            raise ArgumentError("--text", expected="a parallel text", got="none", remedy=remedy)
        existing = "replace" if given["replace"] else "refuse"
        settings = Settings(**chosen)

    def tell(line: str) -> None:
        if not quiet:
            print(f"\r{line}" if sys.stderr.isatty() else line, file=sys.stderr)

    def stepped(step: int, loss: float) -> None:
        if not quiet and sys.stderr.isatty():
            bar = f"\rstep {step} of {settings.steps}, loss {loss:.3f} "
            print(bar, end="", file=sys.stderr, flush=True)

    report = train_translator(settings, out, existing=existing, tell=tell, stepped=stepped)
    if given["json"]:
        print_json(dataclasses.asdict(report) | {"model": str(out / "model")})
        return
    early = "stopped, as it no longer got better" if report.stopped_early else "all done"
    print(
        f"BLEU {report.bleu:.2f}, chrF {report.chrf:.2f} on {report.pairs[2]:,} held-out pairs "
        f"({report.signature})\n"
        f"{report.steps} steps in {report.seconds:.0f} s, {early}; the model is that of step "
        f"{report.best_step}."
    )
    for source, translation, reference in report.examples:
        print(f"\nsource:      {source}\ntranslation: {translation}\nreference:   {reference}")
    print(f"\nTranslate with: python -m examples.translation run {out} FILE")


def run(arguments: argparse.Namespace) -> None:
    """Translate a file, or standard input."""
    file, output, reference = arguments.file, arguments.output, arguments.reference
    if output is not None and output.is_dir():
        raise OutputError(
            "--output", expected="a file to write", got=f"{output}, a folder", remedy="Name a file."
        )
    folder = arguments.model / "model" if (arguments.model / "model").is_dir() else arguments.model
    translator = Translator.load(folder, device=arguments.device)
    where = "standard input" if file is None else str(file)
    lines = decoded(sys.stdin.buffer.read(), where) if file is None else read_lines(file)
    references = None if reference is None else read_lines(reference, "--reference")
    if references is not None:
        require_equal(lines, references, where, str(reference), "--reference")

    def done(count: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if count == len(lines) else ""
            print(f"\r{count} of {len(lines)} lines", end=end, file=sys.stderr, flush=True)

    written = translator.translate(
        lines,
        beams=arguments.beams,
        length_penalty=arguments.length_penalty,
        where=where,
        drop_unknown=arguments.drop_unknown,
        done=done,
    )
    text = "".join(f"{line}\n" for line in written).encode()
    if output is None:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        write_bytes(output, text)
    if references is not None:
        score, signature = bleu(written, references)
        print(f"BLEU {score:.2f} ({signature})", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """The command line; options of ``train`` are the fields of ``Settings``."""
    whole = argparse.ArgumentParser(
        prog="python -m examples.translation",
        description=examples.translation.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(required=True)
    training = commands.add_parser("train", help="train on a parallel text")
    training.set_defaults(command=train)
    hints = get_type_hints(Settings, include_extras=True)
    for option in dataclasses.fields(Settings):
        kind, *_, text = get_args(hints[option.name])
        name = f"--{option.name.replace('_', '-')}"
        if kind is bool:
            training.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=text)
            continue
        text += f" (default: {option.default})" if kind in (int, float, str) else ""
        kind = kind if kind in (int, float, str) else Path
        training.add_argument(name, type=kind, default=argparse.SUPPRESS, help=text)
    for name, text in (
        ("resume", "go on with what is in OUT"),
        ("replace", "replace the translator that is in OUT"),
        ("json", "print the report as JSON"),
        ("quiet", "no progress"),
    ):
        training.add_argument(f"--{name}", action="store_true", help=text)
    default = Path("translator")
    training.add_argument("--out", type=Path, default=default, help="(default: translator)")
    running = commands.add_parser("run", help="translate a file line by line")
    running.set_defaults(command=run)
    running.add_argument("model", type=Path, help="folder that train has written")
    running.add_argument(
        "file", type=Path, nargs="?", help="sentences, one a line (default: stdin)"
    )
    running.add_argument("-o", "--output", type=Path, help="a file (default: standard output)")
    running.add_argument("--reference", type=Path, help="right translations: prints BLEU")
    running.add_argument("--beams", type=int, default=4, help="(default: 4)")
    running.add_argument("--length-penalty", type=float, default=0.6, help="(default: 0.6)")
    running.add_argument(
        "--drop-unknown", action="store_true", help="leave out characters it was not trained on"
    )
    running.add_argument("--device", default="cpu", help="(default: cpu)")
    return whole


def main() -> None:
    """Run a command; errors go to standard error, with the exit codes of ``posenc``."""
    arguments = parser().parse_args()
    try:
        arguments.command(arguments)
    except PosencError as error:
        print_error(error)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
