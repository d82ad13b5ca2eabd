"""Triton's interpreter, without what makes it slow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.support.interpreted_operators import patch_operations


@pytest.fixture(scope="session", autouse=True)
def language_patched_once() -> Iterator[None]:
    """Functions that a kernel calls use the language as the kernel has patched it.

    Triton searches the language for what to patch at every call of a function, makes each type
    anew, compares shapes number by number and checks sums of integers for overflow in its own
    language: all of it takes longer than the computation.
    """
    with language_patched():
        yield


@contextmanager
def language_patched() -> Iterator[None]:
    """The same for a block of code."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", _patch_once(interpreter))
        patch.setattr(interpreter, "_get_np_dtype", _same_numbers(interpreter._get_np_dtype))
        patch.setattr(core.block_type, "__init__", _same_block_types(core.block_type.__init__))
        patch.setattr(core.tensor, "__init__", _same_shapes(core.tensor.__init__))
        operations = semantic.TritonSemantic
        plain = operations.broadcast_impl_value
        patch.setattr(operations, "broadcast_impl_value", _broadcast_unless_alike(plain))
        patch.setattr(operations, "binary_op_sanitize_overflow_impl", _require_no_overflow)
        patch_operations(patch, core, operations, interpreter)
        yield


def _patch_once(interpreter: Any) -> Callable[[Callable[..., Any]], Any]:
    tl, patch_language = interpreter.tl, interpreter._patch_lang

    @functools.cache
    def used_by(function: Callable[..., Any]) -> list[Any]:
        return [value for value in function.__globals__.values() if value in (tl, tl.core)]

    def patch_once(function: Callable[..., Any]) -> Any:
        used = used_by(function)
        if used and all(language.static_print is print for language in used):
            return interpreter._LangPatchScope()
        return patch_language(function)

    return patch_once


def _same_numbers(number_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found: dict[str, Any] = {}

    def same(dtype: Any) -> Any:
        if dtype.name not in found:
            found[dtype.name] = number_type(dtype)
        return found[dtype.name]

    return same


def _same_block_types(make: Callable[..., None]) -> Callable[..., None]:
    made: dict[Any, dict[str, Any]] = {}

    def construct(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, tuple(getattr(size, "value", size) for size in shape))
        if key not in made:
            make(self, element_ty, shape)
            made[key] = dict(self.__dict__)
        self.__dict__.update(made[key], element_ty=element_ty)

    return construct


def _same_shapes(make: Callable[..., None]) -> Callable[..., None]:
    made: dict[str, dict[str, Any]] = {}

    def construct(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        if type.name not in made:
            make(self, handle, type)
            made[type.name] = {"shape": self.shape, "numel": self.numel}
        self.__dict__.update(made[type.name], handle=handle, type=type, dtype=type.scalar)

    return construct


def _broadcast_unless_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_unless_alike(self: Any, left: Any, right: Any) -> Any:
        sides = [side.type.shape.values if side.type.is_block() else None for side in (left, right)]
        return (left, right) if sides[0] == sides[1] else broadcast(self, left, right)

    return broadcast_unless_alike


def _require_no_overflow(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> None:
    """Triton's check of sums, differences and products, on NumPy's arrays."""
    scalar = left.type.scalar
    if scalar.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
    exact = compute(left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
    low, high = scalar.get_int_min_value(), scalar.get_int_max_value()
    assert low <= exact.min(), f"{scalar} overflow detected for operation {operation.__name__}"
    assert exact.max() <= high, f"{scalar} overflow detected for operation {operation.__name__}"
