"""LongRoPE's search on a text: the factors of pairs with which a model reads it best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from posenc.errors import ArgumentError, DataError, Interrupted
from posenc.evaluation.candidates import Method
from posenc.evaluation.checkpoint import Checkpoint
from posenc.evaluation.progress import Progress, silent
from posenc.evaluation.texts import Text
from posenc.experiments.text_loss import Targets
from posenc.extension import Found, extend_layers, search_factors
from posenc.models.replacing import encodings_of, with_encodings

__all__ = ["require_search", "searched"]

SEARCHED = "longrope"

TOKENS = 1 << 14
"""Read for one set of factors, in windows of the new length."""

FEWEST = 4
"""Windows."""


def require_search(budget: int, methods: Sequence[Method]) -> None:
    """Refuse a budget that nothing can be done with.

    Raises:
        ArgumentError: below 0, or when no method takes factors that are not given.
    """
    if budget < 0:
        raise ArgumentError(
            "search", expected="0 or more", got=budget, remedy="200 is a good number; 0 is none."
        )
    if budget and not any(map(_open, methods)):
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
    """The methods, LongRoPE with the factors that read the training part of the text best.

    Measured is the loss past the trained length, in contexts of the new one.

    Args:
        checkpoint: to extend.
        text: factors are chosen on ``text.trained``; what is reported is measured elsewhere.
        methods: of which those that want factors get them.
        factor: how far.
        budget: sets of factors to measure.
        state: a file that the search is kept in, and continued from.
        progress: called as the work proceeds.
        stop: asked after each measurement; True: raise ``Interrupted``.

    Raises:
        Misfit: when there is no rope as trained.
        DataError: when the text is too short.
        CheckpointError: when ``state`` is damaged, or of another search, model or text.
        Interrupted: after ``stop`` said so; it is saved.
    """
    found: dict[str, Method] = {}
    for method in methods:
        if not _open(method):
            continue
        # The first has the file's name, others (longrope+log_n) one of their own.
        place = state if not found else state.with_stem(f"{state.stem}-{method.name}")
        best = _search(
            checkpoint,
            text,
            method,
            factor=factor,
            budget=budget,
            state=place,
            progress=progress,
            stop=stop,
        )
        options = {**method.options, "long_factors": list(best.best.factors)}
        found[method.spec] = replace(
            method, options=options, notes=(_note(best, checkpoint, text),)
        )
    return [found.get(method.spec, method) for method in methods]


def _open(method: Method) -> bool:
    """Whether a method takes factors, and has none."""
    return SEARCHED in method.name.split("+") and "long_factors" not in method.options


def _search(
    checkpoint: Checkpoint,
    text: Text,
    method: Method,
    *,
    factor: float,
    budget: int,
    state: Path,
    progress: Progress,
    stop: Callable[[], bool],
) -> Found:
    goal = round(checkpoint.length * factor)
    width = max(1, goal - checkpoint.length)
    if len(text.trained) < 4 * goal:
        raise DataError(
            "text",
            expected=f"at least {4 * goal} tokens beside those it is measured on",
            got=len(text.trained),
            remedy="Give a longer text, or a smaller factor.",
        )
    targets = Targets.spread(
        len(text.trained), width=width, longest=goal, count=max(FEWEST, TOKENS // goal)
    )
    model, originals = checkpoint.model, encodings_of(checkpoint.model)
    device = next(model.parameters()).device

    def loss(factors: tuple[float, ...]) -> float:
        stretched = extend_layers(
            originals,
            method.name,
            factor=factor,
            length=checkpoint.length,
            **{**method.options, "long_factors": factors},
        )
        twin = with_encodings(model, stretched)

        def run(tokens: Tensor) -> Tensor:
            output: Tensor = twin(tokens.to(device))
            return output

        return targets.loss(run, text.trained, goal)

    def measured(found: Found) -> None:
        best = f"step {found.tried} of {budget}, least loss {found.best.loss:.4f}"
        progress(f"{method.spec}: searching factors, {best}", found.tried, budget)
        if stop() and found.tried < budget:
            raise Interrupted(
                "search",
                expected=f"{budget} sets of factors",
                got=f"a stop after {found.tried}",
                remedy="It is saved: give the same command again to continue.",
            )

    return search_factors(
        originals[0],
        loss,
        factor=factor,
        length=checkpoint.length,
        budget=budget,
        state=state,
        progress=measured,
    )


def _note(found: Found, checkpoint: Checkpoint, text: Text) -> str:
    formulas = ", ".join(f"{name} {tried.loss:.3f}" for name, tried in found.formulas.items())
    factors = ", ".join(f"{each:g}" for each in found.best.factors)
    return (
        f"Its factors are the best of {found.tried} on the part of the text that is not measured "
        f"here: {found.best.loss:.3f} bits a {text.unit} past {checkpoint.length} {text.unit}s, "
        f"where it began from {formulas}. They are {factors}."
    )
