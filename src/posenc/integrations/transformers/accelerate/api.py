"""``accelerate`` and ``restore``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from posenc.attention.backends.common.base import Backend
from posenc.attention.dispatch import BACKENDS
from posenc.errors import ArgumentError, UnknownNameError
from posenc.integrations.transformers.accelerate.accelerated import (
    Accelerated,
    Settings,
    put_back,
    require_untouched,
    settings_of,
    take_over,
)
from posenc.integrations.transformers.accelerate.checking import Comparison, without_values
from posenc.integrations.transformers.accelerate.config import config_behind, with_posenc
from posenc.integrations.transformers.accelerate.family import (
    FAMILIES,
    AcceleratedFamily,
    family_of,
)
from posenc.integrations.transformers.accelerate.report import Report, ReportedModule

Found = tuple[str, nn.Module, AcceleratedFamily]


def accelerate(
    model: nn.Module,
    *,
    backend: str | Backend = "auto",
    check: bool = True,
    shortest: int | None = None,
) -> Report:
    """Compute the attention of a transformers model with posenc, in place.

    Weights, their names, the state dict, the config and what ``save_pretrained`` writes stay as
    they are; outputs and gradients are the same up to rounding. Below a number of tokens that was
    measured, a module's own attention runs. A second call changes nothing; ``restore`` undoes it.

    Args:
        model: of transformers, or one that holds such a model (of peft, sentence-transformers).
        backend: of ``posenc.attend``.
        check: compare outputs on random inputs with those of the original; costs two forward
            passes over 2 rows of 48 tokens, or over 2 images. Left out on the meta device.
        shortest: number of keys from which on posenc computes; None: as measured for the family.

    Returns:
        What runs now in each module, and why.

    Raises:
        ArgumentError: for a model without a supported module, or whose outputs differ. The model is
            then as it was.
        UnknownNameError: when there is no backend of that name.
    """
    if isinstance(backend, str) and backend != "auto" and backend not in BACKENDS:
        raise UnknownNameError.of("backend", backend, ["auto", *BACKENDS])
    found = list(_modules(model))
    if any(isinstance(module, Accelerated) for _, module, _ in found):
        return _report(model, found)
    if not found:
        return Report(type(model).__name__, (), note=_unchanged(model))
    comparison = off = None
    served = [module for _, module, family in found if family.reason(module) is None]
    unread = bool(check and served and without_values(model))
    if check and served and not unread:
        comparison = Comparison(model, served)
    try:
        _change(found, Settings(backend))
        if comparison is not None:
            off = comparison.difference()
            if not comparison.near(off):
                restore(model)
                comparison.require_explained(off)
                _change(found, Settings(backend))
        for _, module, family in found:
            if isinstance(module, Accelerated):
                least = family.shortest if shortest is None else shortest
                take_over(module, type(module), Settings(backend, least))
    except BaseException:
        restore(model)
        raise
    note = "Outputs were not compared, since weights are on the meta device." if unread else ""
    return replace(_report(model, found), difference=off, note=note)


def restore(model: nn.Module) -> None:
    """Give a model its own attention again; does nothing to a model that has it.

    Args:
        model: that ``accelerate`` was called with.

    Raises:
        ArgumentError: if classes or methods of modules were changed since, as FSDP does.
    """
    for module in _accelerated(model):
        require_untouched(module)
    for module in _accelerated(model):
        put_back(module)
    for part in model.modules():
        config = part.__dict__.get("config")
        if config is not None:
            part.__dict__["config"] = config_behind(config)


def _accelerated(model: nn.Module) -> list[Accelerated]:
    return [module for module in model.modules() if isinstance(module, Accelerated)]


def _change(found: Sequence[Found], settings: Settings) -> None:
    for _, module, family in found:
        if family.reason(module) is not None:
            continue
        if type(module) in family.classes:
            take_over(module, family.classes[type(module)], settings)
        if family.configured and "config" in module.__dict__:
            module.__dict__["config"] = with_posenc(module.config, family.masks)


def _modules(model: nn.Module) -> Iterator[Found]:
    """Modules that a family has a class or a config for, with their paths."""
    for path, module in model.named_modules():
        kind = module.original if isinstance(module, Accelerated) else type(module)
        family = family_of(kind)
        if family is not None:
            kinds = (family.classes, family.configured, family.unserved)
            if any(kind in known for known in kinds):
                yield path, module, family


def _report(model: nn.Module, found: Sequence[Found]) -> Report:
    rows = []
    for path, module, family in found:
        if isinstance(module, Accelerated):
            least = settings_of(module).shortest
            reason = f"from {least} keys on; its own below" if least > 1 else "at all lengths"
            if family.limits:
                reason = f"{family.limits}, {reason}"
            rows.append(ReportedModule(path, module.original.__name__, "posenc", reason))
        elif type(module) not in family.configured:
            reason = family.reason(module) or ""
            rows.append(ReportedModule(path, type(module).__name__, "its own", reason))
    return Report(type(model).__name__, tuple(rows))


def _unchanged(model: nn.Module) -> str:
    """The reason why a model without modules of a family stays as it is.

    Raises:
        ArgumentError: if it has attention of its own, which posenc does not know.
    """
    if "transformers" in sys.modules:
        from transformers import PreTrainedModel

        inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        if inner and all(type(module)._can_set_attn_implementation() for module in inner):
            return (
                "it has no attention with a bias that posenc knows, only PyTorch's own, so nothing "
                "was changed; attn_implementation='posenc' can gain where layers see windows."
            )
    titles = ", ".join(family.title for family in FAMILIES.values())
    raise ArgumentError(
        "model",
        expected=f"a model of transformers: {titles}",
        got=type(model).__name__,
        remedy="For models on transformers' attention interface, try attn_implementation='posenc'.",
    )
