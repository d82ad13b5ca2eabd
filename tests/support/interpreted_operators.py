"""Operations of Triton's interpreter as NumPy computes them, without looking for types again.

The first operation on operands of some types is Triton's own. It is compared with what NumPy
computes, and if no bit differs, NumPy computes all later ones on operands of these types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

Operator = Callable[..., Any]


def _quotient(left: Any, right: Any) -> Any:
    """Rounded towards zero."""
    return (left - np.fmod(left, right)) // right


ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

QUOTIENTS = {"truediv": np.divide, "floordiv": _quotient}

BITS = {"and_": np.bitwise_and, "or_": np.bitwise_or, "xor_": np.bitwise_xor}

COMPARISONS = {"less_than": np.less, "less_equal": np.less_equal, "equal": np.equal}
COMPARISONS |= {"greater_than": np.greater, "greater_equal": np.greater_equal}
COMPARISONS |= {"not_equal": np.not_equal}

OTHERS = {"minimum": np.minimum, "maximum": np.maximum, "shl": np.left_shift}

BINARY = {**ARITHMETIC, **QUOTIENTS, **BITS, **COMPARISONS, **OTHERS}
"""Names in Triton's semantics."""

METHODS = {f"__{name.strip('_')}__": name for name in (*ARITHMETIC, *QUOTIENTS, *BITS)}
METHODS |= {"__lshift__": "shl", "__lt__": "less_than", "__le__": "less_equal"}
METHODS |= {"__gt__": "greater_than", "__ge__": "greater_equal"}
METHODS |= {"__eq__": "equal", "__ne__": "not_equal"}
"""The same as methods of a tensor; each of ``ARITHMETIC`` checks for overflow."""


@dataclass(frozen=True)
class Shortcut:
    """An operation on operands of known types.

    Args:
        compute: a function of arrays.
        dtype: what operands are converted to.
        exact: results that integers of this type cannot hold are errors.
        like: a result of Triton's own, whose type all results have.
    """

    compute: Operator
    dtype: np.dtype
    exact: bool
    like: Any

    def __call__(self, *operands: Any) -> Any:
        arrays = [self._array(operand) for operand in operands]
        data = self.compute(*arrays)
        if self.exact:
            wide = self.compute(*(array.astype(np.int64) for array in arrays))
            assert (wide == data).all(), f"{self.dtype} overflow of {self.compute.__name__}"
        return self._tensor(data)

    def _array(self, operand: Any) -> Any:
        if not hasattr(operand, "handle"):
            return self.dtype.type(operand)
        data = operand.handle.data
        return data if data.dtype == self.dtype else data.astype(self.dtype)

    def _tensor(self, data: Any) -> Any:
        tensor, handle = object.__new__(type(self.like)), self.like.handle
        tensor.__dict__.update(self.like.__dict__, handle=type(handle)(data, handle.dtype))
        return tensor


class PointerShortcut(Shortcut):
    """A pointer and a signed number of elements."""

    def __call__(self, *operands: Any) -> Any:
        pointer, count = operands
        width = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
        return self._tensor(pointer.handle.data + width * self._array(count).astype(np.uint64))


class Load(Shortcut):
    """Values at pointers, from Triton's own memory access."""

    def __call__(self, *operands: Any) -> Any:
        pointers, mask, other = operands
        shape = self.like.handle.data.shape
        given = np.ones(shape, bool) if mask is None else np.broadcast_to(mask.handle.data, shape)
        if other is None:
            default = np.zeros(shape, self.dtype)
        else:
            default = np.broadcast_to(self._array(other), shape)
        places = np.broadcast_to(pointers.handle.data, shape)
        return self._tensor(self.compute(places, given, default, self.dtype))


def patch_operations(patch: Any, core: Any, operations: Any, interpreter: Any) -> None:
    """Let Triton's semantics and the methods of its tensors take shortcuts."""
    semantic = interpreter.interpreter_semantic
    for name in BINARY:
        patch.setattr(operations, name, _remembered(name, getattr(operations, name), interpreter))
    patch.setattr(operations, "cast", _remembered_cast(operations.cast, interpreter))
    patch.setattr(operations, "load", _remembered_load(operations.load, interpreter))
    for method, name in METHODS.items():
        options = (True,) if name in ARITHMETIC else ()
        operate = partial(getattr(operations, name), semantic)
        patch.setattr(core.tensor, method, _method(operate, options, core.constexpr))


def _method(operate: Operator, options: tuple[Any, ...], constant: type) -> Operator:
    def method(self: Any, other: Any) -> Any:
        return operate(self, other.value if isinstance(other, constant) else other, *options)

    return method


def _remembered(name: str, plain: Operator, interpreter: Any) -> Operator:
    known: dict[tuple[Any, ...], Shortcut | None] = {}

    def operate(self: Any, left: Any, right: Any, *options: Any) -> Any:
        key = (_kind(self, left), _kind(self, right), *options)
        shortcut = known.get(key)
        if shortcut is not None:
            return shortcut(left, right)
        result = plain(self, left, right, *options)
        if key not in known:
            shortcut = _shortcut(self, name, (left, right), options, result, interpreter)
            known[key] = shortcut if shortcut and _equal(shortcut(left, right), result) else None
        return result

    operate.__name__ = name
    return operate


def _remembered_cast(plain: Operator, interpreter: Any) -> Operator:
    known: dict[tuple[Any, ...], Shortcut | None] = {}

    def cast(self: Any, operand: Any, kind: Any, rounding: str | None = None) -> Any:
        if operand.dtype is kind:
            return operand
        key = (operand.type.name, kind.scalar.name, rounding)
        shortcut = known.get(key)
        if shortcut is not None:
            return shortcut(operand)
        result = plain(self, operand, kind, rounding)
        if key not in known:
            known[key] = None
            if result is not operand and _are_arrays(operand.dtype, result.dtype) and not rounding:
                dtype = interpreter._get_np_dtype(result.dtype)
                shortcut = Shortcut(lambda x: x, dtype, exact=False, like=result)
                known[key] = shortcut if _equal(shortcut(operand), result) else None
        return result

    return cast


def _remembered_load(plain: Operator, interpreter: Any) -> Operator:
    known: dict[tuple[Any, ...], Shortcut | None] = {}

    def load(self: Any, pointer: Any, mask: Any, other: Any, *options: Any) -> Any:
        key = (pointer.type.name, *(x is not None and x.type.name for x in (mask, other)), options)
        shortcut = known.get(key)
        if shortcut is not None:
            return shortcut(pointer, mask, other)
        result = plain(self, pointer, mask, other, *options)
        if key not in known:
            known[key] = None
            kinds = [result.dtype, *([] if other is None else [other.dtype])]
            if _are_arrays(*kinds) or (other is None and not result.dtype.is_int1()):
                dtype = interpreter._get_np_dtype(result.dtype)
                shortcut = Load(interpreter._interpreter.load, dtype, exact=False, like=result)
                known[key] = shortcut if _equal(shortcut(pointer, mask, other), result) else None
        return result

    return load


def _are_arrays(*kinds: Any) -> bool:
    """Numbers of these types are what they are for NumPy, not kept as integers."""
    return not any(kind.is_ptr() or kind.is_bf16() or kind.is_fp8() for kind in kinds)


def _kind(semantic: Any, operand: Any) -> Any:
    if hasattr(operand, "handle"):
        return operand.type.name
    return ("number", semantic.to_tensor_type(operand).name)


def _shortcut(
    semantic: Any,
    name: str,
    operands: tuple[Any, Any],
    options: tuple[Any, ...],
    result: Any,
    interpreter: Any,
) -> Shortcut | None:
    numbers = [not hasattr(operand, "handle") for operand in operands]
    left, right = (
        semantic.to_tensor_type(operand) if number else operand.type.scalar
        for operand, number in zip(operands, numbers, strict=True)
    )
    if left.is_ptr() and name == "add" and right.is_int_signed():
        dtype = interpreter._get_np_dtype(right)
        return PointerShortcut(BINARY[name], dtype, exact=False, like=result)
    if not _are_arrays(left, right):
        return None
    kind = semantic.computation_type_impl(left, numbers[0], right, numbers[1], name in QUOTIENTS)
    if name == "truediv" and not kind.is_floating():
        return None
    exact = options == (True,) and name in ARITHMETIC and kind.is_int() and kind.int_bitwidth < 64
    return Shortcut(BINARY[name], interpreter._get_np_dtype(kind), exact, result)


def _equal(mine: Any, theirs: Any) -> bool:
    left, right = mine.handle.data, theirs.handle.data
    alike = (left.dtype, left.shape) == (right.dtype, right.shape)
    return alike and left.tobytes() == right.tobytes()
