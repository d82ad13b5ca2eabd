"""Queries of the current execution context: tracing, autocast and function transforms."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

WITHOUT_FLOAT64 = {"mps"}
"""Types of devices that have no float64."""


def widest(device: torch.device) -> torch.dtype:
    """float64 where the device has it, else float32."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


PLAIN_TENSORS = (Tensor, Parameter)


def has_values(x: Tensor) -> bool:
    """True if Python may read the values of ``x``.

    False for meta and fake tensors, inside ``torch.func.vmap`` for tensors of all its rows, and
    while ``torch.compile`` or ``torch.export`` traces, where reading would break the graph, or
    ``torch.jit`` does, whose graph would keep what was read.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    if torch._C._are_functorch_transforms_active():
        functorch = torch._C._functorch
        while functorch.is_functorch_wrapped_tensor(x):
            if functorch.is_batchedtensor(x):
                return False
            x = functorch.get_unwrapped(x)
    return not (x.is_meta or isinstance(x, FakeTensor))


def is_exporting() -> bool:
    """True while ``torch.export`` traces.

    ``torch.compiler.is_exporting()`` is also True under ``torch.compile`` in PyTorch 2.11.
    """
    return torch.compiler._is_exporting_flag


def is_scripted() -> bool:
    """True while ``torch.jit.trace`` makes a graph, as the older ONNX exporter does."""
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


def needs_dispatch(*tensors: Tensor | None) -> bool:
    """True where an operator on these tensors has to go through PyTorch's dispatcher.

    While a graph is traced, in a dispatch mode (counters of operations, selective checkpointing),
    in transforms as of ``is_transformed``, for subclasses of tensors, and for views whose sign is
    yet to be changed in memory.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return True
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    for x in tensors:  # noqa: SIM110 - a generator costs more than what it does, at each call
        if x is not None and (type(x) not in PLAIN_TENSORS or x.is_neg()):
            return True
    return False


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts to on a device; None where it is off or does not exist."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context with autocast disabled (it does not exist on the meta device)."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def differentiates_forward() -> bool:
    """True inside ``torch.func.jvp``, ``jacfwd``, ``hessian`` and ``forward_ad.dual_level``."""
    return forward_ad._current_level >= 0


def differentiates_twice() -> bool:
    """True inside two of ``torch.func.grad``, ``vjp`` and ``jacrev``, one in the other."""
    if not torch._C._are_functorch_transforms_active():
        return False
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    grads = [x for x in transforms if x.key() == torch._C._functorch.TransformType.Grad]
    return len(grads) > 1


def is_transformed() -> bool:
    """True inside any transform of ``torch.func`` and inside ``forward_ad.dual_level``.

    Fused operators support reverse mode only: forward-mode derivatives would silently be zero, and
    ``vmap`` has no batching rule for them.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
