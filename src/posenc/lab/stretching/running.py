"""Stretching a model by several methods, and measuring each, before and after fine-tuning."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version

import torch
from torch import nn

from posenc.errors import ArgumentError
from posenc.extension import Extension
from posenc.lab.machine import describe_device, platform_name
from posenc.lab.stretching.choosing import choose
from posenc.lab.stretching.contenders import Contender, Method, assemble
from posenc.lab.stretching.finetuning import Tuning, finetuned
from posenc.lab.stretching.measuring import Ruler, lengths_to
from posenc.lab.stretching.probes import DEPTHS, ByteNeedles
from posenc.lab.stretching.results import Claimed, Findings, Study
from posenc.lab.stretching.texts import Text

__all__ = ["Outcome", "Subject", "Tell", "evaluate", "stretch"]

Tell = Callable[[str, int, int], None]
"""Called with what is done now, how many models are done, and how many there are."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained model.

    Args:
        name: of its checkpoint.
        family: ``model_type``.
        model: causal, ids to logits.
        length: in tokens, that it was trained at.
    """

    name: str
    family: str
    model: nn.Module
    length: int


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came out.

    Args:
        study: what was found.
        model: the chosen one, stretched and, if asked for, fine-tuned; None: there is none.
        method: by which.
    """

    study: Study
    model: nn.Module | None
    method: Method | None


def evaluate(
    subject: Subject,
    text: Text,
    *,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    tell: Tell = lambda what, done, total: None,
) -> Study:
    """Measure a model as it is.

    Args:
        subject: what.
        text: to read.
        lengths: of contexts; half, once and twice its own by default.
        seed: of needles and words.
        tell: told of progress.

    Raises:
        DataError: when the text is too short.
    """
    began = time.perf_counter()
    chosen = tuple(sorted(set(lengths))) if lengths else lengths_to(subject.length, 2.0)
    ruler = Ruler.of(text.measured, chosen, text.needles, text.pool, seed=seed)
    tell("measuring", 0, 1)
    reading = ruler.measure(subject.model)
    tell("measured", 1, 1)
    found = Findings(key="direct", role="baseline", untuned=reading)
    study = _study(subject, text, ruler, (found,), factor=1.0, seed=seed)
    return replace(study, seconds=time.perf_counter() - began)


def stretch(
    subject: Subject,
    text: Text,
    methods: Sequence[Method],
    *,
    factor: float,
    tuning: Tuning,
    seed: int = 0,
    tell: Tell = lambda what, done, total: None,
) -> Outcome:
    """Stretch a model by each method, measure all, and choose one.

    One method is refused with an error where it does not fit; of several, those that do not fit
    are reported so. The original and a plain sliding window are measured beside them, and
    fine-tuned as the others are.

    Args:
        subject: what.
        text: to read.
        methods: to stretch it by.
        factor: how far.
        tuning: of each; 0 steps for none.
        seed: of needles and words.
        tell: told of progress.

    Raises:
        ArgumentError: when the only method does not fit, or diverges in fine-tuning.
        DataError: when the text is too short.
    """
    began = time.perf_counter()
    contenders = list(
        assemble(
            subject.model, methods, factor=factor, length=subject.length, strict=len(methods) == 1
        )
    )
    lengths = lengths_to(subject.length, factor)
    ruler = Ruler.of(text.measured, lengths, text.needles, text.pool, seed=seed)
    found: list[Findings] = []
    models: dict[str, nn.Module] = {}
    for done, contender in enumerate(contenders):

        def say(what: str, key: str = contender.key, done: int = done) -> None:
            tell(f"{key}: {what}", done, len(contenders))

        findings, model = _examine(contender, subject, text, ruler, tuning, say)
        found.append(findings)
        if model is not None:
            models[contender.key] = model
    tell("done", len(contenders), len(contenders))
    study = _study(subject, text, ruler, tuple(found), factor=factor, seed=seed)
    if tuning.steps:
        width = next(subject.model.parameters()).shape[-1]
        how = {
            "steps": tuning.steps,
            "positions": tuning.positions,
            "rate": tuning.rate_for(width),
            "seed": tuning.seed,
        }
        study = replace(study, finetune=how)
    chosen, reason = choose(study, tuned=bool(tuning.steps))
    study = replace(study, chosen=chosen, reason=reason, seconds=time.perf_counter() - began)
    method = next((m for m in methods if m.spec == chosen), None)
    return Outcome(study, models.get(chosen or ""), method)


def _examine(
    contender: Contender,
    subject: Subject,
    text: Text,
    ruler: Ruler,
    tuning: Tuning,
    say: Callable[[str], None],
) -> tuple[Findings, nn.Module | None]:
    found = Findings(
        key=contender.key,
        role=contender.role,
        claims=_claims(contender),
        advice=contender.advice,
        refusal=contender.refusal,
        writable=contender.role == "method" and contender.trainable,
        served=contender.served,
    )
    if contender.model is None:
        return found, None
    say("measuring")
    found = replace(found, untuned=ruler.measure(contender.model))
    if not tuning.steps or not contender.trainable:
        return found, contender.model
    say("fine-tuning")
    try:
        model, seconds = finetuned(
            contender.model,
            text.trained,
            tuning,
            length=subject.length,
            goal=ruler.lengths[-1],
            marks=isinstance(text.needles, ByteNeedles),
            stepped=lambda step, loss: say(f"fine-tuning, step {step}, loss {loss:.3f}"),
        )
    except ArgumentError as error:
        return replace(found, failed=str(error)), None
    say("measuring again")
    return replace(found, tuned=ruler.measure(model, steps=tuning.steps, seconds=seconds)), model


def _claims(contender: Contender) -> tuple[Claimed, ...]:
    entries = [] if contender.method is None else contender.method.entries
    return tuple(_claimed(entry) for entry in entries)


def _claimed(entry: Extension) -> Claimed:
    claims, cite = entry.claims, entry.citation
    return Claimed(
        summary=entry.summary,
        expect=claims.expect,
        training=claims.training,
        cost=claims.cost,
        transformers=claims.transformers,
        decodes_as_whole=claims.decodes_as_whole,
        cite="" if cite is None else f"{cite.authors} {cite.year}, {cite.title}",
    )


def _study(
    subject: Subject,
    text: Text,
    ruler: Ruler,
    found: tuple[Findings, ...],
    *,
    factor: float,
    seed: int,
) -> Study:
    targets = ruler.targets
    return Study(
        checkpoint=subject.name,
        family=subject.family,
        parameters=sum(p.numel() for p in subject.model.parameters()),
        length=subject.length,
        factor=factor,
        lengths=ruler.lengths,
        depths=DEPTHS,
        unit=text.unit,
        needles=text.needles.description,
        chance=text.needles.chance,
        copy_chance=1 / len(text.pool),
        text=text.name,
        sha256=text.sha256,
        targets=len(targets.ends) * targets.width,
        asked=ruler.asked,
        findings=found,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "posenc": version("posenc"),
            "platform": platform_name(),
        },
        device=describe_device(next(subject.model.parameters()).device),
        threads=torch.get_num_threads(),
        seed=seed,
    )
