"""Packed batches, as collators make them of several documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.errors import ArgumentError, PosencError
from posenc.storage import open_tensors, read_json

IDS, DOCUMENTS, LABELS = "input_ids", "document_ids", "labels"
"""Names in a batch, of its tokens; of their documents, which only posenc reads; and of the loss."""

BOUNDS, SEQUENCES, PLACES, MASK = "cu_seq_lens_q", "seq_idx", "position_ids", "attention_mask"
"""Names in a batch from which documents follow."""

REMEDY = "Write what the collator returns, each tensor x as x.tolist(), in one JSON object."


@dataclass(frozen=True)
class PackedBatch:
    """Several documents in rows.

    Args:
        inputs: arguments of the model.
        documents: numbers, from 0; −1 for padding.
    """

    inputs: Mapping[str, Any]
    documents: Int[Tensor, "B T"]

    @classmethod
    def of(cls, batch: Mapping[str, Any], name: str = "batch") -> PackedBatch:
        """A batch as a collator returns it, of tensors or lists.

        Documents are given by ``document_ids``, ``seq_idx``, ``cu_seq_lens_q`` (of one row),
        ``position_ids`` that do not rise by one, or an ``attention_mask`` [B, T] with a number for
        each; all that are there have to agree.

        Args:
            batch: by the names of the model's arguments.
            name: of the batch, for messages.

        Raises:
            ArgumentError: for a batch without ``input_ids`` [B, T], without documents, or with one.
        """
        if not isinstance(batch, Mapping):
            raise _wrong(name, "a mapping from names to numbers", type(batch).__name__)
        inputs = {key: _tensor(f"{key} in {name}", x) for key, x in batch.items() if x is not None}
        ids = inputs.get(IDS)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
            got = list(ids.shape) if isinstance(ids, Tensor) else sorted(inputs) or "nothing"
            raise _wrong(name, "input_ids [rows, tokens], whole numbers", got)
        rows, tokens = ids.shape
        for key in (DOCUMENTS, SEQUENCES, PLACES):
            shape = list(getattr(inputs.get(key, ids), "shape", ()))
            if len(shape) not in (2, 3) or shape[-1] != tokens or shape[-2] not in (1, rows):
                raise _wrong(
                    f"{key} in {name}", f"a number for each token, [{rows}, {tokens}]", shape
                )
        found = dict(_documents(inputs, ids, name))
        if not found:
            raise ArgumentError(
                name,
                expected="what says where documents begin",
                got=f"{', '.join(sorted(inputs))}, of one document",
                remedy=f"Add {PLACES} that begin anew, {BOUNDS}, or {DOCUMENTS} for posenc alone.",
            )
        (first, documents), *others = found.items()
        for key, other in others:
            if not torch.equal(documents, other):
                raise _wrong(name, f"the same documents by {first} and {key}", "others")
        if int(documents.max()) < 1:
            raise _wrong(name, "two documents or more", "one")
        kept = {key: x for key, x in inputs.items() if key not in (DOCUMENTS, LABELS)}
        return cls(kept, documents)

    @classmethod
    def read(cls, path: Path) -> PackedBatch:
        """A batch in a file: a JSON object of nested lists, or safetensors.

        Raises:
            CheckpointError: if it cannot be read.
            ArgumentError: as ``of``.
        """
        expected = "a packed batch, as JSON or safetensors"
        if not path.is_file():
            raise _wrong(str(path), expected, "no such file")
        if path.suffix == ".safetensors":
            with open_tensors(path, expected=expected, remedy=REMEDY) as file:
                batch: Any = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            batch = read_json(path, expected=expected, remedy=REMEDY)
        return cls.of(batch, str(path))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        shown: Tensor = self.documents[self.documents >= 0]
        lengths: list[int] = shown.bincount().tolist()
        return lengths

    def positions(self) -> Int[Tensor, "B T"]:
        """Positions that begin anew with each document."""
        index = torch.arange(self.documents.shape[1]).expand_as(self.documents)
        begins = self.documents != self.documents.roll(1, 1)
        return index - index.where(begins, 0).cummax(1).values

    def bounds(self) -> dict[str, Any]:
        """Bounds of documents of one row, as kernels for variable lengths take them."""
        ends = torch.tensor([0, *self.lengths]).cumsum(0).int()
        longest = max(self.lengths)
        lengths = {"max_length_q": longest, "max_length_k": longest}
        return {BOUNDS: ends, "cu_seq_lens_k": ends, **lengths}

    def changed(self, document: int) -> Int[Tensor, "B T"]:
        """Its tokens, of which those of one document are others that occur in the batch."""
        ids: Tensor = self.inputs[IDS]
        known = torch.tensor(sorted(set(ids.flatten().tolist())))
        if len(known) == 1:
            other = (ids + 1) % (int(known[0]) + 1) if int(known[0]) else ids + 1
        else:
            other = known[(torch.searchsorted(known, ids) + 1) % len(known)]
        return other.where(self.documents == document, ids)


def _tensor(name: str, x: Any) -> Any:
    """A tensor of lists; numbers and tensors as they are."""
    if isinstance(x, Tensor | int | float | bool | str):
        return x
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _wrong(name, "nested lists of numbers, rows equally long", str(error)) from error


def _documents(
    inputs: Mapping[str, Any], ids: Tensor, name: str
) -> Iterator[tuple[str, Int[Tensor, "B T"]]]:
    """Documents by each argument that tells them."""
    mask = inputs.get(MASK)
    flat = isinstance(mask, Tensor) and mask.shape == ids.shape
    shown = mask != 0 if isinstance(mask, Tensor) and flat else torch.ones_like(ids).bool()
    for key in (DOCUMENTS, SEQUENCES):
        if key in inputs:
            yield key, _numbered(inputs[key].expand_as(ids), shown)
    if BOUNDS in inputs:
        ends = torch.as_tensor(inputs[BOUNDS]).long()
        steps = ends.diff()
        if len(ids) != 1 or ends.dim() != 1 or len(ends) < 2 or bool((steps < 1).any()):
            raise _wrong(
                f"{BOUNDS} in {name}", "rising ends of documents in one row", ends.tolist()
            )
        if int(ends[0]) or int(ends[-1]) != ids.shape[1]:
            raise _wrong(f"{BOUNDS} in {name}", f"numbers from 0 to {ids.shape[1]}", ends.tolist())
        yield BOUNDS, _numbered(torch.arange(len(steps)).repeat_interleave(steps)[None], shown)
    if PLACES in inputs:
        places = inputs[PLACES]
        places = places.reshape(-1, *places.shape[-2:])[0].expand_as(ids)
        anew = places.diff(dim=1, prepend=places[:, :1] - 1) != 1
        if bool((anew & shown)[:, 1:].any()) or len(ids) > 1:
            yield PLACES, _numbered(anew.cumsum(1), shown)
    if isinstance(mask, Tensor) and flat and len(set(mask[shown].tolist())) > 1:
        yield MASK, _numbered(mask.long(), shown)


def _numbered(marks: Tensor, shown: Tensor) -> Int[Tensor, "B T"]:
    """Documents numbered in their order, of marks that change from one to the next; rows differ."""
    begins = marks.diff(dim=1, prepend=marks[:, :1]) != 0
    begins[:, 0] = True
    begins |= shown.diff(dim=1, prepend=shown[:, :1])
    begins &= shown
    numbers: Tensor = begins.flatten().cumsum(0).view_as(marks) - 1
    return numbers.where(shown, -1)


def _wrong(name: str, expected: str, got: object) -> PosencError:
    return ArgumentError(name, expected=expected, got=got, remedy=REMEDY)
