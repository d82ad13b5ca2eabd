"""Trial of a backend on the user's device: small problems against the definition, once each."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from threading import RLock

import torch
from torch import Tensor

from posenc import __version__
from posenc.attention.backends.common.base import Backend, Plan, Refusal
from posenc.attention.backends.common.definition import attend_by_definition
from posenc.attention.problem.lowering import lower
from posenc.attention.problem.problem import Problem
from posenc.attention.trial_parts import FULL_FORMULA, HEADS, KERNELS, LONGEST, PARTS, WIDTH, Kind
from posenc.attention.user_cache import kept
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import is_transformed, without_autocast

KEY_HEADS = 2

GRIDS = (Grid.of(Layout.sequence(LONGEST), causal=True), Grid.of(Layout.packed([150, 50])))
"""Grids for parts of the formula, and for all of it: documents with tiles before, between and
beyond the ends of tables, and masked ones. Compiling kernels takes the time; one problem compiles
them all."""

TOLERANCES = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Tolerance by dtype, relative to the largest number of the definition. Correct kernels err by a
fraction of it (float32 ones may multiply in TF32), wrong tiles by all of it."""

_LOCK = RLock()
_DIFFERENCES: dict[tuple[str, ...], str] = {}


def refusal(
    backend: Backend, device: torch.device, dtype: torch.dtype, kernels: str = ""
) -> Refusal | None:
    """The difference that a backend showed on a device; None if none, or if no trial can run.

    Runs once a device, dtype, backend, set of its kernels, and version of posenc and PyTorch, and
    is kept in the user's cache folder; a difference is warned of. Nothing is run
    while ``torch.compile`` traces, under transforms of ``torch.func``, or while a CUDA graph is
    captured.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    key = backend.name, _name(device), str(dtype), *([kernels] if kernels else [])
    with _LOCK:
        if key not in _DIFFERENCES:
            _DIFFERENCES[key] = ""  # what the trial itself calls is not tried
            _DIFFERENCES[key] = _stored(key, backend, device, dtype, kernels)
    return Refusal(_DIFFERENCES[key]) if _DIFFERENCES[key] else None


def _stored(
    key: tuple[str, ...], backend: Backend, device: torch.device, dtype: torch.dtype, kernels: str
) -> str:
    """The difference from the user's cache, or measured now."""
    versions = torch.__version__, __version__
    words = (*key, *versions)
    name = hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]

    def find() -> str:
        message = difference(backend, device, dtypes=(dtype,), kernels=kernels)
        if message:
            put_aside = f"backend {backend.name!r} is put aside: {message}"
            warnings.warn(put_aside, RuntimeWarning, stacklevel=4)
        return message

    return kept("trials", name, find, read=bytes.decode, write=str.encode)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def difference(
    backend: Backend,
    device: torch.device,
    *,
    grids: Sequence[Grid] = GRIDS,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    kernels: str = "",
) -> str:
    """A sentence on the first wrong output or gradient of a backend on a device; "" if none is.

    On the last grid; backends without the whole formula are tried with parts of it, on the first.
    ``kernels`` apart from the formula are tried with their own kind.
    """
    sets = [(FULL_FORMULA, grids[-1]), (PARTS, grids[0])]
    if kernels:
        sets = [((KERNELS[kernels],), grids[-1])]
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(device):
        for kinds, grid in sets:
            served = False
            for kind, dtype in product(kinds, dtypes):
                message = _compare(backend, kind, grid, dtype, device)
                if message:
                    return message
                served = served or message is not None
            if served:
                break
    return ""


def _compare(
    backend: Backend, kind: Kind, grid: Grid, dtype: torch.dtype, device: torch.device
) -> str | None:
    """The difference in one problem, "" for none; None where the backend does not support it.

    Tile sizes are measured only where the first ones do not fit the device.
    """
    tensors, failure = _tensors(grid, device, dtype), ""
    for tried in dict.fromkeys((backend.untuned(), backend)):
        try:
            got = _computed(tried, kind, grid, device, *tensors)
            break
        except Exception as error:
            failure = f"on {_name(device)} it fails with {type(error).__name__}: {error}"
    else:
        return failure
    if got is None:
        return None
    wanted = _computed(None, kind, grid, device, *(x.double() for x in tensors))
    assert wanted is not None
    for name, mine in got.items():
        exact = wanted[name]
        off = (mine.double() - exact).abs().max() / exact.abs().max()
        if not off <= TOLERANCES.get(dtype, TOLERANCES[torch.float32]):
            return (
                f"on {_name(device)} its {name} in {dtype} is {off:.1g} off the definition, "
                "relative to the largest"
            )
    return ""


def _tensors(grid: Grid, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, grid.query), (KEY_HEADS, grid.key), (KEY_HEADS, grid.key)]
    q, k, v = (
        torch.randn(2, heads, side.length, WIDTH, generator=generator).to(device, dtype)
        for heads, side in shapes
    )
    return q, k, v


def _computed(
    backend: Backend | None, kind: Kind, grid: Grid, device: torch.device, *tensors: Tensor
) -> dict[str, Tensor] | None:
    """Output and all gradients by name, None where the backend does not support the problem.

    Without a backend, by definition.
    """
    encoding = kind(torch.Generator().manual_seed(7)).to(device)
    encoding = encoding.to(torch.promote_types(tensors[0].dtype, torch.float32))
    grid = replace(grid, query=grid.query.to(device), key=grid.key.to(device))
    q, k, v = (x.requires_grad_() for x in tensors)
    scale = WIDTH**-0.5 / 3
    lowered = lower(encoding, q, k, grid, scale=scale)
    problem = Problem(q, k, v, grid, encoding, scale, 0.0, lowered)
    if backend is None:
        output = attend_by_definition(problem).output
    else:
        plan = backend.plan(problem)
        if not isinstance(plan, Plan):
            return None
        output = plan.run(lse=False).output
    weights = torch.linspace(-1, 1, output.numel(), device=device).view_as(output)
    learned = {"q": q, "k": k, "v": v, **dict(encoding.named_parameters())}
    gradients = torch.autograd.grad(
        (output * weights).sum(), list(learned.values()), materialize_grads=True
    )
    named = zip(learned, gradients, strict=True)
    return {"output": output, **{f"gradient of {name}": x for name, x in named}}
