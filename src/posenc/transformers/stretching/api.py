"""``stretch`` and ``restore``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from torch import nn

from posenc.arguments import check
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.extension import EXTENSIONS
from posenc.transformers.acceleration.api import (
    INTERNAL,
    implementations_before,
    require_restorable,
)
from posenc.transformers.acceleration.api import restore as unaccelerate
from posenc.transformers.acceleration.checking import without_values
from posenc.transformers.acceleration.trials import quiet, run, transformers_model
from posenc.transformers.checkpoints import FIELD
from posenc.transformers.stretching import configs
from posenc.transformers.stretching import frequencies as rotary
from posenc.transformers.stretching.adopting import adopt
from posenc.transformers.stretching.attention import StretchedLayer
from posenc.transformers.stretching.axes import stretch_axis
from posenc.transformers.stretching.changes import (
    Change,
    StretchedPart,
    StretchReport,
    Undoable,
    undo,
    undone_on_error,
)
from posenc.transformers.stretching.configs import Request
from posenc.transformers.stretching.frequencies import Frequencies, Of, frequencies_in
from posenc.transformers.stretching.tables import (
    RESAMPLE,
    LearnedTable,
    LinearBias,
    biases_in,
    tables_in,
    take_any_shape,
)

STRETCHED = "_posenc_stretched"
"""Attribute of a stretched model."""


@dataclass(eq=False)
class Stretched:
    """Changes made to a model, with the way back."""

    report: StretchReport
    changes: list[Undoable]


def stretch(
    model: nn.Module,
    method: str | None = None,
    *,
    factor: float | None = None,
    length: int | None = None,
    windows: bool = False,
    of: Of = "frequencies",
    axis: int | None = None,
    **options: Any,
) -> StretchReport:
    """Stretch the positions of a transformers model to longer inputs, in place.

    Methods that only divide frequencies change the rotary module's buffers: attention, caches and
    kernels stay. Methods that move positions compute attention by posenc, on unrotated keys.
    ``save_pretrained`` writes the method into the config, in transformers' words where it has them;
    else ``stretch(model)`` stretches the loaded model again. ``restore`` undoes it.

    Args:
        model: of transformers, or one that holds such a model.
        method: a name of ``posenc.extension.EXTENSIONS``, or several joined by ``+``; None: what
            the model's config says.
        factor: extension of the trained length, 1 or more.
        length: the trained length; by default that of the config.
        windows: stretch layers that see a window too.
        of: begin from the ``"frequencies"`` as they are, or from those of the config's
            ``rope_theta``, before any extension (``"theta"``).
        axis: of positions on several axes, 0 for time in video: the model is one of diffusers, such
            as Wan, HunyuanVideo, Flux or Cosmos, ``length`` is in tokens along the axis, and the
            method one that divides frequencies. Saving it writes no method.
        **options: of the method.

    Returns:
        What each part has now, and why others were left alone.

    Raises:
        ArgumentError: for a model that the method does not fit, which is then as it was.
        UnknownNameError: for an unknown method or option.
    """
    check("of", Of, of, "frequencies")
    if axis is not None:
        return _stretch_axis(
            model, axis, Request(method or "", factor, length, of, windows, options)
        )
    inner = transformers_model(model)
    if without_values(inner):
        raise ArgumentError(
            "model",
            expected="weights with values, which show how positions enter",
            got=f"{type(inner).__name__} on the meta device",
            remedy="Load its weights first.",
        )
    _require_unstretched(inner)
    if method is None:
        return stretch(model, **_saved(inner))
    frequencies, biases = list(frequencies_in(inner)), biases_in(inner)
    request = Request(method, factor, length, of, windows, options)
    with undone_on_error() as changes:
        if any(bias.linear for bias in biases):  # a rotary module beside it does nothing
            made = _stretch_biases(inner, biases, request, changes)
        elif frequencies:
            made = _stretch_frequencies(inner, frequencies, request, changes)
        elif tables := tables_in(inner):
            made = _stretch_tables(inner, tables, request, changes)
        else:
            made = _stretch_biases(inner, biases, request, changes)
    implementations = implementations_before(inner)
    for change in changes:  # either way back leads to the model's own attention
        if isinstance(change, Change) and change.name == INTERNAL:
            change.before = implementations.get(id(change.owner), change.before)
    report = StretchReport(type(inner).__name__, method, *made)
    inner.__dict__[STRETCHED] = Stretched(report, changes)
    return report


def _stretch_axis(model: nn.Module, axis: int, request: Request) -> StretchReport:
    """Stretch a model of diffusers along an axis."""
    _require_unstretched(check("model", nn.Module, model))
    with undone_on_error() as changes:
        parts = stretch_axis(model, request, axis, changes)
    report = StretchReport(type(model).__name__, request.method, "frequencies", parts)
    model.__dict__[STRETCHED] = Stretched(report, changes)
    return report


def _require_unstretched(model: nn.Module) -> None:
    if STRETCHED in model.__dict__:
        raise ArgumentError(
            "model",
            expected="a model that is not stretched",
            got=model.__dict__[STRETCHED].report.method,
            remedy="Call restore(model) first; 'yarn+log_n' joins methods.",
        )


Made = tuple[str, tuple[StretchedPart, ...], str]
"""See ``StretchReport`` for the layers and parts that a method changes and what is saved."""


def _stretch_frequencies(
    model: Any, frequencies: list[Frequencies], request: Request, changes: list[Undoable]
) -> Made:
    used, calls = rotary.called(model, frequencies)
    chosen = [f for f in used if request.windows or not rotary.windowed(f.layer_type)]
    if not chosen:
        raise _no_layer(model, windows=bool(used))
    stretched = {f: request.extend(f.encoding(request.of), f.trained(request.of)) for f in chosen}
    if request.length is None:
        request = replace(request, length=chosen[0].trained(request.of))
    place = "attention"
    if all(map(rotary.divides_frequencies, stretched.values())):
        try:
            changes += rotary.set_ropes(stretched, calls, request.factor)
            parts, place = rotary.rows(frequencies, stretched, used), "frequencies"
        except ArgumentError:  # a gain that the rotary module does not read
            pass
    if place == "attention":
        parts = _stretch_layers(adopt(model, used, calls, changes), request, model)
    described = configs.describe(model, stretched, request)
    changes += described or configs.field(model, request)
    return place, parts, "transformers" if described else "posenc"


def _stretch_tables(
    model: Any, tables: list[LearnedTable], request: Request, changes: list[Undoable]
) -> Made:
    """Resize learned tables."""
    parts: list[StretchedPart] = []
    fitted: list[Undoable] = []
    method = EXTENSIONS.get(request.method)
    has_prefix = method is not None and "prefix" in method.options()
    for table in tables:
        prefix = {"prefix": table.prefix} if table.cells is None and has_prefix else {}
        before = len(table.rows)
        written, rows = table.set_encoding(model, request.extend(table.encoding(), **prefix))
        changes += written
        fitted += take_any_shape(model, table)
        kind = type(table.module).__name__
        parts.append(StretchedPart(table.path, kind, True, f"{rows} rows instead of {before}"))
    changes += fitted
    with quiet(model):
        run(model, max(len(table.rows) - table.prefix for table in tables))
    return "tables", tuple(parts), "" if fitted else "transformers"


def _stretch_biases(
    model: Any, biases: list[LinearBias], request: Request, changes: list[Undoable]
) -> Made:
    """Divide biases that are linear in the distance."""
    if not biases:
        raise _no_layer(model, windows=False)
    parts: list[StretchedPart] = []
    for bias in biases:
        written, factor = bias.set_encoding(request.extend(bias.encoding()))
        changes.append(written)
        kind = type(bias.layer).__name__
        parts.append(StretchedPart(bias.path, kind, True, f"{bias.name} divided by {factor:g}"))
    longest = getattr(model.config, "max_seq_len", None)  # of biases that are made for it
    if longest is not None and "max_seq_len" in model.config.to_dict():
        length = request.length or longest
        changes.append(Change.of(model.config, "max_seq_len", round(length * factor)))
        request = replace(request, length=length)
    changes += configs.field(model, request)
    return "biases", tuple(parts), "posenc"


def _stretch_layers(
    layers: dict[str, StretchedLayer], request: Request, model: nn.Module
) -> tuple[StretchedPart, ...]:
    """Give attention layers their stretched encodings; equal ones are shared."""
    shared: dict[tuple[object, ...], Encoding] = {}
    parts = []
    for path, layer in layers.items():
        module, before = model.get_submodule(path), layer.begin(request.of)
        kind = type(module).__name__
        if not before.parts():
            parts.append(StretchedPart(path, kind, False, "it rotates nothing"))
            continue
        if _sees_window(module, layer.name) and not request.windows:
            parts.append(StretchedPart(path, kind, False, "it sees a window"))
            continue
        key = repr(before), layer.keeps_gain, layer.causal
        if key not in shared:
            shared[key] = _stretched(before, layer, request)
        layer.encoding = shared[key]
        parts.append(StretchedPart(path, kind, True, rotary.describe(layer.encoding)))
    if not any(part.stretched for part in parts):
        raise _no_layer(model, windows=True)
    return tuple(parts)


def _sees_window(module: Any, layer_type: str) -> bool:
    """True for an attention module of a window or chunks, by its attributes or its type."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    if types is not None and getattr(module, "layer_idx", None) is not None:
        layer_type = types[module.layer_idx]
    return rotary.windowed(layer_type) or isinstance(getattr(module, "sliding_window", None), int)


def _stretched(before: Encoding, layer: StretchedLayer, request: Request) -> Encoding:
    """An encoding of a layer, stretched.

    Raises:
        ArgumentError: also for a method of causal attention only in another one.
    """
    encoding = request.extend(before)
    for part in encoding.parts():
        if getattr(part, "causal_only", False) and not layer.causal:
            raise ArgumentError(
                "method",
                expected="one for attention in both directions",
                got=f"{request.method}, for causal attention",
                remedy="rerope and self_extend serve both.",
            )
    if not layer.keeps_gain:
        for module in encoding.modules():
            if "gain" in module.__dict__:
                module.__dict__["gain"] = 1.0
    return encoding


def _no_layer(model: nn.Module, *, windows: bool) -> ArgumentError:
    remedy = "posenc doctor says how its layers use positions."
    if windows:
        remedy = "windows=True stretches layers that see a window."
    elif RESAMPLE in signature(model.forward).parameters:
        remedy = f"Its own {RESAMPLE}=True resamples its positions for other sizes."
    elif getattr(model, "main_input_name", "") == "pixel_values":
        remedy = "Resize images to the size of its config."
    return ArgumentError(
        "model",
        expected=f"layers with {'more than a window' if windows else 'positions'} to stretch",
        got=type(model).__name__,
        remedy=remedy,
    )


def _saved(model: Any) -> dict[str, Any]:
    """Arguments of ``stretch`` from a model's config.

    Raises:
        ArgumentError: if it has none.
    """
    extension = getattr(model.config, FIELD, None)
    if extension is None:
        raise ArgumentError(
            "method",
            expected=f"a method, or a model whose config has {FIELD}",
            got=None,
            remedy="posenc.extension.EXTENSIONS has the names.",
        )
    context = {name: extension[name] for name in ("method", "factor", "length")}
    return {**context, **extension["options"]}


def restore(model: nn.Module) -> StretchReport:
    """Give a stretched model its own positions again, to the bit, and its own attention.

    Args:
        model: that ``stretch`` or ``accelerate`` was called with; any other stays as it is.

    Returns:
        The parts whose positions were restored, and whether its attention was.

    Raises:
        ArgumentError: as ``accelerate.restore``.
    """
    require_restorable(model)
    inner: nn.Module = model if STRETCHED in model.__dict__ else transformers_model(model)
    stretched: Stretched | None = inner.__dict__.pop(STRETCHED, None)
    undo([] if stretched is None else stretched.changes)
    accelerated = unaccelerate(model)
    parts = () if stretched is None else stretched.report.parts
    restored = tuple(part for part in parts if part.stretched)
    return StretchReport(type(inner).__name__, "", "", restored, accelerated=accelerated)
