"""Extend a checkpoint folder: measure methods on it, choose one, and write it with a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posenc.errors import ArgumentError, Interrupted
from posenc.evaluation.candidates import Method, extended_by, methods_for
from posenc.evaluation.checkpoint import Checkpoint
from posenc.evaluation.engines import differences
from posenc.evaluation.engines.choosing import served_methods
from posenc.evaluation.engines.comparison import engine_named
from posenc.evaluation.engines.engine import Engine
from posenc.evaluation.engines.serving import Serving, serving
from posenc.evaluation.live import LiveModel
from posenc.evaluation.progress import Progress, kept, silent
from posenc.evaluation.results import Study
from posenc.evaluation.searching import require_search, searched
from posenc.evaluation.settings import ExtensionSettings, Tuning
from posenc.evaluation.study import measure_extensions
from posenc.evaluation.texts import Text
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.storage import output_folder, require_unused

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
        serving: commands for the engine that was asked for; None: none was.
        left_out: methods that it does not serve, and why.
    """

    out: Path
    study: Study | None
    method: str | None
    native: bool
    engines: dict[str, str] = field(default_factory=dict)
    serving: Serving | None = None
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
        engine: only methods that it serves; see ``engine_named``.
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
    factor, search, tuning = settings.factor, settings.search, settings.tuning
    length = settings.trained_length
    asked = None if engine is None else engine_named(engine)
    if isinstance(source, Path | str):
        checkpoint = Checkpoint.open(
            source, trained_length=length, device=settings.device, extendable=True
        )
    else:
        checkpoint = Checkpoint.of_model(source, trained_length=length, extendable=True)
    assert isinstance(checkpoint.model, LiveModel)  # others are not extendable
    chosen = methods_for(settings.methods, checkpoint.model, length=checkpoint.length)
    left_out: dict[str, str] = {}
    if asked is not None:
        chosen, left_out = served_methods(
            chosen, checkpoint.model, asked, factor=factor, length=checkpoint.length
        )
    require_search(search, chosen)
    if not settings.report:
        written = _write_unmeasured(checkpoint, chosen, tuning, factor=factor, out=out)
        return _told(written, asked, left_out, checkpoint, factor=factor, tuned=False)
    data = checkpoint.data(
        text=settings.text, images=settings.images, training=bool(tuning.steps or search)
    )
    if search:
        assert isinstance(data, Text)  # only decoders have factors to search
        state = out.with_name(f"{out.name}-search.json")
        with kept(state, command):
            chosen = searched(
                checkpoint,
                data,
                chosen,
                factor=factor,
                budget=search,
                state=state,
                progress=progress,
                stop=stop,
            )
    state = out.with_name(f"{out.name}-measured.json")
    try:
        with kept(state, command):
            result = measure_extensions(
                checkpoint,
                data,
                chosen,
                factor=factor,
                tuning=tuning,
                seed=settings.seed,
                always=settings.always,
                progress=progress,
                state=state,
                stop=stop,
            )
        study = replace(result.study, command=command)
        if result.model is None or result.method is None:
            from posenc.evaluation.report import write_study

            with output_folder(out) as partial:
                write_study(study, partial / "report")
            written = Extended(out, study, None, native=False)
        else:
            native = checkpoint.write(result.model, out, study=study)
            written = _written(out, study, result.method, checkpoint, native=native)
    except Interrupted:
        raise
    except Exception:
        state.unlink(missing_ok=True)
        raise
    state.unlink(missing_ok=True)
    return _told(written, asked, left_out, checkpoint, factor=factor, tuned=bool(tuning.steps))


def _told(
    written: Extended,
    engine: Engine | None,
    left_out: dict[str, str],
    checkpoint: Checkpoint,
    *,
    factor: float,
    tuned: bool,
) -> Extended:
    """The result with the commands of an engine."""
    if engine is None or written.method is None:
        return replace(written, left_out=left_out)
    found = serving(
        engine,
        Fields.read(written.out).values,
        written.out,
        "" if tuned else checkpoint.words,
        round(factor * checkpoint.length),
    )
    return replace(written, serving=found, left_out=left_out)


def _write_unmeasured(
    checkpoint: Checkpoint, methods: Sequence[Method], tuning: Tuning, *, factor: float, out: Path
) -> Extended:
    if len(methods) != 1 or methods[0].of_model or tuning.steps:
        steps = [f"{tuning.steps} steps"] if tuning.steps else []
        raise ArgumentError(
            "report",
            expected="one method that a checkpoint can hold, and no fine-tuning",
            got=" and ".join([", ".join(method.spec for method in methods), *steps]),
            remedy="Without measuring none can be chosen.",
        )
    assert isinstance(checkpoint.model, LiveModel)  # as above
    candidate = extended_by(checkpoint.model, methods[0], factor=factor, length=checkpoint.length)
    assert isinstance(candidate.model, LiveModel)  # not a method of models
    native = checkpoint.write(candidate.model, out, study=None)
    return _written(out, None, methods[0], checkpoint, native=native)


def _written(
    out: Path, study: Study | None, method: Method, checkpoint: Checkpoint, *, native: bool
) -> Extended:
    config = Fields.read(out).values
    engines = differences(config, length=checkpoint.length) if native else {}
    return Extended(out, study, method.spec, native, engines)
