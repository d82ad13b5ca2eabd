"""Extend a checkpoint folder: measure methods on it, choose one, and write it with a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posenc.errors import ArgumentError, DataError, Interrupted
from posenc.extension import EXTENSIONS, Found, applicable, search_factors
from posenc.lab.evaluation.candidates import Method, extended_by, methods_for
from posenc.lab.evaluation.checkpoint import Checkpoint
from posenc.lab.evaluation.progress import Progress, StoredLosses, kept, silent
from posenc.lab.evaluation.results import Study
from posenc.lab.evaluation.settings import ExtensionSettings, Tuning
from posenc.lab.evaluation.study import measure_extensions
from posenc.lab.evaluation.texts import Text
from posenc.lab.experiments.text_loss import Targets, at_device
from posenc.lab.folders import output_folder, require_unused
from posenc.lab.reporting.numbers import listed
from posenc.transformers.checkpoints import Fields
from posenc.transformers.engines import differences, engine_named, for_engines
from posenc.transformers.engines.config import Engine, ModelConfig
from posenc.transformers.engines.serving import Serving, serving
from posenc.transformers.engines.transformers import TRANSFORMERS
from posenc.transformers.live import LiveModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Extended:
    """The output of ``extend_checkpoint``.

    Args:
        out: the folder.
        study: the measurements, reported in ``out/report``; None: unmeasured.
        method: the one written; None: ``out`` has the report alone.
        native: transformers runs the checkpoint as extended.
        engines: how others serve what transformers runs, in words; "" where they do as it does.
        serving: commands for the engines that were asked for.
        left_out: methods that they do not serve, and why.
    """

    out: Path
    study: Study | None
    method: str | None
    native: bool
    engines: dict[str, str] = field(default_factory=dict)
    serving: tuple[Serving, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)


def extend_checkpoint(
    source: Path | str | PreTrainedModel,
    out: Path,
    settings: ExtensionSettings | None = None,
    *,
    engine: str | None = None,
    command: str = "",
    progress: Progress = silent,
    stop: Callable[[], bool] = lambda: False,
    **fields: Any,
) -> Extended:
    """Extend a checkpoint by the best of some methods, measure it, and write it with a report.

    If stopped, it keeps its progress beside ``out``, and the same call continues from there. The
    input is not changed.

    Args:
        source: folder of the checkpoint or its name on the hub, see ``Checkpoint.open``; or a
            loaded model, see ``Checkpoint.of_model``.
        out: new or empty folder.
        settings: by default those of ``ExtensionSettings``.
        engine: only methods that it serves, or all of several with commas in between; see
            ``engine_named``.
        command: the calling command, for the report and for messages.
        progress: called as the work proceeds.
        stop: called between measurements; True raises ``Interrupted``.
        **fields: of ``ExtensionSettings``, over ``settings``: ``methods="all", factor=2.0``.

    Raises:
        OutputError: if ``out`` is in use or cannot be written to.
        CheckpointError: if the checkpoint cannot be read or, extended, be written.
        ArgumentError: if methods or options do not fit it.
        DataError: if the text or images are unusable.
        Interrupted: on ``stop``.
    """
    require_unused(out)
    settings = replace(settings or ExtensionSettings(), **fields)
    asked = [] if engine is None else [engine_named(name.strip()) for name in engine.split(",")]
    trained = settings.trained_length
    if isinstance(source, Path | str):
        checkpoint = Checkpoint.open(
            source, trained_length=trained, device=settings.device, extendable=True
        )
    else:
        checkpoint = Checkpoint.of_model(source, trained_length=trained, extendable=True)
    model, length = checkpoint.model, checkpoint.length
    assert isinstance(model, LiveModel)  # others are not extendable
    chosen = methods_for(settings.methods, model, length=length)
    left_out: dict[str, str] = {}
    if asked:
        chosen, left_out = served_methods(
            chosen, model, asked, factor=settings.factor, length=length
        )
    require_search(settings.search, chosen)
    if settings.report:
        own = isinstance(source, Path | str)
        extended = _measured(checkpoint, out, chosen, settings, command, progress, stop, own=own)
    else:
        method = _unmeasured(chosen, settings.tuning)
        candidate = extended_by(model, method, factor=settings.factor, length=length)
        assert isinstance(candidate.model, LiveModel)  # not a method of models
        extended = _written(checkpoint, out, candidate.model, method, settings, None)
    extended = replace(extended, left_out=left_out)
    return extended if extended.method is None else _served(extended, asked, checkpoint, settings)


def _measured(
    checkpoint: Checkpoint,
    out: Path,
    methods: Sequence[Method],
    settings: ExtensionSettings,
    command: str,
    progress: Progress,
    stop: Callable[[], bool],
    *,
    own: bool,
) -> Extended:
    """The folder with the best of some methods, measured; see ``extend_checkpoint``.

    Args:
        own: the model was opened here, so that it may be cast.
    """
    tuning, factor = settings.tuning, settings.factor
    data = checkpoint.data(
        text=settings.text, images=settings.images, training=bool(tuning.steps or settings.search)
    )
    if own and not tuning.steps:
        checkpoint.in_fastest_dtype(data)
    if settings.search:
        assert isinstance(data, Text)  # only decoders have factors to search
        search_file = out.with_name(f"{out.name}-search.json")
        with kept(search_file, command):
            methods = searched(
                checkpoint,
                data,
                methods,
                factor=factor,
                budget=settings.search,
                state=search_file,
                progress=progress,
                stop=stop,
            )
    state = out.with_name(f"{out.name}-measured.json")
    with kept(state, command):
        result = measure_extensions(
            checkpoint,
            data,
            methods,
            factor=factor,
            tuning=tuning,
            seed=settings.seed,
            always=settings.always,
            minutes=settings.minutes,
            progress=progress,
            state=state,
            stop=stop,
        )
        study = replace(result.study, command=command)
        extended = _written(checkpoint, out, result.model, result.method, settings, study)
    state.unlink(missing_ok=True)
    return extended


def _written(
    checkpoint: Checkpoint,
    out: Path,
    model: LiveModel | None,
    method: Method | None,
    settings: ExtensionSettings,
    study: Study | None,
) -> Extended:
    """The folder with the extended model and its report, or with the report alone."""
    if model is None or method is None:
        from posenc.lab.evaluation.report import write_study

        assert study is not None  # none was good enough
        with output_folder(out) as partial:
            write_study(study, partial / "report")
        return Extended(out, study, None, native=False)
    longest = round(settings.factor * checkpoint.length)
    native = checkpoint.write(model, out, longest=longest, study=study)
    return Extended(out, study, method.spec, native)


def _unmeasured(methods: Sequence[Method], tuning: Tuning) -> Method:
    """The only method, if it can be written without measuring.

    Raises:
        ArgumentError: if it cannot.
    """
    if len(methods) == 1 and not methods[0].of_model and not tuning.steps:
        return methods[0]
    steps = [f"{tuning.steps} steps"] if tuning.steps else []
    raise ArgumentError(
        "report",
        expected="one method that a checkpoint can hold, and no fine-tuning",
        got=" and ".join([", ".join(method.spec for method in methods), *steps]),
        remedy="Without measuring none can be chosen.",
    )


def _served(
    extended: Extended,
    engines: Sequence[Engine],
    checkpoint: Checkpoint,
    settings: ExtensionSettings,
) -> Extended:
    """The result with what engines make of the written folder."""
    config = Fields.read(extended.out).values
    length = checkpoint.length
    if extended.native:
        extended = replace(extended, engines=differences(config, length=length))
    original = "" if settings.tuning.steps else checkpoint.words
    goal = round(settings.factor * length)
    return replace(
        extended,
        serving=tuple(serving(one, config, extended.out, original, goal) for one in engines),
    )


UNKNOWN = "is known to no engine"


def served_methods(
    methods: Sequence[Method],
    model: LiveModel,
    engines: Sequence[Engine],
    *,
    factor: float,
    length: int,
) -> tuple[list[Method], dict[str, str]]:
    """The methods that all of some engines serve, and why not the others, by their specs.

    Methods that do not fit the model are left in, to be refused with their reason.

    Raises:
        ArgumentError: if they serve none of them; the remedy names the nearest that they serve.
    """
    served, left = [], {}
    for method in methods:
        try:
            config = _config(method, model, factor=factor, length=length)
        except ArgumentError:
            served.append(method)
            continue
        why = _differences(config, engines, length)
        if why:
            left[method.spec] = why
        else:
            served.append(method)
    if served:
        return served, left
    near = nearest(methods[0], model, engines, factor=factor, length=length)
    words = "; ".join(f"{spec} {why}" for spec, why in left.items())
    names = listed([engine.name for engine in engines])
    they, serve = ("it", "serves") if len(engines) == 1 else ("all", "serve")
    none = f"{they.capitalize()} {serve} none for this model."
    raise ArgumentError(
        "method",
        expected=f"one that {names} {serve}",
        got=words,
        remedy=f"The nearest that {they} {serve}: {near}." if near else none,
    )


def nearest(
    method: Method, model: LiveModel, engines: Sequence[Engine], *, factor: float, length: int
) -> str:
    """The method that engines serve with frequencies nearest to another's; "": there is none.

    Methods without frequencies of their own are nearest to YaRN.
    """

    def config_by(spec: str) -> ModelConfig | None:
        with suppress(ArgumentError):
            return _config(Method.parse(spec), model, factor=factor, length=length)
        return None

    goal = int(factor * length)
    wanted = config_by(method.spec) or config_by("yarn")
    distances: dict[str, float] = {}
    for name in applicable(model.trained_encoding()):
        if name == "direct" or not EXTENSIONS[name].claims.transformers:
            continue
        config = config_by(name)
        if config is not None and not _differences(config, engines, length):
            distances[name] = 0.0 if wanted is None else _distance(wanted, config, goal)
    return min(distances, key=lambda name: distances[name], default="")


def _config(method: Method, model: LiveModel, *, factor: float, length: int) -> ModelConfig | None:
    """The config of the extended model; None if its fields cannot express the extension.

    Raises:
        ArgumentError: if the method does not fit.
    """
    extended = extended_by(model, method, factor=factor, length=length).model
    if not isinstance(extended, LiveModel) or not extended.served or extended.served == "table":
        return None
    return ModelConfig.of(for_engines(extended.model.config.to_dict()))


def _differences(config: ModelConfig | None, engines: Sequence[Engine], length: int) -> str:
    """Differences of engines' rotations from transformers', in words; "" where there is none."""
    by_engine = {engine.name: _difference(config, engine, length) for engine in engines}
    if len(set(by_engine.values())) == 1:
        return next(iter(by_engine.values()))
    return " and ".join(f"{why} in {name}" for name, why in by_engine.items() if why)


def _difference(config: ModelConfig | None, engine: Engine, length: int) -> str:
    if config is None:
        return UNKNOWN
    if engine is TRANSFORMERS:
        return ""
    return differences(engine.with_options(config), length=length).get(engine.name, UNKNOWN)


def _distance(one: ModelConfig, other: ModelConfig, length: int) -> float:
    """Mean distance of logarithms of frequencies."""
    rotations = [next(iter(TRANSFORMERS.rotations(c, length).values())) for c in (one, other)]
    pairs = list(zip(*(rotation.frequencies for rotation in rotations), strict=True))
    return sum(abs(math.log(a / b)) for a, b in pairs if a and b) / len(pairs)


SEARCHED = "longrope"

TOKENS, FEWEST = 1 << 14, 4
"""Tokens read for one set of factors, and the least number of windows they come in."""


def require_search(budget: int, methods: Sequence[Method]) -> None:
    """Require a budget that can be used.

    Raises:
        ArgumentError: if no method lacks factors.
    """
    if budget and not any(map(_lacks_factors, methods)):
        raise ArgumentError(
            "search",
            expected=f"{SEARCHED} among the methods, without factors of its own",
            got=", ".join(method.spec for method in methods),
            remedy=f"Use --method {SEARCHED}.",
        )


def searched(
    checkpoint: Checkpoint,
    text: Text,
    methods: Sequence[Method],
    *,
    factor: float,
    budget: int,
    state: Path,
    progress: Progress = silent,
    stop: Callable[[], bool] = lambda: False,
) -> list[Method]:
    """The methods, LongRoPE's with the factors of least loss on the training part of the text.

    The loss is that of tokens past the trained length, in contexts of the new length.

    Args:
        checkpoint: to extend.
        text: factors are chosen on ``text.trained``; reports are measured elsewhere.
        methods: those without factors get them.
        budget: sets of factors to measure.
        state: a file that keeps the search, which continues from it.
        factor, progress, stop: see ``extend_checkpoint``.

    Raises:
        NotApplicable: if there is no RoPE as trained.
        DataError: if the text is too short.
        CheckpointError: if ``state`` is damaged, or of another search, model or text.
        Interrupted: on ``stop``, after saving.
    """
    done: dict[str, Method] = {}
    for method in filter(_lacks_factors, methods):
        # the first has the file's name, others (longrope+log_n) one of their own
        place = state.with_stem(f"{state.stem}-{method.name}") if done else state
        result = _search(checkpoint, text, method, factor, budget, place, progress, stop)
        options = {**method.options, "long_factors": list(result.best.factors)}
        note = _note(result, checkpoint, text)
        done[method.spec] = replace(method, options=options, notes=(note,))
    return [done.get(method.spec, method) for method in methods]


def _lacks_factors(method: Method) -> bool:
    return SEARCHED in method.name.split("+") and "long_factors" not in method.options


def _search(
    checkpoint: Checkpoint,
    text: Text,
    method: Method,
    factor: float,
    budget: int,
    state: Path,
    progress: Progress,
    stop: Callable[[], bool],
) -> Found:
    length, goal = checkpoint.length, round(checkpoint.length * factor)
    if len(text.trained) < 4 * goal:
        raise DataError(
            "text",
            expected=f"at least {4 * goal} tokens beside those it is measured on",
            got=len(text.trained),
            remedy="Give a longer text, or a smaller factor.",
        )
    count, width = max(FEWEST, TOKENS // goal), max(1, goal - length)
    targets = Targets.spread(text.trained_pieces, width=width, longest=goal, count=count)
    model = checkpoint.model
    assert isinstance(model, LiveModel)  # others are not extendable
    context: dict[str, Any] = {"factor": factor, "length": length}

    def loss(factors: tuple[float, ...]) -> float:
        options = {**method.options, "long_factors": factors}
        candidate = model.extended(method.name, **context, options=options)
        return targets.loss(at_device(candidate), text.trained, goal)

    losses = StoredLosses(state, loss, **context)

    def measured(result: Found) -> None:
        if result.tried <= losses.stored:
            return
        best = f"step {result.tried} of {budget}, least loss {result.best.loss:.4f}"
        progress(f"{method.spec}: searching factors, {best}", result.tried, budget)
        if stop() and result.tried < budget:
            raise Interrupted(
                "search",
                expected=f"{budget} sets of factors",
                got=f"a stop after {result.tried}",
                remedy="It is saved: give the same command again to continue.",
            )

    return search_factors(
        model.trained_encoding(), losses, **context, budget=budget, progress=measured
    )


def _note(result: Found, checkpoint: Checkpoint, text: Text) -> str:
    formulas = ", ".join(f"{name} {tried.loss:.3f}" for name, tried in result.formulas.items())
    factors = ", ".join(f"{factor:g}" for factor in result.best.factors)
    return (
        f"Its factors are the best of {result.tried} on the part of the text that is not measured "
        f"here: {result.best.loss:.3f} bits a {text.unit} past {checkpoint.length} {text.unit}s, "
        f"where it began from {formulas}. They are {factors}."
    )
