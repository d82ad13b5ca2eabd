"""Attention layers whose rotation posenc takes over, read from passes through the model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from posenc.encoding import Encoding, Pairing
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.transformers.acceleration.accelerated import STRETCHED, is_on_interface
from posenc.transformers.acceleration.api import INTERNAL
from posenc.transformers.acceleration.checking import PRECISIONS
from posenc.transformers.acceleration.interface import mask
from posenc.transformers.acceleration.masks import written_out
from posenc.transformers.acceleration.trials import quiet, run, tensors_in
from posenc.transformers.calls import RecordedCall, is_cache, names_of, record_call, recorded_calls
from posenc.transformers.stretching.attention import (
    LAYER,
    StretchedLayer,
    attention,
    inner_attention,
)
from posenc.transformers.stretching.changes import Change, Undoable, undo
from posenc.transformers.stretching.configs import configs_of
from posenc.transformers.stretching.frequencies import (
    INNER,
    Calls,
    Frequencies,
    SineTable,
    rotates_itself,
)
from posenc.transformers.stretching.positions import PLACED, Adoption, Switch

PAIRINGS: tuple[Pairing, ...] = ("half", "adjacent")

RECORDING = "posenc_recording"
"""Name of the attention implementation that records its arguments."""

HARMLESS = frozenset({"s_aux", "position_bias", "position_ids", "cache_position"})
"""Tensors in the options of attention that do not choose its keys."""


AttentionInterface.register(RECORDING, record_call)
AttentionMaskInterface.register(RECORDING, mask)


def refusal(got: str) -> ArgumentError:
    """The error of a model in which a method cannot move positions."""
    return ArgumentError(
        "model",
        expected="a rotation right before transformers' attention interface",
        got=got,
        remedy="Methods that only divide frequencies, such as yarn, may serve it.",
    )


def _recorded(model: Any, inner: Collection[nn.Module]) -> dict[nn.Module, RecordedCall]:
    """One pass, with the arguments of each attention module.

    Args:
        inner: modules that are not on the attention interface.

    Raises:
        ArgumentError: for keys that something else chooses, such as an indexer.
    """
    configs = [] if inner else configs_of(model)
    changes: list[Change] = [Change.of(x, INTERNAL, RECORDING) for x in configs]
    changes += [Change.of(m, INNER, partial(inner_attention, m, record_call)) for m in inner]
    try:
        with recorded_calls() as calls:
            run(model)
    finally:
        undo(changes)
    for call in calls:
        tensors = {name for name, x in call.options.items() if isinstance(x, Tensor)}
        if others := sorted(tensors - HARMLESS):
            raise refusal(f"attention with {', '.join(others)} in {type(call.module).__name__}")
    return {call.module: call for call in calls}


def _near(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """True if queries and keys are those expected up to rounding."""
    wide = expected[0].dtype in (torch.float32, torch.float64)
    return all(
        bool((a - b).abs().max() <= (1e-4 if wide else 3e-2) * b.abs().max())
        for a, b in zip(actual, expected, strict=True)
    )


class Readers(TorchFunctionMode):
    """Modules that compute with what rotary modules answer."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: set[nn.Module] = set()
        self.stack: list[nn.Module] = []
        hooks = nn.modules.module
        enter, leave = self._enter, self._leave
        self.handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave),
        ]

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        self.stack.append(module)

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs), is_leaf=is_cache)
        if self.stack and any(isinstance(x, Tensor) and PLACED in x.__dict__ for x in leaves):
            self.modules.add(self.stack[-1])
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def adopt(
    model: Any, used: list[Frequencies], calls: Calls, changes: list[Undoable]
) -> dict[str, StretchedLayer]:
    """Take over the rotation of a model's layers, with the encodings that they have.

    Args:
        changes: to which what is changed is added, also before an error.

    Returns:
        The layers by path, those without a rotation too.

    Raises:
        ArgumentError: for a model whose rotation cannot be taken over.
    """
    inner = [f.module for f in used if rotates_itself(f.module)]
    holders = [holders_of(model, f.module)[-1] for f in used]
    if not inner and not all(is_on_interface(type(holder)) for holder in holders):
        raise refusal("attention that is not on the interface")
    name = model.config._attn_implementation if inner else STRETCHED
    adoption = Adoption(Switch(), name if inner else RECORDING)
    with quiet(model):
        expected = run(model)
        rotated = _recorded(model, inner)
        changes += _hooked(model, used, adoption)
        with Readers() as readers:
            plain = _recorded(model, inner)
        for module in readers.modules:
            if not any(m in plain for m in module.modules()):
                raise refusal(f"{type(module).__name__}, which rotates too")
        assert adoption.latest is not None
        layout = Layout.at(adoption.latest.queries[0].float())
        layers = {
            path: _identified(module, plain[module], rotated[module], layout, used, adoption)
            for path, module in model.named_modules()
            if module in plain
        }
        if not any(layer.encoding.parts() for layer in layers.values()):
            raise refusal("no layer that the rotary module turns")
        if not inner:
            _name(model, layers, plain, adoption, calls)
        adoption.attention = name
        for path, layer in layers.items():
            module = model.get_submodule(path)
            changes.append(Change.of(module, LAYER, layer))
            changes.append(module.register_forward_pre_hook(layer.place, with_kwargs=True))
            changes.append(module.register_forward_hook(layer.leave))
        for module in inner:
            changes.append(Change.of(module, INNER, partial(inner_attention, module, attention)))
        changes += [] if inner else _implement(model, plain)
        _require_equal(expected, run(model))
    changes.append(Change(adoption.switch, "on", False))  # caches that it filled are refused then
    return layers


def _require_equal(expected: Any, got: Any) -> None:
    """Require outputs equal up to rounding.

    Raises:
        ArgumentError: if something else depends on the rotation.
    """
    for one, other in zip(tensors_in(expected), tensors_in(got), strict=True):
        if one.numel():
            off = (one - other).double().square().mean() / one.double().square().mean()
            if not off.sqrt() <= PRECISIONS[one.dtype].tolerance:
                raise refusal(f"other outputs by {float(off.sqrt()):.0e} with posenc's rotation")


def _implement(model: nn.Module, layers: dict[nn.Module, RecordedCall]) -> list[Change]:
    """Have the attention interface call posenc in the models that have these layers."""
    configs = [getattr(module, "config", None) for module in layers]
    for module in layers:
        configs += [holder.config for holder in holders_of(model, module)]
    unique = {id(config): config for config in configs if config is not None}
    return [Change.of(c, INTERNAL, STRETCHED) for c in unique.values()]


def holders_of(model: nn.Module, module: nn.Module) -> list[Any]:
    """The models of transformers that hold a module, the innermost last."""
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part for part in models if any(module is m for m in part.modules())]


def _hooked(model: nn.Module, used: list[Frequencies], adoption: Adoption) -> list[RemovableHandle]:
    """Hooks of rotary modules and of the models that hold them."""
    rotary = dict.fromkeys(f.module for f in used)
    holders = dict.fromkeys(holders_of(model, module)[-1] for module in rotary)
    handles = []
    for holder in holders:
        handles.append(holder.register_forward_pre_hook(adoption.begin, with_kwargs=True))
        handles.append(holder.register_forward_hook(adoption.end, with_kwargs=True))
    tables = {f.module for f in used if isinstance(f, SineTable)}
    for module in rotary:
        if rotates_itself(module):
            handles.append(module.register_forward_pre_hook(adoption.still, with_kwargs=True))
        else:
            hook = partial(adoption.rotated, names_of(module.forward), module in tables)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
    return handles


def _identified(
    module: nn.Module,
    plain: RecordedCall,
    rotated: RecordedCall,
    layout: Layout,
    used: list[Frequencies],
    adoption: Adoption,
) -> StretchedLayer:
    """The rotation that makes rotated queries and keys of plain ones.

    Raises:
        ArgumentError: if none of the model's frequencies does.
    """
    causal = _is_causal(module, plain.mask)
    if _near((rotated.query, rotated.key), (plain.query, plain.key)):
        return StretchedLayer(adoption, Encoding(), causal)
    if plain.key.shape[2] != layout.length:
        raise refusal(f"{type(module).__name__}, which attends to other tokens too")
    width, grid = plain.query.shape[-1], Grid.of(layout)
    for frequencies in used:
        for pairing, features in orders(frequencies.theta(), width):
            rope = frequencies.rope(pairing=pairing, head_dim=width)
            layer = StretchedLayer(adoption, Encoding.of(rope), causal, features, frequencies)
            computed = rope(layer.arranged(plain.query), layer.arranged(plain.key), grid)
            if _near(computed, (layer.arranged(rotated.query), layer.arranged(rotated.key))):
                layer.name = frequencies.layer_type
                return layer
    raise refusal(f"{type(module).__name__}, rotated otherwise, or with a weighted norm after it")


def orders(
    theta: Float[Tensor, " T"], width: int
) -> Iterator[tuple[Pairing, tuple[int, ...] | None]]:
    """Orders of features in which the pairs that are rotated come first, with their pairing.

    The rotated part is the first or the last of a head; pairs are turned either way.

    Args:
        theta: frequencies; 0 for pairs that are not rotated.
        width: of a head.
    """
    count, moving = len(theta), (theta > 0).nonzero().flatten().tolist()
    for start, back, pairing in turns(count, width):
        if pairing == "half":
            pairs = [(start + t, start + t + count) for t in moving]
        else:
            pairs = [(start + 2 * t, start + 2 * t + 1) for t in moving]
        if back:
            pairs = [(b, a) for a, b in pairs]
        ordered = zip(*pairs, strict=True) if pairing == "half" else pairs
        first = [feature for features in ordered for feature in features]
        order = (*first, *sorted(set(range(width)) - set(first)))
        yield pairing, None if order == tuple(range(width)) else order


def turns(pairs: int, width: int) -> Iterator[tuple[int, bool, Pairing]]:
    """Ways in which models rotate so many pairs of a head of this width.

    Yields the first rotated feature, True if pairs are turned the other way, and the pairing.
    """
    if 2 * pairs <= width:
        yield from product(sorted({0, width - 2 * pairs}), (False, True), PAIRINGS)


def _is_causal(module: nn.Module, mask: Tensor | None) -> bool:
    """True if keys after a query are masked."""
    visible = written_out(mask)
    if visible is None or visible.dim() != 4:
        return bool(getattr(module, "is_causal", False))
    attended = visible if visible.dtype == torch.bool else visible == 0
    return not bool(attended.triu(1).any())


def _name(
    model: Any,
    layers: Mapping[str, StretchedLayer],
    plain: Mapping[nn.Module, RecordedCall],
    adoption: Adoption,
    calls: Calls,
) -> None:
    """Find the type of each layer, and if it keeps a gain: the one that cos = 2 shows."""
    rotated = {path: layer for path, layer in layers.items() if layer.encoding.parts()}
    for layer in rotated.values():
        layer.keeps_gain = False
    for call in calls:
        adoption.factors[call] = 2.0
        louder = _recorded(model, ())
        for path, layer in rotated.items():
            module = model.get_submodule(path)
            if not torch.allclose(louder[module].query, plain[module].query, rtol=1e-2):
                layer.name, layer.keeps_gain = call[1] or layer.name, True
        del adoption.factors[call]
