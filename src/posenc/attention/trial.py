"""Trial of a backend on the user's device: small problems against the definition, once each."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import replace
from threading import RLock

import torch
from torch import Tensor

from posenc import __version__
from posenc.attention.backends.common.base import Backend, Plan, Refusal
from posenc.attention.backends.common.definition import attend_by_definition
from posenc.attention.problem.lowering import given_encoding
from posenc.attention.problem.problem import Problem
from posenc.attention.user_cache import kept
from posenc.encoding import BucketedTerms, TokenTableProduct, repeat_heads
from posenc.encoding.tensors import BucketIndex, Offsets
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import is_transformed, without_autocast

HEADS, KEY_HEADS, WIDTH, FARTHEST, LONGEST = 4, 2, 64, 40, 200
"""Sizes of the trial problems. Offsets beyond ``FARTHEST`` share an entry, so that tiles of all
kinds appear."""

ENTRIES = 2 * FARTHEST + 1

SIZES = {
    "table": (HEADS, ENTRIES),
    "left": (1, ENTRIES, WIDTH),
    "right": (1, ENTRIES, WIDTH),
    "column": (1, HEADS, LONGEST),
    "value": (1, ENTRIES, WIDTH),
}
"""Shapes of the tensors of ``BucketedTerms``; of products, those of their rows."""

FULL_FORMULA = (("table", "left", "right", "value"),)
PARTS = (("table",), ("column",))

GRIDS = (Grid.of(Layout.sequence(LONGEST), causal=True), Grid.of(Layout.packed([150, 50])))
"""Grids for parts of the formula, and for all of it: documents with tiles before, between and
beyond the ends of tables, and masked ones. Compiling kernels takes the time; one problem compiles
them all."""

TOLERANCES = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Tolerance by dtype, relative to the largest number of the definition. Correct kernels err by a
fraction of it (float32 ones may multiply in TF32), wrong tiles by all of it."""

_LOCK = RLock()
_DIFFERENCES: dict[tuple[str, ...], str] = {}


def refusal(backend: Backend, device: torch.device, dtype: torch.dtype) -> Refusal | None:
    """The difference that a backend showed on a device; None if none, or if no trial can run.

    Runs once a device, dtype, backend, and version of posenc and PyTorch, and is kept in the
    user's cache folder; a difference is warned of. Nothing is run while ``torch.compile`` traces,
    under transforms of ``torch.func``, or while a CUDA graph is captured.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    key = backend.name, _name(device), str(dtype), torch.__version__, __version__

    def find() -> str:
        message = difference(backend, device, dtype)
        if message:
            put_aside = f"backend {backend.name!r} is put aside: {message}"
            warnings.warn(put_aside, RuntimeWarning, stacklevel=4)
        return message

    with _LOCK:
        if key not in _DIFFERENCES:
            _DIFFERENCES[key] = ""  # what the trial itself calls is not tried
            name = hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]
            _DIFFERENCES[key] = kept("trials", name, find, read=bytes.decode, write=str.encode)
    return Refusal(_DIFFERENCES[key]) if _DIFFERENCES[key] else None


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def difference(
    backend: Backend, device: torch.device, dtype: torch.dtype, *, grids: Sequence[Grid] = GRIDS
) -> str:
    """A sentence on the first wrong output or gradient of a backend on a device; "" if none is.

    On the last grid; backends without the whole formula are tried with parts of it, on the first.
    """
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(device):
        for sets, grid in ((FULL_FORMULA, grids[-1]), (PARTS, grids[0])):
            messages = [_compare(backend, names, grid, dtype, device) for names in sets]
            served = [message for message in messages if message is not None]
            if served:
                return next(filter(None, served), "")
    return ""


def _compare(
    backend: Backend, names: Sequence[str], grid: Grid, dtype: torch.dtype, device: torch.device
) -> str | None:
    """The difference in one problem, "" for none; None where the backend does not support it.

    Tile sizes are measured only where the first ones do not fit the device.
    """
    failure = ""
    for tried in dict.fromkeys((backend.untuned(), backend)):
        try:
            computed = _computed(tried, names, grid, dtype, device)
            break
        except Exception as error:
            failure = f"on {_name(device)} it fails with {type(error).__name__}: {error}"
    else:
        return failure
    if computed is None:
        return None
    expected = _computed(None, names, grid, dtype, device)
    assert expected is not None
    for name, x in computed.items():
        exact = expected[name]
        off = (x.double() - exact).abs().max() / exact.abs().max()
        if not off <= TOLERANCES.get(dtype, TOLERANCES[torch.float32]):
            return (
                f"on {_name(device)} its {name} in {dtype} is {off:.1g} off the definition, "
                "relative to the largest"
            )
    return ""


def _computed(
    backend: Backend | None,
    names: Sequence[str],
    grid: Grid,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor] | None:
    """Output and all gradients by name, None where the backend does not support the problem.

    Without a backend, by definition, in float64.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(size: Sequence[int], rounded_to: torch.dtype) -> Tensor:
        x = torch.randn(size, generator=generator).to(device, rounded_to)
        return (x.double() if backend is None else x).requires_grad_()

    shapes = {"q": (HEADS, grid.query), "k": (KEY_HEADS, grid.key), "v": (KEY_HEADS, grid.key)}
    tensors = {
        name: drawn((2, heads, side.length, WIDTH), dtype) for name, (heads, side) in shapes.items()
    }
    tensors |= {name: drawn(SIZES[name], torch.float32) for name in names}
    grid = replace(grid, query=grid.query.to(device), key=grid.key.to(device))
    problem = _problem(tensors, grid)
    if backend is None:
        output = attend_by_definition(problem).output
    else:
        plan = backend.plan(problem)
        if not isinstance(plan, Plan):
            return None
        output = plan.run().output
    weights = torch.linspace(-1, 1, output.numel(), device=device).view_as(output)
    loss = (output * weights).sum()
    gradients = torch.autograd.grad(loss, list(tensors.values()), materialize_grads=True)
    named = zip(tensors, gradients, strict=True)
    return {"output": output, **{f"gradient of {name}": x for name, x in named}}


def _problem(tensors: dict[str, Tensor], grid: Grid) -> Problem:
    """The problem of queries, keys, values and some of the tensors named in ``SIZES``."""
    scale = WIDTH**-0.5 / 3
    parts = {name: x for name, x in tensors.items() if name in ("table", "value")}
    q, k, v = (tensors[name] for name in "qkv")
    left, right, column = (tensors.get(name) for name in ("left", "right", "column"))
    term = BucketedTerms(
        bucket,
        **parts,
        left=None if left is None else TokenTableProduct(q, scale * left),
        right=None if right is None else TokenTableProduct(repeat_heads(k, HEADS), scale * right),
        column=None if column is None else column[..., : grid.key.length],
        max_distance=FARTHEST,
    )
    return Problem(q, k, v, grid, given_encoding([term]), scale, 0.0, (term,))


def bucket(offset: Offsets) -> BucketIndex:
    """Clipped offsets."""
    return offset[..., 0].round().long().clamp(-FARTHEST, FARTHEST) + FARTHEST
