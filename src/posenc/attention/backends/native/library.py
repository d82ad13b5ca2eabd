"""The compiled kernels, and how their arguments lie in memory (csrc/problem.h)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from posenc.attention.backends.native.variants import sources_hash
from posenc.attention.problem.terms import AXES

PAD = 64
"""Entries of a bucket map that kernels may read before and after it."""

_PROCESS = os.getpid()

KERNELS = ("forward", "backward", "rotate", "linear")

TYPES = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 1, torch.float16: 2}


def _numbers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


class CTokens(ctypes.Structure):
    """``[batch, heads, tokens, features]``, features contiguous."""

    _fields_ = [*_pointers("data"), *_numbers("type", "batch", "head", "token")]

    @classmethod
    def of(cls, x: Tensor) -> CTokens:
        """Describe a tensor of that shape; dimensions of size 1 get stride 0."""
        batch, heads, tokens, _ = x.shape
        of_batch, of_head, of_token, _ = x.stride()
        return cls(
            x.data_ptr(),
            TYPES[x.dtype],
            of_batch if batch > 1 else 0,
            of_head if heads > 1 else 0,
            of_token if tokens > 1 else 0,
        )


class CRotaryFactors(ctypes.Structure):
    """Cosines and sines that rotate pairs of features: ``[batch, heads, tokens, pairs]``."""

    _fields_ = [*_pointers("cosine", "sine"), *_numbers("batch", "head", "token")]

    @classmethod
    def of(cls, cosine: Tensor, sine: Tensor) -> CRotaryFactors:
        """Describe two contiguous tensors of that shape; dimensions of size 1 get stride 0."""
        steps = zip(cosine.shape[:3], cosine.stride(), strict=False)
        return cls(cosine.data_ptr(), sine.data_ptr(), *(step if n > 1 else 0 for n, step in steps))


class CTeam(ctypes.Structure):
    """The threads of a call: how many, and the function that runs code on each (csrc/team.h)."""

    _fields_ = [*_numbers("threads"), *_pointers("parallel")]


class CBucketMap(ctypes.Structure):
    """Buckets of consecutive offsets, and their spans."""

    _fields_ = [
        *_pointers("bucket", "span_of", "spans"),
        *_numbers("first", "count", "buckets", "low", "high"),
    ]


class COperand(ctypes.Structure):
    """A tensor of a term as ``[batch, heads, rows, features]``, and room for its gradient."""

    _fields_ = [
        *(("value", CTokens), ("gradient", CTokens)),
        *_numbers("part_stride", "rows", "features"),
    ]


class CTerms(ctypes.Structure):
    """Operands of the structured terms, in the order of ``AXES``, which the build passes on."""

    _fields_ = [*((name, COperand) for name in AXES), *_numbers("first")]


class CPairs(ctypes.Structure):
    """A term of pairs outside the structured form, see ``pairs.py``."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * 6),
        ("data", ctypes.c_void_p * 6),
        ("gradient", ctypes.c_void_p * 6),
    ]


class CProblem(ctypes.Structure):
    """All arguments of a kernel."""

    _fields_ = [
        *_numbers("batch", "heads", "groups", "queries", "keys", "dim", "value_dim"),
        ("team", CTeam),
        *_numbers("chunks", "splits"),
        ("scale", ctypes.c_double),
        ("dropout", ctypes.c_double),
        ("softcap", ctypes.c_double),
        *_numbers("seed", "global_lse"),
        *((name, CTokens) for name in ("q", "k", "v", "out")),
        *((name, CRotaryFactors) for name in ("q_rotary", "k_rotary")),
        *_numbers("rotated", "adjacent"),
        *_pointers("lse", "sinks", "sinks_gradient", "lse_gradient"),
        *_pointers("low", "high", "base", "bands"),
        *_numbers("rows_batch", "period", "jump"),
        ("terms", CTerms),
        ("map", CBucketMap),
        *((name, CTokens) for name in ("gradient", "dq", "dk", "dv")),
        *_numbers("dk_split", "dv_split"),
        ("pairs", CPairs),
    ]


class CRotation(ctypes.Structure):
    """Tokens whose pairs of features are multiplied as complex numbers (csrc/rotation.h)."""

    _fields_ = [
        *(("x", CTokens), ("out", CTokens), ("factors", CRotaryFactors)),
        *_numbers("batch", "heads", "tokens", "features", "pairs"),
        *_numbers("adjacent", "conjugate", "stream"),
        ("team", CTeam),
    ]


class CLinear(ctypes.Structure):
    """A linear layer and the rows that it is of (csrc/linear.h)."""

    _fields_ = [
        *_pointers("x", "weight", "bias", "out"),
        *_numbers("type", "rows", "inputs", "outputs"),
        ("team", CTeam),
    ]


def _openmp() -> int | None:
    """The address of ``GOMP_parallel`` in the runtime that PyTorch computes on, whatever its name.

    None where it has none: the kernels then run on one thread.
    """
    try:
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel  # it and all that it is linked with
    except (AttributeError, OSError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


class Library:
    """The shared object at ``path``.

    Raises:
        OSError: where it cannot be loaded, or was built of other sources than these.
    """

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        try:
            compiled = loaded.posenc_sources
            self._functions: dict[str, Callable[[object], int]] = {
                name: getattr(loaded, f"posenc_{name}")
                for name in map("_".join, product(KERNELS, ("float32", "float64")))
            }
        except AttributeError as error:
            raise OSError(str(error)) from error
        compiled.restype = ctypes.c_char_p
        if compiled() != sources_hash().encode():
            raise OSError(f"{path} was built of other sources")
        self._parallel = _openmp()

    def call(self, name: str, problem: CProblem | CRotation | CLinear, dtype: torch.dtype) -> None:
        """Run one of ``KERNELS``, without the interpreter's lock.

        Raises:
            MemoryError: where scratch memory cannot be had.
        """
        # OpenMP's threads do not survive a fork: a child computes on its own thread alone.
        forked = os.getpid() != _PROCESS
        problem.team = CTeam(1 if forked else torch.get_num_threads(), self._parallel)
        kind = "float64" if dtype == torch.float64 else "float32"
        if self._functions[f"{name}_{kind}"](ctypes.byref(problem)):
            raise MemoryError(f"no memory for the scratch of posenc's {name} kernel")
