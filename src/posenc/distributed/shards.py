"""Tokens of a rank, layouts of all ranks, and a call of ``attend`` over them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.arguments import Count, check
from posenc.attention.backends.common.base import Backend
from posenc.attention.call import Call
from posenc.attention.problem.problem import CounterDropout, token_numbers
from posenc.distributed.group import Group, gather
from posenc.encoding import Encoding
from posenc.encoding.prepared import reused_of_layouts
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout

FIELDS = {"document": 0, "valid": 1, "special": 0}
"""Optional fields of layouts, with the value of tokens of a rank whose layout has none."""

MOST_PIECES = 8
"""Largest number of runs of consecutive tokens that a shard is split into."""


def contiguous(length: int, ranks: int, rank: int) -> Int[Tensor, " n"]:
    """Tokens of a rank that has one run of the sequence, in order.

    Lengths of ranks differ by one token at most.

    Raises:
        ArgumentError: for a rank that does not exist.
    """
    _require_rank(length, ranks, rank)
    return torch.arange(rank * length // ranks, (rank + 1) * length // ranks)


def balanced(
    length: int, ranks: int, rank: int, *, documents: Sequence[int] | None = None
) -> Int[Tensor, " n"]:
    """Tokens of a rank that has as many pairs to compute under a causal mask as every other.

    A text is cut into ``2 · ranks`` chunks, of which rank r has the r-th and the r-th last
    (head–tail). Lengths of ranks differ by two tokens a text at most.

    Args:
        length: of the sequence.
        documents: lengths of the documents packed into it, each of which is cut by itself; by
            default it is one.

    Raises:
        ArgumentError: for a rank that does not exist, or documents of another length in all.
    """
    _require_rank(length, ranks, rank)
    documents = [length] if documents is None else documents
    if sum(documents) != length:
        raise ArgumentError(
            "documents",
            expected=f"{length} tokens in all",
            got=sum(documents),
            remedy="Give the lengths that were passed to Layout.packed.",
        )
    parts, start = [], 0
    for size in documents:
        cuts = [start + chunk * size // (2 * ranks) for chunk in range(2 * ranks + 1)]
        parts += [torch.arange(cuts[c], cuts[c + 1]) for c in (rank, 2 * ranks - 1 - rank)]
        start += size
    return torch.cat(parts)


def _require_rank(length: int, ranks: int, rank: int) -> None:
    check("length", Count, length)
    check("ranks", Count, ranks)
    if not 0 <= rank < ranks:
        raise ArgumentError(
            "rank", expected=f"0 … {ranks - 1}", got=rank, remedy="Use the rank in the mesh axis."
        )


def take(layout: Layout, index: Int[Tensor, " n"]) -> Layout:
    """The layout of some tokens, such as a rank's shard; positions and order go with them."""
    tensors = {name: tensor[:, index] for name, tensor in layout._tensors().items()}
    taken = replace(layout._with(tensors), start=None, extent=None, consecutive=False)
    return _with_start(taken)


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive tokens of a shard.

    Args:
        begin, end: (exclusive) among the shard's tokens.
        layout: of them; regular where it can be.
        orders: the least and the largest order.
        documents: likewise.
    """

    begin: int
    end: int
    layout: Layout
    orders: tuple[int, int]
    documents: tuple[int, int]

    @classmethod
    def of(cls, layout: Layout, begin: int, end: int) -> Piece:
        """Tokens ``begin`` to ``end`` of a layout. Reads its values."""
        piece = layout.slice(begin, end)
        is_all = piece.length == layout.length
        piece = replace(_with_start(layout if is_all else piece), signal=None)
        documents = (0, 0) if piece.document is None else _range(piece.document)
        return cls(begin, end, piece, _range(piece.order), documents)

    def may_see(self, other: Piece, band: tuple[int, int]) -> bool:
        """False if none of these tokens sees any of the others."""
        if not (self.layout.length and other.layout.length):
            return False
        least, most = other.orders[0] - self.orders[1], other.orders[1] - self.orders[0]
        if most < band[0] or least > band[1]:
            return False
        (low, high), (first, last) = self.documents, other.documents
        return low <= last and first <= high

    @property
    def tokens(self) -> slice:
        """The tokens among the shard's."""
        return slice(self.begin, self.end)

    def cut(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tokens of tensors ``[…, L, D]`` of the shard."""
        return [x[..., self.tokens, :] for x in tensors]

    def with_signal(self, signal: Float[Tensor, "b L S"] | None) -> Layout:
        """The layout with these tokens' part of the shard's signals."""
        if signal is None:
            return self.layout
        return replace(self.layout, signal=signal[:, self.tokens])


@dataclass(frozen=True, eq=False)
class Shards:
    """The layouts of all ranks.

    Args:
        lengths: tokens of each rank.
        layout: of the tokens of all ranks, one rank after the other; without signals.
        arrangement: index of the tokens in ascending order; None if they are, or if there is none
            for all batch rows.
        sorted: the layout in that arrangement.
    """

    lengths: tuple[int, ...]
    layout: Layout
    arrangement: Int[Tensor, " K"] | None
    sorted: Layout

    @classmethod
    def gather(
        cls, group: Group, layout: Layout, lengths: tuple[int, ...], like: Layouts
    ) -> Shards:
        """The layouts of all ranks, from this rank's.

        Args:
            like: properties that all ranks' layouts are brought to.
        """
        integers = _integers(layout, like)
        positions = layout.positions.to(like.dtype)
        if like.graded and not positions.requires_grad:
            positions = positions.detach().requires_grad_()  # all ranks go backward alike
        positions = positions.expand(like.rows, -1, -1).transpose(0, 1)
        (gathered,) = gather(group, lengths, [positions])
        integers = group.gather(integers, lengths)
        fields = dict(zip(("order", *like.fields), integers.unbind(-1), strict=True))
        concatenated = Layout(
            gathered.transpose(0, 1),
            fields["order"].mT,
            document=fields["document"].mT if "document" in fields else None,
            valid=fields["valid"].mT.bool() if "valid" in fields else None,
            special=fields["special"].mT.bool() if "special" in fields else None,
        )
        arrangement = _arrangement(concatenated)
        arranged = concatenated if arrangement is None else take(concatenated, arrangement)
        return cls(lengths, _with_start(concatenated), arrangement, _with_start(arranged))

    @cached_property
    def blocks(self) -> list[list[Piece]]:
        """The runs of consecutive tokens of every rank."""
        ends = list(accumulate(self.lengths, initial=0))
        return [pieces(self.layout.slice(a, b)) for a, b in pairwise(ends)]

    def arrange(self, x: Tensor) -> Tensor:
        """``x`` ``[K, …]`` of all ranks in the order of ``sorted``."""
        return x if self.arrangement is None else x[self.arrangement]

    def restore(self, x: Tensor) -> Tensor:
        """``x`` ``[K, …]`` in the order of ``layout``, from that of ``sorted``."""
        return x if self.arrangement is None else x[self.arrangement.argsort()]


@dataclass(frozen=True)
class Layouts:
    """Common properties of the layouts of all ranks.

    Args:
        rows: batch rows of the layouts, 1 if they are the same for all.
        fields: optional fields that some rank's layout has.
        dtype: of positions.
        graded: whether those of some rank require gradients.
    """

    rows: int
    fields: tuple[str, ...]
    dtype: torch.dtype
    graded: bool


def pieces(layout: Layout) -> list[Piece]:
    """The layout's runs of consecutive tokens; the complete layout if there are many or none.

    Reads the layout's values, once a layout.
    """
    length, order = layout.length, layout.order
    if layout.start is not None or order.shape[0] != 1 or length < 2:
        return [Piece.of(layout, 0, length)]
    cuts = [0, *(order[0].diff() != 1).nonzero().flatten().add(1).tolist(), length]
    if len(cuts) > MOST_PIECES + 1:
        return [Piece.of(layout, 0, length)]
    return [Piece.of(layout, a, b) for a, b in pairwise(cuts)]


def _arrangement(layout: Layout) -> Int[Tensor, " K"] | None:
    order = layout.order
    if not order.shape[1] or bool((order.diff() >= 0).all()):
        return None
    index = order[0].argsort(stable=True)
    return index if bool((order[:, index].diff() >= 0).all()) else None


def _range(x: Tensor) -> tuple[int, int]:
    return (int(x.min()), int(x.max())) if x.numel() else (0, 0)


def _integers(layout: Layout, like: Layouts) -> Int[Tensor, "L b F"]:
    """Order, documents, validity and special tokens side by side."""
    parts = [layout.order]
    for name in like.fields:
        value = getattr(layout, name)
        parts.append(torch.full_like(layout.order, FIELDS[name]) if value is None else value)
    stacked = torch.stack([part.long().expand(like.rows, -1) for part in parts], dim=-1)
    return stacked.transpose(0, 1).contiguous()


def _with_start(layout: Layout) -> Layout:
    """The layout with ``start``, if it is a plain sequence. Reads its values."""
    fields = (layout.document, layout.valid, layout.special)
    plain = layout.positions.shape[::2] == (1, 1) and layout.order.shape[0] == 1
    if layout.start is not None or not plain or not layout.length or layout.positions.requires_grad:
        return layout
    if any(field is not None for field in fields):
        return layout
    order, positions = layout.order[0], layout.positions[0, :, 0]
    start = int(order[0])
    expected = torch.arange(start, start + layout.length, device=order.device)
    if torch.equal(order, expected) and torch.equal(positions.to(torch.float64), expected.double()):
        return replace(layout, start=start)
    return layout


DTYPES = (torch.float32, torch.float64)


@dataclass(eq=False)
class Exchange:
    """The layouts of all ranks, once they have been exchanged.

    Args:
        number: the same on all ranks.
        shards: the layouts.
    """

    number: int = -1
    shards: Shards | None = None


class Session:
    """One exchange between ranks: layouts, if they are new, and checks that settings are equal.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def shards(self, layout: Layout) -> Shards:
        """The layouts of all ranks without signals; exchanged unless a ``Prepared`` has them.

        All ranks must call this alike: each time they tell each other whether theirs is known. A
        layout whose positions have gradients never is.
        """
        graded = layout.positions.requires_grad
        name = self.group.handle.group_name  # not the group, whose threads would outlive its end
        known = Exchange()
        if not graded:
            known = reused_of_layouts(Exchange, "shards", name, layouts=(layout,))
        facts = [
            known.number,
            secrets.randbits(62),
            layout.length,
            layout.with_signal(None).batch,
            DTYPES.index(layout.positions.dtype),
            int(graded),
            *(int(getattr(layout, name) is not None) for name in FIELDS),
        ]
        table = self._exchange(facts, layout.device)
        numbers, new, lengths, rows, dtypes, grades = table.T[:6].tolist()
        if known.shards is not None and set(numbers) == {known.number}:
            return known.shards
        has = table[:, 6:].any(0).tolist()
        fields = tuple(name for name, some in zip(FIELDS, has, strict=True) if some)
        like = Layouts(max(rows), fields, DTYPES[max(dtypes)], any(grades))
        shards = Shards.gather(self.group, layout, tuple(lengths), like)
        if not any(grades):
            known.number, known.shards = new[0], shards
        return shards

    def require_same(self, encoding: Encoding, settings: str, device: torch.device) -> None:
        """Compare encodings and settings between ranks.

        At every call: a rank cannot know that those of others are as before.

        Raises:
            ArgumentError: on every rank, with the ranks that differ from rank 0.
        """
        shapes = [f"{name}{list(x.shape)}{x.dtype}" for name, x in encoding.named_parameters()]
        text = f"{encoding!r} {shapes} {settings}"
        if others := self.group.differing(text, device):
            raise ArgumentError(
                "encoding",
                expected="the same encoding and options of attend on all ranks",
                got=f"others on rank {', '.join(map(str, others))} than on rank 0; here {text}",
                remedy="Create the encoding from one configuration, and pass equal options.",
            )

    def seed(self, device: torch.device) -> int:
        """A random number of rank 0, the same on all ranks; every rank draws one."""
        return int(self._exchange([int(torch.randint(2**31, ()))], device)[0, 0])

    def _exchange(self, facts: list[int], device: torch.device) -> Tensor:
        """Integers of every rank, ``[ranks, facts]`` on the CPU."""
        local_facts = torch.tensor([facts], dtype=torch.int64, device=device)
        return self.group.gather(local_facts, [1] * self.group.size).cpu()


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """A call of ``attend`` over ranks.

    Args:
        local: this rank's queries, keys and values, with their layouts, and the options.
        backend: as of ``attend``.
        session: of the group.
        seed: of the dropout, the same on all ranks.
    """

    local: Call
    backend: str | Backend
    session: Session
    seed: int = 0

    def part(
        self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, *, first_head: int = 0, **changes: Any
    ) -> Call:
        """The call of some queries and keys.

        Args:
            first_head: number of the first of their heads.
            **changes: other fields of the call.
        """
        call = replace(self.local, q=q, k=k, v=v, grid=grid, dropout=0.0, **changes)
        if self.local.dropout:
            tokens = token_numbers(grid.query), token_numbers(grid.key)
            call.counter_dropout = CounterDropout(
                self.local.dropout, self.seed, *tokens, first_head=first_head
            )
        return call

    @cached_property
    def shards(self) -> Shards:
        """The key layouts of all ranks."""
        return self.session.shards(self.local.grid.key)
