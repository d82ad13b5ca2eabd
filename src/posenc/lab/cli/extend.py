"""``posenc extend`` and ``posenc evaluate``: checkpoints measured, as they are or extended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from cyclopts import Parameter
from rich.progress import BarColumn, TimeElapsedColumn

from posenc.lab.cli.console import (
    OUT,
    Countdown,
    Display,
    PlainTextColumn,
    command_line,
    print_json,
    print_report,
    print_study,
)
from posenc.lab.cli.doctor import engine_json, print_serving
from posenc.lab.cli.options import METHODS, PLACE, FromFile, Json, Quiet, with_settings
from posenc.lab.evaluation.settings import (
    EvaluationSettings,
    ExtensionSettings,
    ServedSettings,
    Tuning,
)
from posenc.lab.stores import local_folder, working_folder

if TYPE_CHECKING:
    from posenc.lab.evaluation.extend import Extended
    from posenc.lab.evaluation.results import Study


@with_settings(ExtensionSettings, methods=METHODS)
@with_settings(Tuning, to="tuning")
def extend(
    checkpoint: Annotated[
        PurePath | None,
        PLACE,
        Parameter(
            help="Folder with config.json and safetensors, or of a run of posenc compare; or "
            "org/name@revision of the hub.",
            show_default="a small model, trained first",
        ),
    ] = None,
    /,
    *,
    fields: dict[str, Any] | None = None,
    tuning: dict[str, Any] | None = None,
    out: Annotated[
        PurePath, PLACE, Parameter(help="Output folder for checkpoint and report.")
    ] = Path("posenc-extend"),
    engine: Annotated[
        str | None,
        Parameter(
            name="--for",
            help="Engine that is to serve it, or several joined by commas: only their methods, and "
            "what to type. vllm, sglang, llama.cpp, mlx, ctranslate2, onnxruntime-genai, openvino "
            "or transformers.",
            show_default="none",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    file: FromFile | None = None,
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
    from posenc.lab.folders import require_unused
    from posenc.lab.training.stopping import interruptible

    with (
        working_folder(out) as folder,
        StudyDisplay(shown=not quiet and not json) as display,
        interruptible() as stop,
        ExitStack() as sources,
    ):
        require_unused(folder)
        settings = ExtensionSettings(**(fields or {}))
        settings = replace(settings, tuning=Tuning(**(tuning or {}), seed=settings.seed))
        if checkpoint is None:
            source = demo_checkpoint(
                folder.with_name(f"{folder.name}-subject"),
                text=settings.text,
                progress=display,
                stop=stop,
                command=command_line(),
            )
        else:
            source = sources.enter_context(local_folder(checkpoint))
        extended = extend_checkpoint(
            source,
            folder,
            settings,
            engine=engine,
            command=command_line(),
            progress=display,
            stop=stop,
        )
    if json:
        study = {} if extended.study is None else _study_json(extended.study)
        served = {"transformers": extended.native, "engines": extended.engines}
        served |= engine_json(extended)
        print_json(study | {"out": str(out)} | served)
    else:
        _print(extended, out)
    if extended.study is not None and extended.method is None:
        require_learned(extended.study)


def _print(extended: Extended, out: PurePath) -> None:
    if extended.study is not None:
        _print_study(extended.study)
    if extended.method is None:
        OUT.print("\nNo checkpoint was written (--always writes the best of them).")
    else:
        _print_written(out, extended)
    print_serving(extended)
    if extended.study is not None:
        print_report(out / "report/index.html", gap="")


def _print_written(out: PurePath, extended: Extended) -> None:
    where = f"transformers runs it as stretched.{_engines(extended.engines)}"
    if not extended.native:
        where = (
            "transformers does not know this method and would run the model as it was; "
            "posenc.transformers.stretch(model) stretches it once it is loaded."
        )
    OUT.print(f"\nCheckpoint: {out} ({extended.method}). {where}", soft_wrap=True)


def _engines(differences: dict[str, str]) -> str:
    """A sentence on other programs: those that run the extension, and differences of the others."""
    from posenc.lab.reporting.numbers import listed

    alike = [name for name, difference in differences.items() if not difference]
    clauses = [f"{name} {difference}" for name, difference in differences.items() if difference]
    if alike:
        clauses.insert(0, f"{listed(alike)} {'does' if len(alike) == 1 else 'do'} too")
    return f" By their published rules {'; '.join(clauses)}." if clauses else ""


@with_settings(EvaluationSettings)
@with_settings(ServedSettings, to="served")
def evaluate(
    checkpoint: Annotated[
        PurePath | None,
        PLACE,
        Parameter(
            help="Folder with config.json and safetensors, or org/name@revision.",
            show_default="the model at --endpoint",
        ),
    ] = None,
    /,
    *,
    fields: dict[str, Any] | None = None,
    served: dict[str, Any] | None = None,
    out: Annotated[PurePath, PLACE, Parameter(help="Output folder for the report.")] = Path(
        "posenc-evaluate"
    ),
    json: Json = False,
    quiet: Quiet = False,
    file: FromFile | None = None,
) -> None:
    """Measure a checkpoint as it is, and say how far it reads.

    The effective length is the longest up to which loss, needles and answers (RULER's tasks and
    more, made for the tokenizer) are within --margin of their own values at the trained length,
    or at the length up to which the model really was trained, if config.json overstates it. After
    Ctrl-C the same command continues.

    Longer inputs of text encoders (BERT) are cut to the length of their position table; for larger
    images the table of a ViT is interpolated. A model that does not beat the frequencies of bytes
    or tokens has its figures reported, but fails.

    A model that is already served is asked questions (by default all tasks) through OpenAI's
    protocol: by log-probability where the server gives those of a prompt, else by what it writes.
    A key is read from OPENAI_API_KEY and written nowhere.

    Examples:

        posenc evaluate llama-folder --text book.txt

        posenc evaluate longer --lengths 512,1024,2048,4096

        posenc evaluate qwen3 --device cuda --dtype bfloat16 --minutes 30

        posenc evaluate vit-folder --images photos

        posenc evaluate --endpoint http://localhost:8000/v1 --model NAME --text book.txt
    """
    from posenc.lab.evaluation.choosing import require_learned
    from posenc.lab.evaluation.progress import kept
    from posenc.lab.evaluation.report import write_study
    from posenc.lab.folders import output_folder, require_unused
    from posenc.lab.training.stopping import interruptible

    asked = ServedSettings(**(served or {}))
    _require_one_model(checkpoint, asked)
    with working_folder(out) as folder:
        require_unused(folder)
        settings = EvaluationSettings(**(fields or {}))
        state = folder.with_name(f"{folder.name}-measured.json")
        with (
            StudyDisplay(shown=not quiet and not json) as display,
            interruptible() as stop,
            kept(state, command_line()),
        ):
            steps: _Steps = {"progress": display, "state": state, "stop": stop}
            if checkpoint is None:
                study = _of_served(asked, settings, steps)
            else:
                with local_folder(checkpoint) as source:
                    study = _of_checkpoint(source, settings, steps)
        study = replace(study, command=command_line())
        with output_folder(folder) as partial:
            write_study(study, partial)
        state.unlink(missing_ok=True)
    if json:
        print_json(_study_json(study))
    else:
        _print_study(study)
        print_report(out / "index.html")
    require_learned(study)


class _Steps(TypedDict):
    """How measurements report, are kept and stop; see ``evaluation.evaluate.evaluate``."""

    progress: StudyDisplay
    state: Path
    stop: Callable[[], bool]


def _require_one_model(checkpoint: PurePath | None, served: ServedSettings) -> None:
    """Refuse a checkpoint beside an endpoint, neither of them, or options without an endpoint.

    Raises:
        ArgumentError: naming what is missing, or too much.
    """
    from posenc.errors import ArgumentError

    remedy = "Give a folder, or --endpoint http://localhost:8000/v1 --model NAME."
    if served.endpoint is None:
        for name in ("model", "tokenizer"):
            if getattr(served, name) is not None:
                got = getattr(served, name)
                expected = "none, without --endpoint"
                raise ArgumentError(name, expected=expected, got=got, remedy=remedy)
    elif served.model is None:
        expected = "the name of a model that --endpoint serves"
        raise ArgumentError("model", expected=expected, got="none", remedy=remedy)
    if (checkpoint is None) == (served.endpoint is None):
        got = "neither" if checkpoint is None else "both"  # an address may hold what is secret
        expected = "a checkpoint or an endpoint"
        raise ArgumentError("checkpoint", expected=expected, got=got, remedy=remedy)


def _of_checkpoint(source: Path, settings: EvaluationSettings, steps: _Steps) -> Study:
    from posenc.lab.evaluation.checkpoint import Checkpoint
    from posenc.lab.evaluation.evaluate import evaluate as measure

    opened = Checkpoint.open(
        source, trained_length=settings.trained_length, device=settings.device, dtype=settings.dtype
    )
    data = opened.data(text=settings.text, images=settings.images)
    if settings.dtype == "auto":
        opened.in_fastest_dtype(data)
    return measure(opened, data, settings, **steps)


def _of_served(served: ServedSettings, settings: EvaluationSettings, steps: _Steps) -> Study:
    from posenc.lab.evaluation.endpoint import Endpoint
    from posenc.lab.evaluation.served import evaluate_served

    assert served.endpoint is not None  # as ``_require_one_model`` sees to
    assert served.model is not None
    endpoint = Endpoint(served.endpoint, served.model, timeout=served.timeout)
    return evaluate_served(endpoint, settings, served, **steps)


def _print_study(study: Study) -> None:
    from posenc.lab.evaluation.report import tables
    from posenc.lab.evaluation.summary import answer, opening

    print_study(opening(study), reversed(tables(study)), answer(study))


def _study_json(study: Study) -> dict[str, Any]:
    """The numbers of a study, with its findings in words."""
    from posenc.lab.evaluation.summary import answer, opening

    return opening(study).to_json() | {"answer": answer(study)} | study.to_json()


class StudyDisplay(Display):
    """A bar on a terminal, elsewhere a line for each model."""

    def __init__(self, *, shown: bool) -> None:
        super().__init__(
            PlainTextColumn("{task.percentage:>3.0f}%"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            PlainTextColumn("{task.fields[left]}"),
            PlainTextColumn("{task.description}", style="dim"),
            shown=shown,
        )
        self.shown_stage = ""
        self.task = self.bars.add_task("", total=1.0, left="")
        self.countdown = Countdown()

    def __call__(self, stage: str, done: float, total: int) -> None:
        """Show the current stage, and how much of all is done."""
        from posenc.lab.evaluation.progress import PLANNED

        if stage.startswith(PLANNED):
            self.emit(stage.capitalize())
            return
        left = self.countdown.left(done / total, 1.0)
        if self.live:
            self.bars.update(self.task, completed=done / total, description=stage, left=left)
            return
        brief = stage.partition(", step")[0]
        if brief != self.shown_stage:
            self.shown_stage = brief
            self.emit(f"[{int(done)}/{total}] {brief}" + (f", {left}" if left else ""))
