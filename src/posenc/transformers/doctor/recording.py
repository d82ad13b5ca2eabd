"""Calls of attention in a forward pass without stored weights, with their inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from posenc.transformers.calls import (
    CACHE,
    RecordedCall,
    cache_name,
    names_of,
    record_call,
    recorded_calls,
)
from posenc.transformers.doctor.expanded_weights import (
    INTERFACE,
    PRODUCTS,
    ExpandedProducts,
    is_expanded,
)

TOKENS, FAR = 9, 2**20
"""Tokens of a pass, and the position where the far one begins."""

ADDED = (torch.baddbmm, torch.Tensor.baddbmm)
SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax)
FRAMES = 64
"""Frames of a spectrogram of any length."""

BINS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel")
"""Names of the number of features of a frame of a spectrogram."""

ROTARY = re.compile("Rotary|RoPE|Rope(?![a-z])")
"""Class names of modules that make or apply rotations."""


_MASKS: ContextVar[dict[int, tuple[Tensor, Any]] | None] = ContextVar("masks", default=None)


class Recorder(ExpandedProducts):
    """Records calls of attention, which answer zeros, tables of positions and mask functions.

    Args:
        layers: modules that get the same input at all positions, so that their queries differ by
            what they do with positions alone.
        seeds, silent: see ``ExpandedProducts``.
    """

    def __init__(
        self, layers: Set[nn.Module], seeds: Mapping[int, int], *, silent: bool = False
    ) -> None:
        super().__init__(seeds, silent=silent)
        self._layers = layers
        self.calls: list[RecordedCall] = []
        self.masks: dict[int, tuple[Tensor, Any]] = {}
        self.tables: dict[nn.Module, tuple[int, int]] = {}
        self.entered: dict[nn.Module, bool] = {}
        self._inside: list[nn.Module] = []
        self._products: dict[nn.Module, tuple[Tensor, Tensor] | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self._inside:
            return self._fused(*args, **kwargs)
        if func in SOFTMAX and self._inside and args[0].dim() > 2:
            module, logits = self._inside[-1], args[0]
            operands = self._products.get(module)
            if operands is not None and (logits.dim() == 4 or _attends(module)):
                query, key = (
                    x if x.dim() == 4 else x.reshape(1, -1, *x.shape[-2:]) for x in operands
                )
                logits = logits.reshape(-1, *logits.shape[-2:]).clone()
                self.calls.append(RecordedCall(module, query, key, key, logits=logits))
                self._products[module] = None  # the next product is with the values
                return torch.zeros_like(args[0])
        elif func in (*PRODUCTS, *ADDED) and self._inside:
            self._remember(*(args if func in PRODUCTS else args[1:] or kwargs.values()))
        elif func is F.embedding:
            self._look_up(args[0], args[1])
        elif func is torch.Tensor.__getitem__ and self._is_table(*args):
            self._look_up(torch.arange(len(args[0]))[args[1]], args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Pre-forward hook: give a layer of a stack equal inputs at all positions."""
        self._inside.append(module)
        self.entered.setdefault(module, False)
        hidden = args[0] if args else kwargs.get("hidden_states")
        if module not in self._layers or not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return None
        equal = hidden[:, :1].expand_as(hidden)
        self.entered[module] |= not torch.allclose(hidden, equal)
        equal = equal.contiguous()
        return ((equal, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": equal})

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._products.pop(self._inside.pop(), None)

    def _fused(
        self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
    ) -> Tensor:
        if _within_tokens(query):
            return _mean(query, value)
        mask = rest[0] if rest else options.pop("attn_mask", None)
        self.calls.append(RecordedCall(self._inside[-1], query, key, value, mask, options))
        return value.new_zeros(*query.shape[:-1], value.shape[-1])

    def _remember(self, a: Any, b: Any, *rest: Any) -> None:
        """Keep the operands of what may be the product of queries and keys."""
        module = self._inside[-1]
        if module in self._products or not isinstance(b, Tensor) or is_expanded(b):
            return
        if min(a.dim(), b.dim()) < 3:
            return
        if a.shape[-1] == b.shape[-2] and (a.shape[-2] in (TOKENS, TOKENS - 2) or _attends(module)):
            self._products[module] = a.clone(), b.mT.clone()

    def _is_table(self, tensor: Tensor, rows: Any) -> bool:
        """True if an embedding of a subclass reads rows of its weight."""
        module = self._inside[-1] if self._inside else None
        if not isinstance(module, nn.Embedding) or not isinstance(rows, slice | Tensor):
            return False
        return module.weight is tensor

    def _look_up(self, index: Tensor, table: Tensor) -> None:
        rows = index.reshape(-1, index.shape[-1])[0] if index.dim() else index
        if self._inside and len(rows) > 1 and bool((rows.diff() == 1).all()):
            self.tables[self._inside[-1]] = table.shape[0], int(rows[0])


class FarCache(transformers.DynamicCache):
    """A cache that claims ``FAR`` tokens and keeps none."""

    def get_seq_length(self, *args: Any, **options: Any) -> int:
        return FAR

    def get_query_offset(self, *args: Any, **options: Any) -> int:
        return FAR

    def get_mask_sizes(self, length: Any, *args: Any, **options: Any) -> tuple[int, int]:
        return length if isinstance(length, int) else len(length), FAR

    def update(
        self, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        return key, value


def record(
    model: Any,
    seeds: Mapping[int, int],
    *,
    start: int | None = None,
    cached: bool = False,
    rotated: bool = True,
    silent: bool = False,
) -> Recorder:
    """A forward pass over equal tokens.

    Args:
        start: the first position; None: that of the model.
        cached: behind a cache of ``FAR`` tokens.
        rotated: as it is; else rotary modules answer without a rotation.
        silent: products are zero.
    """
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = {layer for stack in stacks for layer in stack}

    def passed(inputs: dict[str, Any]) -> Recorder:
        recorder = Recorder(layers, seeds, silent=silent)
        with ExitStack() as hooks:
            for module in model.modules():
                if ROTARY.search(type(module).__name__) and not rotated:
                    hook = module.register_forward_hook(_unrotated, with_kwargs=True)
                    hooks.callback(hook.remove)
                if isinstance(module, nn.Softmax | nn.Dropout):
                    continue  # softmax belongs to the module around it
                hook = module.register_forward_pre_hook(recorder.enter, with_kwargs=True)
                hooks.callback(hook.remove)
                hook = module.register_forward_hook(recorder.leave, always_call=True)
                hooks.callback(hook.remove)
            token = _MASKS.set(recorder.masks)
            hooks.callback(_MASKS.reset, token)
            recorder.calls = hooks.enter_context(recorded_calls())
            with torch.no_grad(), recorder:
                model(**inputs)
        return recorder

    *others, last = _inputs(model, start, cached)
    for inputs in others:
        with suppress(TypeError, RuntimeError, ValueError, IndexError):  # this model takes others
            return passed(inputs)
    return passed(last)


def _inputs(model: Any, start: int | None, cached: bool) -> list[dict[str, Any]]:
    """Arguments to try, one after the other."""
    config, main, dtype = model.config, model.main_input_name, model.dtype
    if main != "input_ids":
        if start is not None:
            raise ValueError("the positions are those of the input")
        return _other_inputs(config, main, dtype)
    ids = torch.full((1, TOKENS), 5)
    if start is not None:
        inputs = {"input_ids": ids, "position_ids": torch.arange(start, start + TOKENS)[None]}
        if not cached:
            return [inputs | {"use_cache": False}]
        name = cache_name(names_of(model.forward)) or CACHE
        return [inputs | {"use_cache": True, name: FarCache()}]
    choices: list[dict[str, Any]] = [{"input_ids": ids, "use_cache": False}, {"input_ids": ids}]
    if config.is_encoder_decoder:  # fewer queries tell cross-attention
        return [c | {"decoder_input_ids": ids[:, :-2]} for c in choices] + choices
    return choices


def _other_inputs(config: Any, main: str, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Images, spectrograms or sounds that are the same everywhere, in shapes to try."""
    if main == "pixel_values":
        size = getattr(config, "image_size", None) or 224
        sides = (size, size) if isinstance(size, int) else tuple(size)
        shapes: list[tuple[int, ...]] = [(1, getattr(config, "num_channels", 3), *sides)]
    elif main == "input_features":
        bins = next((n for name in BINS if (n := getattr(config, name, None))), 80)
        frames = 2 * getattr(config, "max_source_positions", FRAMES)  # which Whisper asks for
        shapes = [(1, bins, frames), (1, FRAMES, bins)]
    else:
        shapes = [(1, 4000), (1, 1, 4000)]
    decoder = {"decoder_input_ids": torch.full((1, TOKENS), 5)} if config.is_encoder_decoder else {}
    return [{main: torch.full(shape, 0.3, dtype=dtype), **decoder} for shape in shapes]


def _within_tokens(query: Tensor) -> bool:
    """True if each token attends over outputs of earlier layers [rows, tokens, …], not tokens."""
    return query.shape[1] == TOKENS and query.shape[2] < TOKENS - 2


def _mean(query: Tensor, value: Tensor) -> Tensor:
    """The mean of the values, which later layers read, for each query."""
    return value.mean(2, keepdim=True).expand(*query.shape[:3], -1)


def _attends(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower()


def _unrotated(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """The output of a rotary module for angles of zero: cos = 1, sin = 0, or its inputs."""
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]

    def plain(out: Any) -> Any:
        if isinstance(out, Tensor):
            return torch.ones_like(out) if out.is_complex() else out
        if isinstance(out, dict):
            return {name: plain(part) for name, part in out.items()}
        if not isinstance(out, tuple | list):
            return out
        reals = [x for x in out if isinstance(x, Tensor) and not x.is_complex()]
        if len(reals) == len(out) == 2:
            shapes = [x.shape for x in inputs[:2]]
            if shapes == [x.shape for x in out] and inputs[1].is_floating_point():
                return tuple(inputs[:2])  # it rotates queries and keys itself
            return torch.ones_like(out[0]), torch.zeros_like(out[1])
        return type(out)(plain(part) for part in out)

    return plain(output)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, None]:
    """``record_call``, but within each token the mean of the values."""
    if _within_tokens(query):
        return _mean(query, value).transpose(1, 2), None
    return record_call(module, query, key, value, *rest, **options)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Tensor:
    mask = torch.zeros(batch_size, 1, int(q_length), int(kv_length), dtype=dtype)
    zero = torch.zeros((), dtype=torch.long)
    queries = torch.arange(mask.shape[-2]).unsqueeze(1) + q_offset
    with suppress(IndexError, RuntimeError):  # content of other tokens: all are visible
        sees = mask_function(zero, zero, queries, torch.arange(mask.shape[-1]) + kv_offset)
        mask.masked_fill_(~torch.as_tensor(sees), torch.finfo(dtype).min)
    masks = _MASKS.get()
    if masks is not None:
        masks[mask.data_ptr()] = mask, mask_function  # kept alive: its address remains its own
    return mask


AttentionInterface.register(INTERFACE, _attend)
AttentionMaskInterface.register(INTERFACE, _mask)
