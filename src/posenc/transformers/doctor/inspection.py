"""Attention of each layer of a transformers model, by running a copy without stored weights."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from posenc.transformers.calls import RecordedCall
from posenc.transformers.doctor.expanded_weights import build, without_feed_forward
from posenc.transformers.doctor.facts import (
    UNKNOWN,
    AttentionFacts,
    Bias,
    LayerReading,
    Layers,
    Maybe,
    PositionTable,
    RotationFacts,
    Visible,
    bias_of,
    factor_of,
    rotation,
    visible,
    visible_of,
)
from posenc.transformers.doctor.recording import FAR, TOKENS, Recorder, record

IGNORED = {
    *("scaling", "scale", "is_causal", "dropout", "dropout_p", "position_ids", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("softcap", "s_aux", "enable_gqa"),
}
"""Arguments of calls that facts have, or that do not change them."""

NOT_MIXING = re.compile("norm|mlp|dropout|moe|expert|router|ffn|feed_forward|act", re.IGNORECASE)
"""Names of parts of a layer that do not mix tokens."""

DEEP = 48
"""Layers of a model that is run without its feed-forward parts."""

HEADS = 8
"""Number of a layer's heads by which its rotation is measured."""

SAME_SIZE = 1e-3
"""Relative difference of sizes of queries that is no temperature."""

EQUAL = "queries of equal inputs"
DIFFER = "unknown: queries of equal inputs differ"
MASK, ODD = "mask function", "unknown: the mask is neither a band nor chunks"
"""Sources: of a rotation that no module makes, of other changes, and of visible keys."""


@dataclass
class _Passes:
    """Forward passes: plain, without rotation, both at far positions, and without products."""

    plain: Recorder
    unrotated: Recorder
    far: _Far | None
    silent: Recorder | None


@dataclass
class _Far:
    """Passes with and without rotation whose first position is ``start``."""

    start: int
    plain: Recorder
    unrotated: Recorder


def inspect(config: Any) -> LayerReading:
    """The layers of the model of a config.

    Raises:
        RuntimeError: if it cannot be built or run, with the reason.
    """
    began = time.perf_counter()
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    choices = [(config, torch.float64), (config, torch.float32), (text, torch.float64)]
    reason: Exception | None = None
    for choice, dtype in choices if text is not config else choices[:2]:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                reading = _inspect(choice, dtype)
        except Exception as error:  # whatever the code of a model raises
            reason = reason or error
        else:
            return replace(reading, seconds=round(time.perf_counter() - began, 2))
    message = shorten(str(reason), 200, placeholder=" …")
    raise RuntimeError(f"{type(reason).__name__}: {message}") from reason


def _inspect(config: Any, dtype: torch.dtype) -> LayerReading:
    model, seeds, plain, left_out = _first_pass(config, dtype)
    computes_logits = any(call.logits is not None for call in plain.calls)
    silent = record(model, seeds, silent=True) if computes_logits else None
    unrotated = record(model, seeds, rotated=False)
    passes = _Passes(plain, unrotated, _far(model, seeds, plain, config), silent)
    names = {module: name for name, module in model.named_modules()}
    facts = _Facts(passes, names, encoder=getattr(config, "is_encoder_decoder", False))
    module_facts = [(names[call.module], facts.of(i, call)) for i, call in enumerate(plain.calls)]
    module_facts += _without_attention(model, plain, {name for name, _ in module_facts}, config)
    tables = (
        PositionTable(module=names[module], rows=rows, first=first)
        for module, (rows, first) in plain.tables.items()
    )
    return LayerReading(
        layers=_grouped(module_facts),
        tables=tuple(tables),
        reason=left_out,
        far=passes.far.start if passes.far else None,
    )


def _first_pass(config: Any, dtype: torch.dtype) -> tuple[nn.Module, dict[int, int], Recorder, str]:
    """The model with its seeds and a pass as it is; why its feed-forward parts are left out, or "".

    They do not matter to attention, and take most of the time of a deep model.
    """
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None) or 0
    model, seeds = build(config, dtype)
    if layers > DEEP:
        without_feed_forward(model)
        try:
            return model, seeds, record(model, seeds), ""
        except Exception:  # of code that reads more than a tensor from such a part
            model, seeds = build(config, dtype)
    try:
        return model, seeds, record(model, seeds), ""
    except Exception as error:  # of a part that does not matter here, perhaps
        left_out = shorten(f"feed-forward parts were left out: {error}", 200, placeholder=" …")
        without_feed_forward(model)
        return model, seeds, record(model, seeds), left_out


def _far(model: nn.Module, seeds: Mapping[int, int], plain: Recorder, config: Any) -> _Far | None:
    """The far passes; None for a model that takes no far positions."""
    text = config.get_text_config(decoder=True)
    longest: Any = getattr(text, "max_position_embeddings", None)
    longest = longest or getattr(text, "n_positions", 512)
    modules = [call.module for call in plain.calls]
    for start, cached in ((FAR, True), (FAR, False), (int(longest) - TOKENS - 2, False)):
        try:
            unrotated = record(model, seeds, start=start, cached=cached, rotated=False)
            rotated = record(model, seeds, start=start, cached=cached)
        except Exception:  # a table without these rows, or a cache of another kind
            continue
        if [call.module for call in rotated.calls] == modules:
            return _Far(start, rotated, unrotated)
    return None


class _Facts:
    """Facts of the calls of a plain pass.

    Args:
        passes: of one model.
        names: of its modules.
        encoder: the model is a decoder beside an encoder.
    """

    def __init__(self, passes: _Passes, names: Mapping[nn.Module, str], *, encoder: bool) -> None:
        self.passes, self.names, self.encoder = passes, names, encoder
        self.modules = {name: module for module, name in names.items()}
        self._visible_by_mask: dict[int, Visible | None] = {}
        self._rotations: list[RotationFacts] = []
        self._keys: dict[int, str] = {}

    def of(self, index: int, call: RecordedCall) -> AttentionFacts:
        query, key, options = call.query, call.key, call.options
        other = query.shape[2] != key.shape[2]  # as many keys as queries of the same tokens
        cross = other and (self.encoder or "cross" in self.names[call.module].lower())
        kind: Any = "cross" if cross else UNKNOWN if other else "self"
        sources = {"heads": "the call of attention", "absolute": "input of the first layer"}
        scale = options.get("scaling", options.get("scale"))
        scale = float(f"{float(query.shape[-1] ** -0.5 if scale is None else scale):.6g}")
        visibility, causal, sources["causal"] = self._visible(call)
        bias, sources["bias"] = self._bias(call)
        has_logits = call.logits is not None
        temperature, sources["temperature"] = self._temperature(index, call)
        turned, sources["rotation"] = self._rotation(index, "query")
        if sources["rotation"] == EQUAL:
            temperature, sources["temperature"] = UNKNOWN, "unknown: rotated without a module"
        if turned is None and sources["temperature"] == DIFFER:
            turned, sources["rotation"] = UNKNOWN, DIFFER
        keys, _ = self._rotation(index, "key")
        alike = keys == turned or UNKNOWN in (keys, turned) or other
        sinks, cap = options.get("s_aux") is not None, options.get("softcap")
        sources["sinks"] = sources["cap"] = "the call of attention"
        if call.logits is not None:
            sinks = call.logits.shape[-1] > key.shape[-2]
            cap = None if bias.scale is not None else UNKNOWN
            scale, sources["sinks"], sources["cap"] = bias.scale, "logits", "logits"
        source = self._keys.setdefault(key.data_ptr(), self.names[call.module])
        return AttentionFacts(
            module=self.names[call.module],
            kind=kind,
            heads=query.shape[1],
            key_heads=_key_heads(key),
            head_dim=query.shape[-1],
            value_dim=None if has_logits else call.value.shape[-1],
            scale=scale,
            rotation=turned,
            key_rotation=None if alike else keys,
            absolute=self._absolute(call),
            causal=causal,
            back=visibility.back if visibility else UNKNOWN,
            ahead=visibility.ahead if visibility else UNKNOWN,
            chunk=visibility.chunk if visibility else UNKNOWN,
            exceptions=visibility.other if visibility else (),
            bias=bias.shape,
            slopes=bias.slopes,
            sinks=sinks,
            cap=cap,
            temperature=temperature,
            keys_of=None if source == self.names[call.module] else source,
            arguments=_arguments(options),
            sources=sources,
        )

    def _visible(self, call: RecordedCall) -> tuple[Visible | None, bool | Maybe, str]:
        mask, masks = call.mask, self.passes.plain.masks
        if call.logits is not None:
            return self._visible_in_logits(call)
        if isinstance(mask, Tensor) and mask.data_ptr() in masks:
            evaluated = self._evaluated(mask.data_ptr())
            return (
                evaluated,
                UNKNOWN if evaluated is None else evaluated.ahead == 0,
                MASK if evaluated else ODD,
            )
        if isinstance(mask, Tensor):
            short = visible_of(mask)
            where = f"the model's own mask of {mask.shape[-1]} tokens"
            if short is None:
                return None, UNKNOWN, f"unknown: {where} is neither causal nor full"
            return short, short.ahead == 0, f"{where}: limits are unknown"
        causal: Any = call.options.get("is_causal")
        if causal is None:
            causal = getattr(call.module, "is_causal", None)
        if causal is None:
            return None, UNKNOWN, "unknown: no mask and no is_causal"
        return Visible(None, 0 if causal else None), bool(causal), "is_causal, without a mask"

    def _evaluated(self, address: int) -> Visible | None:
        if address not in self._visible_by_mask:
            self._visible_by_mask[address] = visible(self.passes.plain.masks[address][1])
        return self._visible_by_mask[address]

    def _visible_in_logits(self, call: RecordedCall) -> tuple[Visible | None, bool | Maybe, str]:
        """Visibility where the module computes attention by itself."""
        for table in call.module.buffers():
            sees = table.reshape(-1, *table.shape[-2:]) if table.dim() == 4 else None
            if sees is not None and table.dtype == torch.bool and sees.shape[-1] > TOKENS:
                width = int(sees[0].sum(-1).max())
                back = width - 1 if width < sees.shape[-1] else None
                return Visible(back, 0), True, "the module's table of visible keys"
        logits = self._silent(call)
        short = None if logits is None else visible_of(logits)
        if short is None:
            return None, UNKNOWN, "unknown: the module computes attention by itself"
        masks = self.passes.plain.masks
        only = self._evaluated(next(iter(masks))) if len(masks) == 1 else None
        if only is not None and (only.ahead == 0) is (short.ahead == 0):
            return only, only.ahead == 0, "the only mask function of the model"
        return short, short.ahead == 0, f"logits of {TOKENS} tokens: limits are unknown"

    def _silent(self, call: RecordedCall) -> Tensor | None:
        calls = self.passes.silent.calls if self.passes.silent else ()
        return next((c.logits for c in calls if c.module is call.module), None)

    def _bias(self, call: RecordedCall) -> tuple[Bias, str]:
        if call.logits is not None:
            silent = self._silent(call)
            if silent is None:
                return Bias(None), "unknown"
            bias = bias_of(silent)
            scale = factor_of(call.query[0] @ call.key[0].mT, call.logits - silent, silent)
            if bias.shape is None and scale is None:
                return Bias("by content and position"), "logits beside products"
            return replace(bias, scale=scale), "logits with and without products"
        arguments = [call.mask, *call.options.values()]
        size = (call.query.shape[-2], call.key.shape[-2])
        for tensor in arguments:
            if isinstance(tensor, Tensor) and tensor.dim() == 4 and tensor.shape[-2:] == size:
                bias = bias_of(tensor[0]) if tensor.is_floating_point() else Bias(None)
                if bias.shape is not None:
                    return bias, "an argument of the call"
        return Bias(None), "the call of attention"

    def _absolute(self, call: RecordedCall) -> bool | Maybe:
        """True if the input of the first layer of the call's stack differs by position."""
        path = re.match(r".*?\.(?=\d+(\.|$))", self.names[call.module])
        first = self.modules.get(f"{path[0]}0") if path else None
        return self.passes.plain.entered.get(first, UNKNOWN) if first else UNKNOWN

    def _temperature(
        self, index: int, call: RecordedCall
    ) -> tuple[Mapping[str, float] | Maybe, str]:
        """Sizes of unrotated queries of equal inputs, relative to that of the first."""
        calls = self.passes.unrotated.calls
        if index >= len(calls) or calls[index].query.shape != call.query.shape:
            return UNKNOWN, "unknown: not called without rotation"
        query = calls[index].query[0]
        first = query[:, :1]
        factors = (query * first).sum((0, 2)) / (first * first).sum()
        away = query - factors[:, None] * first
        if float(away.abs().max()) > 1e-6 * float(query.abs().max()):
            return UNKNOWN, DIFFER
        factor_by_position = {str(at): float(f) for at, f in enumerate(factors)}
        far = self.passes.far
        if far is not None and self._absolute(call) is False:
            moved = far.unrotated.calls[index].query
            if moved.shape[1:] == call.query.shape[1:]:
                factor_by_position[str(far.start)] = float(
                    moved[0, :, 0].norm() / first[:, 0].norm()
                )
        rounded = {at: float(f"{f:.5g}") for at, f in factor_by_position.items()}
        return {at: f for at, f in rounded.items() if abs(f - 1) > SAME_SIZE}, "sizes of queries"

    def _rotation(self, index: int, name: str) -> tuple[RotationFacts | Maybe | None, str]:
        plain, bare = self.passes.plain.calls[index], self.passes.unrotated.calls
        after: Tensor = getattr(plain, name)[0, :HEADS]
        before = getattr(bare[index], name)[0, :HEADS] if index < len(bare) else None
        if before is None or before.shape != after.shape or not bool(after.any()):
            return UNKNOWN, "unknown: not called without rotation"
        distant, far = self.passes.far, None
        if distant is not None:
            calls = (recorder.calls[index] for recorder in (distant.plain, distant.unrotated))
            moved, still = (getattr(call, name)[0, :HEADS] for call in calls)
            far = (moved, still) if moved.shape == after.shape else None
        measured = rotation((after, before), far, distant.start if distant else 0)
        source = "with and without rotation"
        if measured is None:
            measured = rotation((after, after[:, :1].expand_as(after)), None, 0)
            if measured is not None and measured.pairing is None:
                return None, source  # a temperature, or another encoding
            if measured is not None:  # the first query has the gain too
                measured, source = replace(measured, gain=None), EQUAL
        if measured is None:
            return None, source
        for earlier in self._rotations:
            if measured.alike(earlier):
                return earlier, source
        self._rotations.append(measured)
        return measured, source


def _key_heads(key: Tensor) -> int:
    """Heads of keys [rows, heads, tokens, features], equal neighbours counted once."""
    distinct = sum(not torch.equal(key[0, h], key[0, h - 1]) for h in range(1, key.shape[1]))
    return 1 + distinct if bool(key.any()) else key.shape[1]  # zeros tell nothing


def _arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Tensor):
            value = tuple(value.shape)
        if name not in IGNORED and isinstance(value, int | float | str | bool | tuple):
            arguments[name] = list(value) if isinstance(value, tuple) else value
    return arguments


def _without_attention(
    model: nn.Module, plain: Recorder, called: set[str], config: Any
) -> list[tuple[str, AttentionFacts]]:
    """Layers that ran and called no attention."""
    least = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None) or 2
    layers, stacks = [], list[str]()
    for name, stack in model.named_modules():
        if not isinstance(stack, nn.ModuleList) or len(stack) < least:
            continue
        if any(name.startswith(f"{outer}.") for outer in stacks):
            continue
        stacks.append(name)
        for number, layer in enumerate(stack):
            path = f"{name}.{number}"
            if layer not in plain.entered or any(f"{c}.".startswith(f"{path}.") for c in called):
                continue
            mixing = tuple(
                type(part).__name__
                for name, part in layer.named_children()
                if not NOT_MIXING.search(name) and "Norm" not in type(part).__name__
            )
            facts = AttentionFacts(
                module=path,
                kind="none",
                instead=mixing or (type(layer).__name__,),
                sources={"kind": "no call of attention"},
            )
            layers.append((path, facts))
    return layers


def _grouped(module_facts: list[tuple[str, AttentionFacts]]) -> tuple[Layers, ...]:
    """Layers by their facts; calls of a module that are alike are passes over the same layer."""
    calls = (call for n, call in enumerate(module_facts) if call not in module_facts[:n])
    groups: list[tuple[AttentionFacts, list[int]]] = []
    for name, facts in calls:
        facts = replace(facts, passes=module_facts.count((name, facts)))
        number = re.search(r"\.(\d+)(?=\.|$)", name)
        facts = replace(facts, module=re.sub(r"\.\d+(?=\.|$)", ".*", name, count=1))
        numbers = next((numbers for group, numbers in groups if group == facts), None)
        if numbers is None:
            groups.append((facts, numbers := []))
        numbers += [int(number[1])] if number else []
    ordered = sorted(groups, key=lambda group: group[1][:1])
    return tuple(Layers(numbers=tuple(numbers), attention=facts) for facts, numbers in ordered)
