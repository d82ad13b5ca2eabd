"""The kernels' record of a problem: all of their arguments by name.

Operators of ``torch.library`` take it flat (``flatten``), C++ as the struct of csrc/problem.h,
Triton as the tuples of kernels/arguments.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple, get_type_hints

from jaxtyping import Float, Int
from torch import Tensor

from posenc.attention.problem.terms import Terms


@dataclass(frozen=True, eq=False)
class Geometry:
    """Offsets and visibility of all pairs.

    Offsets may be counted from another than 0, so that 32 bits hold them.

    Args:
        shift: offset of the first key from the first query, of a regular grid.
        lowest, highest: smallest and largest offset that a regular grid shows.
        period: keys of an image row, between whole images; 0 for none.
        jump: how far the offset's index jumps after each image row of keys.
        intervals: ``[3, B|1, Q]`` int32: each query sees the keys from the first number up to the
            second, and the offset of key j is j plus the third. None for a regular grid.
        bands: for ``native``, ``[H, 2]`` int32: the least and the greatest offset of each head that
            may weigh anything. None: all.
    """

    shift: int = 0
    lowest: int = 0
    highest: int = 0
    period: int = 0
    jump: int = 0
    intervals: Int[Tensor, "3 b Q"] | None = None
    bands: Int[Tensor, "H 2"] | None = None


@dataclass(frozen=True, eq=False)
class SegmentMask:
    """Visibility by token, in addition to the ``Geometry``.

    Args:
        query_ids, key_ids: ``[b, Q]`` and ``[b, K]``; pairs of different segments are hidden.
        query_order, key_order: likewise; causality and windows go by them. None: by offset.
        query_summary, key_summary: ``[b, n, 4]`` int64, least and greatest order and segment of
            each block of tokens.
        causal, window: by order; 0 for no window.
    """

    query_ids: Int[Tensor, "b Q"] | None = None
    key_ids: Int[Tensor, "b K"] | None = None
    query_order: Int[Tensor, "b Q"] | None = None
    key_order: Int[Tensor, "b K"] | None = None
    query_summary: Int[Tensor, "b nQ 4"] | None = None
    key_summary: Int[Tensor, "b nK 4"] | None = None
    causal: bool = False
    window: int = 0


@dataclass(frozen=True, eq=False)
class RotaryFactors:
    """Cosines and sines of the angles that pairs of features are rotated by.

    Args:
        query_cosine, query_sine: ``[B|1, H|1, Q, T]``, in float32 or better. None: no rotation.
        key_cosine, key_sine: ``[B|1, G|1, K, T]``.
        adjacent: pairs are (2t, 2t + 1), not (t, t + T).
    """

    query_cosine: Float[Tensor, "b h Q T"] | None = None
    query_sine: Float[Tensor, "b h Q T"] | None = None
    key_cosine: Float[Tensor, "b g K T"] | None = None
    key_sine: Float[Tensor, "b g K T"] | None = None
    adjacent: bool = False


@dataclass(frozen=True, eq=False)
class PairTerm:
    """A term of pairs outside the structured form.

    Args:
        kind: of the term; "" for none.
        tensors: of the kind, as each engine takes them.
    """

    kind: str = ""
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class KernelProblem:
    """One problem as kernels take it.

    Args:
        q: ``[B, H, Q, D]``; k: ``[B, G, K, D]``; v: ``[B, G, K, E]``.
        scale: factor of q·k.
        terms, pairs: of logits and values.
        geometry: of the pairs; segments: documents, padding and orders that it does not hold.
        rotary: of queries and keys before their product.
        dropout: probability of dropping a weight; seed: ``[1]`` int64, of the mask, a tensor so
            that each replay of a graph draws anew.
        sinks: ``[B|1, H, Q|1]``, logits without a value, less what the others leave out.
        softcap: as of ``Problem``; 0.0 for none.
        tuned: for ``triton``, sizes of tiles are measured; else the first that may fit are taken.
    """

    q: Float[Tensor, "B H Q D"]
    k: Float[Tensor, "B G K D"]
    v: Float[Tensor, "B G K E"]
    scale: float
    terms: Terms
    pairs: PairTerm
    geometry: Geometry
    segments: SegmentMask
    rotary: RotaryFactors
    dropout: float = 0.0
    seed: Int[Tensor, "1"] | None = None
    sinks: Float[Tensor, "b H q"] | None = None
    softcap: float = 0.0
    tuned: bool = True


class RecordField(NamedTuple):
    """A field of ``KernelProblem`` or of a record in it.

    Args:
        record: the name of the record that it is in; "" for the whole.
        name, path: in that record, and in the whole.
        kind: ``"tensor"``, ``"tensors"``, ``"number"``, ``"truth"``, ``"real"`` or ``"word"``.
    """

    record: str
    name: str
    path: str
    kind: str


KINDS: dict[Any, str] = {int: "number", bool: "truth", float: "real", str: "word"}


def _fields(record: type, owner: str = "") -> Iterator[RecordField]:
    """The fields of a dataclass, by its annotations, and of the dataclasses in it."""
    for name, hint in get_type_hints(record).items():
        if is_dataclass(hint):
            yield from _fields(hint, name)  # type: ignore[arg-type]
        else:
            kind = KINDS.get(hint, "tensors" if "tuple" in str(hint) else "tensor")
            yield RecordField(owner, name, f"{owner}.{name}" if owner else name, kind)


FIELDS = tuple(_fields(KernelProblem))
"""All fields that are no records."""

RECORDS: dict[str, Any] = {
    name: hint for name, hint in get_type_hints(KernelProblem).items() if is_dataclass(hint)
}


class Flat(NamedTuple):
    """A record in lists.

    Args:
        tensors: those that are there.
        numbers: integers and truths, which may be symbolic.
        reals: floats.
        words: the path of each tensor, then the strings.
    """

    tensors: list[Tensor]
    numbers: list[int]
    reals: list[float]
    words: str


def flatten(record: KernelProblem) -> Flat:
    """The fields of a record in lists."""
    flat = Flat([], [], [], "")
    paths: list[str] = []
    words: list[str] = []
    for owner, name, path, kind in FIELDS:
        value: Any = getattr(getattr(record, owner) if owner else record, name)
        if kind == "tensors":
            for at, tensor in enumerate(value):
                flat.tensors.append(tensor)
                paths.append(f"{path}.{at}")
        elif kind == "tensor":
            if value is not None:
                flat.tensors.append(value)
                paths.append(path)
        elif kind == "number":
            flat.numbers.append(value)
        elif kind == "truth":  # compilers take no truths among symbolic numbers
            flat.numbers.append(1 if value else 0)
        elif kind == "real":
            flat.reals.append(value)
        else:
            words.append(value)
    return flat._replace(words="|".join([" ".join(paths), *words]))


def restore(flat: Flat) -> KernelProblem:
    """The record that ``flatten`` made lists of."""
    paths, *words = flat.words.split("|")
    tensors = dict(zip(paths.split(), flat.tensors, strict=True))
    scalars = {"number": iter(flat.numbers), "real": iter(flat.reals), "word": iter(words)}
    values: dict[str, dict[str, Any]] = {name: {} for name in ("", *RECORDS)}
    for owner, name, path, kind in FIELDS:
        value: Any
        if kind == "tensor":
            value = tensors.get(path)
        elif kind == "tensors":
            value = tuple(x for at, x in tensors.items() if at.startswith(f"{path}."))
        elif kind == "truth":
            value = bool(next(scalars["number"]))
        else:
            value = next(scalars[kind])
        values[owner][name] = value
    records = {name: record(**values[name]) for name, record in RECORDS.items()}
    return KernelProblem(**values[""], **records)


def paths_of(words: str) -> list[str]:
    """The path of each tensor, from ``Flat.words``."""
    return words.split("|")[0].split()
