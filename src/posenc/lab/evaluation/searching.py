"""Search of LongRoPE's factors on a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posenc.errors import ArgumentError, DataError, Interrupted
from posenc.extension import Found, search_factors
from posenc.lab.evaluation.candidates import Method
from posenc.lab.evaluation.checkpoint import Checkpoint
from posenc.lab.evaluation.progress import Progress, silent
from posenc.lab.evaluation.texts import Text
from posenc.lab.experiments.text_loss import Targets, at_device
from posenc.transformers.live import LiveModel

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

    def measured(result: Found) -> None:
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
        model.trained_encoding(), loss, **context, budget=budget, state=state, progress=measured
    )


def _note(result: Found, checkpoint: Checkpoint, text: Text) -> str:
    formulas = ", ".join(f"{name} {tried.loss:.3f}" for name, tried in result.formulas.items())
    factors = ", ".join(f"{factor:g}" for factor in result.best.factors)
    return (
        f"Its factors are the best of {result.tried} on the part of the text that is not measured "
        f"here: {result.best.loss:.3f} bits a {text.unit} past {checkpoint.length} {text.unit}s, "
        f"where it began from {formulas}. They are {factors}."
    )
