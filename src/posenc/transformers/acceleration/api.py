"""``accelerate`` and ``restore``, and the report of what they did with a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from posenc.attention.backends.common.base import Backend
from posenc.attention.dispatch import BACKENDS
from posenc.encoding.prepared import Prepared
from posenc.errors import ArgumentError, UnknownNameError
from posenc.transformers.acceleration.accelerated import (
    FAMILIES,
    NAME,
    SETTINGS,
    SHORTEST,
    STRETCHED,
    Accelerated,
    AcceleratedFamily,
    AccelerateSettings,
    config_behind,
    family_of,
    is_on_interface,
    put_back,
    require_untouched,
    settings_of,
    take_over,
    with_posenc,
)
from posenc.transformers.acceleration.checking import (
    OutputComparison,
    is_sharded_around,
    without_values,
)
from posenc.transformers.acceleration.growing import grow, settle
from posenc.transformers.acceleration.products import products_of, put_products_back, take_products
from posenc.transformers.acceleration.routing import MOVED, ORIGINAL, POSENC, Record, recorded

ALREADY = "It was accelerated before and stays as it is; restore(model) first for other settings."

FamilyModule = tuple[str, nn.Module, AcceleratedFamily]


def accelerate(
    model: nn.Module,
    *,
    backend: str | Backend = "auto",
    check: bool = True,
    shortest: int | None = None,
    linear: Literal["auto", "original"] = "auto",
) -> AccelerateReport:
    """Compute the attention of a transformers model with posenc, in place.

    Of any model on transformers' attention interface, whose config then names posenc's attention:
    windows, chunks, blocks, sinks and caps of logits. And of the families that have a bias.

    Weights, their names, the state dict and what ``save_pretrained`` writes stay as they are;
    outputs and gradients are the same up to rounding. Below a number of tokens that was measured,
    and where nothing is gained, a module's own attention runs. A second call changes nothing,
    unless the model was given another attention implementation since; ``restore`` undoes it.

    Linear layers on a CPU compute by oneDNN, or for up to 7 rows by posenc's kernel, where no
    gradient is wanted and a trial, of a second once a process, shows that it is faster than the
    library PyTorch takes. Quantize layers before, where that goes by their exact class.

    Args:
        model: of transformers, or one that holds such a model (of peft, sentence-transformers).
        backend: of ``posenc.attend``.
        check: compare outputs on random inputs with those of the original: of 2 rows of 48 tokens,
            one padded, of 2 more behind a cache, and of 1 row of 300, which costs forward passes
            over about 900 tokens; or of 2 images. Left out on the meta device, and where what holds
            the model is sharded; a sharded model is called, on every rank.
        shortest: number of keys from which on posenc computes; None: as measured for the family.
        linear: ``"original"`` leaves linear layers as they are.

    Returns:
        What runs now in each module, and why.

    Raises:
        ArgumentError: for a model without a supported module, or whose outputs differ. The model is
            then as it was.
        UnknownNameError: when there is no backend of that name.
    """
    if not isinstance(model, nn.Module):
        raise _unknown(model)
    if isinstance(backend, str) and backend != "auto" and backend not in BACKENDS:
        raise UnknownNameError.of("backend", backend, ["auto", *BACKENDS])
    if linear not in ("auto", "original"):
        raise UnknownNameError.of("linear", linear, ["auto", "original"])
    if is_left(model):
        restore(model)
    modules = list(_modules(model))
    if is_switched(model) or _accelerated(model) or products_of(model):
        return replace(_report(model, modules), note=ALREADY)
    served = [module for _, module, family in modules if family.reason(module) is None]
    models = on_interface(model)
    if not modules and not models:
        raise _unknown(model)
    comparison, note = _comparison(model, served, models) if check else (None, "")
    off, notes = None, [note] if note else []
    calls: Record = []
    try:
        products = take_products(model) if linear == "auto" else ""
        if comparison is not None:
            _change(model, modules, backend, 0)
            with recorded() as calls:
                off = comparison.difference()
            _change(model, modules, backend, shortest)
            off = max(off, comparison.difference(short=True))
            if not comparison.near(off):
                restore(model)
                comparison.require_explained(off, {module for module, *_ in calls})
        _change(model, modules, backend, shortest)
    except BaseException:
        restore(model)
        raise
    least = SHORTEST if shortest is None else shortest
    rows = _report(model, modules).modules + _rows(model, calls, least)
    if models and not calls:
        notes.append("Layers on transformers' attention interface use posenc where they can gain.")
    tried = "" if comparison is None else comparison.tried
    return AccelerateReport(type(model).__name__, rows, off, tried, " ".join(notes), products)


def _comparison(
    model: nn.Module, served: Sequence[nn.Module], models: Sequence[nn.Module]
) -> tuple[OutputComparison | None, str]:
    """The comparison, or why there is none: of some models random inputs cannot be made."""
    if not (served or models):
        return None, ""
    if without_values(model):
        return None, "Outputs were not compared, since weights are on the meta device."
    if is_sharded_around(model):
        note = "Outputs were not compared, since the model is a part of what is sharded."
        return None, f"{note} To compare them, call accelerate before that."
    try:
        return OutputComparison(model, [*served, *models]), ""
    except ArgumentError as error:
        if served:
            raise
        return None, f"Outputs were not compared: {error}"


def _rows(model: nn.Module, calls: Record, least: int) -> tuple[ReportedModule, ...]:
    """Rows for the layers that were called through the interface, from some keys on."""
    paths = {id(module): path for path, module in model.named_modules()}
    rows = []
    for module, by, reason in dict.fromkeys(calls):
        if id(module) in paths and not isinstance(module, Accelerated):
            bound = by == POSENC and least > 1 and reason != MOVED
            since = f", from {least} keys on" if bound else ""
            row = paths[id(module)], type(module).__name__, by, reason + since
            rows.append(ReportedModule(*row))
    return tuple(rows)


def restore(model: nn.Module) -> bool:
    """Give a model its own attention and linear layers again; nothing to a model that has them.

    Args:
        model: that ``accelerate`` was called with.

    Returns:
        True if it was accelerated.

    Raises:
        ArgumentError: if classes or methods of modules were changed since, as FSDP does.
    """
    require_restorable(model)
    accelerated = is_switched(model) or bool(_accelerated(model))
    accelerated = put_products_back(model) or accelerated
    switch_back(model)
    for module in _accelerated(model):
        put_back(module)
    for part in model.modules():
        config = part.__dict__.get("config")
        if config is not None:
            part.__dict__["config"] = config_behind(config)
    return accelerated


def require_restorable(model: nn.Module) -> None:
    """Require that ``restore`` can undo what ``accelerate`` did.

    Raises:
        ArgumentError: as ``restore``.
    """
    for module in _accelerated(model):
        require_untouched(module)


def _accelerated(model: nn.Module) -> list[Accelerated]:
    return [module for module in model.modules() if isinstance(module, Accelerated)]


def _change(
    model: nn.Module, modules: Sequence[FamilyModule], backend: str | Backend, shortest: int | None
) -> None:
    """Have posenc compute calls of so many keys and more; None: as measured for each family."""
    least, prepared = SHORTEST if shortest is None else shortest, Prepared()
    settings = AccelerateSettings(backend, least, prepared)
    if is_switched(model):
        switch_settings(model, settings)
    else:
        switch(model, settings)
    for _, module, family in modules:
        if family.reason(module) is not None:
            continue
        least = family.shortest if shortest is None else shortest
        kind = type(module) if isinstance(module, Accelerated) else family.classes.get(type(module))
        if kind is not None:
            take_over(module, kind, AccelerateSettings(backend, least, prepared))
        if family.configured and "config" in module.__dict__:
            config = config_behind(module.__dict__["config"])
            module.__dict__["config"] = with_posenc(config, family.masks)


def _modules(model: nn.Module) -> Iterator[FamilyModule]:
    """Modules that a family has a class or a config for, with their paths."""
    for path, module in model.named_modules():
        kind = module.original if isinstance(module, Accelerated) else type(module)
        family = family_of(kind)
        if family is not None:
            kinds = (family.classes, family.configured, family.unserved)
            if any(kind in classes for classes in kinds):
                yield path, module, family


def _report(model: nn.Module, modules: Sequence[FamilyModule]) -> AccelerateReport:
    rows = []
    for path, module, family in modules:
        if isinstance(module, Accelerated):
            least = settings_of(module).shortest
            reason = f"from {least} keys on; its own below" if least > 1 else "at all lengths"
            if family.limits:
                reason = f"{family.limits}, {reason}"
            rows.append(ReportedModule(path, module.original.__name__, POSENC, reason))
        elif type(module) not in family.configured:
            reason = family.reason(module) or ""
            rows.append(ReportedModule(path, type(module).__name__, ORIGINAL, reason))
    return AccelerateReport(type(model).__name__, tuple(rows))


def _unknown(model: nn.Module) -> ArgumentError:
    """The error for a model with attention of its own, which posenc does not know."""
    titles = ", ".join(family.title for family in FAMILIES.values())
    return ArgumentError(
        "model",
        expected=f"a model on transformers' attention interface, or of {titles}",
        got=type(model).__name__,
        remedy="Its attention is its own code, which is left alone.",
    )


@dataclass(frozen=True)
class ReportedModule:
    """One module of a report, with the attention that runs in it.

    Args:
        path: name in the model.
        kind: its class in transformers.
        attention: what runs now: ``"posenc"``, or the module's own.
        reason: why.
    """

    path: str
    kind: str
    attention: str
    reason: str


@dataclass(frozen=True)
class AccelerateReport:
    """Modules of a model, with what computes their attention and why.

    Args:
        model: its class.
        modules: those with attention that posenc knows.
        difference: largest difference from the original's output on random inputs, as a share of
            its largest value; None if not checked.
        tried: the inputs that outputs were compared on, in words; "" if they were not.
        note: in a sentence, why nothing was changed or compared; "" if it was.
        linear: in a sentence, what computes linear layers; "" if they were left alone.
    """

    model: str
    modules: tuple[ReportedModule, ...]
    difference: float | None = None
    tried: str = ""
    note: str = ""
    linear: str = ""

    @property
    def accelerated(self) -> int:
        """Number of modules whose attention posenc computes."""
        return sum(module.attention == "posenc" for module in self.modules)

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.accelerated} of {len(self.modules)} modules accelerated."]
        if not self.modules:
            lines = [f"{self.model}: {self.note}"]
        counts = Counter((m.kind, m.attention, m.reason) for m in self.modules)
        lines += [
            f"  {count} × {kind}: {attention}, {reason}."
            for (kind, attention, reason), count in counts.items()
        ]
        if self.linear:
            lines.append(f"  {self.linear}")
        if self.difference is not None:
            lines.append(f"  Largest difference on random inputs: {self.difference:.1e}.")
            lines.append(f"  Tried: {self.tried}.")
        elif self.modules and self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)


BEFORE = "_posenc_before"
"""Attribute of a model: the implementations that its config and those in it named before, by the
path of the attribute. Plain, so that copies and pickles of the model have it."""

INTERNAL = "_attn_implementation_internal"
"""Attribute of a config, which transformers does not save; its setter refuses other models."""


def on_interface(model: nn.Module) -> list[PreTrainedModel]:
    """Models in a model whose attention goes through transformers' interface.

    Those of accelerated families are left out: these replace more than attention.
    """
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    others = [part for part in models if family_of(type(part)) is None]
    able = {id(part.config) for part in others if is_on_interface(type(part))}
    return [part for part in others if id(part.config) in able]


def is_switched(model: nn.Module) -> bool:
    """True if ``switch`` changed a model in this model, and ``switch_back`` did not since."""
    return any(BEFORE in part.__dict__ for part in model.modules())


def is_left(model: nn.Module) -> bool:
    """True if a model that ``switch`` changed was given another implementation since."""
    switched = [part for part in model.modules() if BEFORE in part.__dict__]
    names = {getattr(config_behind(part.config), INTERNAL, None) for part in switched}
    return not names <= {NAME, STRETCHED}


def switch(model: nn.Module, settings: AccelerateSettings) -> None:
    """Name posenc's attention in the configs of models on the interface.

    Stretched models keep theirs, which is posenc's too.
    """
    models = on_interface(model)
    owned = {id(part.config) for part in model.modules() if isinstance(part, PreTrainedModel)}
    configs = {id(part.config) for part in models}
    for part in models:
        before = {}
        for path, config in _configs(part.config):
            mine = id(config) in configs or id(config) not in owned
            if mine and getattr(config, INTERNAL, None) not in (NAME, STRETCHED):
                before[path] = getattr(config, INTERNAL, None)
                setattr(config, INTERNAL, NAME)
        part.__dict__[BEFORE] = before
        part.register_forward_pre_hook(grow, with_kwargs=True)
        part.register_forward_hook(settle, with_kwargs=True, always_call=True)
    switch_settings(model, settings)


def switch_settings(model: nn.Module, settings: AccelerateSettings) -> None:
    """Set the settings of layers in switched models."""
    for part in model.modules():
        if BEFORE in part.__dict__:
            for layer in _unfamiliar(part):
                layer.__dict__[SETTINGS] = settings


def switch_back(model: nn.Module) -> None:
    """Undo ``switch``, but for implementations that were chosen since."""
    for layer in _unfamiliar(model):
        layer.__dict__.pop(SETTINGS, None)
    for part in model.modules():
        for path, implementation in part.__dict__.pop(BEFORE, {}).items():
            config = _config_at(part, path)
            if getattr(config, INTERNAL, None) == NAME:
                setattr(config, INTERNAL, implementation)
        # Hooks are found by themselves: copies of a model have no handle of theirs.
        for key, hook in list(part._forward_pre_hooks.items()):
            if hook is grow:
                del part._forward_pre_hooks[key]
                del part._forward_pre_hooks_with_kwargs[key]
        for key, hook in list(part._forward_hooks.items()):
            if hook is settle:
                del part._forward_hooks[key]
                del part._forward_hooks_with_kwargs[key]
                del part._forward_hooks_always_called[key]


def implementations_before(model: nn.Module) -> dict[int, str | None]:
    """The implementations that configs named before ``switch``, by the identity of the config."""
    return {
        id(_config_at(part, path)): implementation
        for part in model.modules()
        for path, implementation in part.__dict__.get(BEFORE, {}).items()
    }


def _config_at(part: Any, path: str) -> Any:
    """The config of a model, or one in it by the path of its attribute."""
    return reduce(getattr, filter(None, path.split(".")), config_behind(part.config))


def _unfamiliar(model: nn.Module) -> Iterator[nn.Module]:
    """Modules but those of accelerated families, which have settings of their own."""
    return (part for part in model.modules() if not isinstance(part, Accelerated))


def _configs(config: Any, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """A config and those in it, by the paths of their attributes."""
    yield path, config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from _configs(part, f"{path}.{name}")
