"""Results of weights alone, reused for as long as the weights stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from posenc.runtime import has_values, is_transformed, needs_dispatch

T = TypeVar("T")

PLAIN = ("torch.nn.modules.", "posenc.")
"""Modules of Python whose layers compute with their own parameters alone. Those of PEFT and of
quantizers have switches that leave no trace in parameters."""

MOST = 2
"""Results kept of one weight."""

SAMPLED = 64
"""Numbers of a tensor that are compared, at most."""


class Layer(Protocol):
    """A module, or a function of the modules that it names."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules that it reads."""


def reused(
    layers: Sequence[Layer], tensors: Sequence[Tensor], compute: Callable[[], T], *kind: Hashable
) -> T | None:
    """The result of ``compute``, kept from the second call on while nothing that it reads changes.

    A weight counts as changed when it is another tensor, was written to, or differs in one of
    ``SAMPLED`` numbers: edits through ``.data`` leave no other trace. None at the first call with
    weights as they are now; on devices other than CPUs; where a gradient is wanted; while PyTorch
    traces, watches or transforms what is computed; and with layers that others observe or replace.
    A result lives no longer than the first of the weights.

    Args:
        layers: that ``compute`` calls, in evaluation mode.
        tensors: that it reads beside the parameters of the layers.
        kind: what else the result depends on.
    """
    modules = [module for layer in layers for module in layer.modules()]
    weights = [*tensors, *(x for module in modules for x in module.parameters(recurse=False))]
    if torch.is_grad_enabled() and any(x.requires_grad for x in weights):
        return None
    if not (all(map(_is_plain, modules)) and all(map(_is_readable, weights))):
        return None
    if is_transformed() or needs_dispatch(*weights):
        return None
    results: dict[Hashable, _Result] = _RESULTS.setdefault(weights[0], {})  # type: ignore[no-untyped-call]
    found = results.pop((kind, _autocast()), None)
    if found is None or not found.holds(weights):
        found = _Result(weights)
        while len(results) >= MOST:
            del results[next(iter(results))]
    elif found.value is None:
        with torch.inference_mode(False), torch.no_grad():
            found.value = compute()
    results[kind, _autocast()] = found  # the last used is the last to go
    return cast(T | None, found.value)


class _Result:
    """A result, None as yet, and the weights as they were when it was asked for."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.value: object = None
        self.weights = [ref(x) for x in weights]
        self.states = [_state(x) for x in weights]
        self.samples = [_sample(x).clone() for x in weights]

    def holds(self, weights: Sequence[Tensor]) -> bool:
        return (
            len(weights) == len(self.weights)
            and all(was() is x for was, x in zip(self.weights, weights, strict=True))
            and self.states == [_state(x) for x in weights]
            and all(map(torch.equal, self.samples, map(_sample, weights)))
        )


_RESULTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By the first of the weights, then by kind."""


def _is_plain(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module).__module__.startswith(PLAIN) and not (hooks or module.training)


def _is_readable(x: Tensor) -> bool:
    plain = x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0
    return plain and has_values(x) and not x.is_inference()


def _state(x: Tensor) -> tuple[Hashable, ...]:
    return x.data_ptr(), x._version, x.dtype, x.shape


def _sample(x: Tensor) -> Tensor:
    """Numbers of a contiguous tensor, evenly spread, as a view."""
    step = -(-x.numel() // SAMPLED)
    return x.detach().view(-1)[::step]


def _autocast() -> torch.dtype | None:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
