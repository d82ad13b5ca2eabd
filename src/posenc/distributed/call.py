"""One call of ``posenc.distributed.attend``, and what the ranks exchange before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.base import Backend
from posenc.attention.problem.problem import CounterDropout, token_numbers
from posenc.distributed.group import Group
from posenc.distributed.shards import FIELDS, KEPT, Layouts, Shards
from posenc.encoding import Encoding
from posenc.encoding.prepared import Copies
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout

DTYPES = (torch.float32, torch.float64)


@dataclass(eq=False)
class Exchanged:
    """Layouts that the ranks of a group have exchanged.

    It must not hold on to the group, whose threads would outlive ``destroy_process_group``.

    Args:
        shards: by number of the exchange, with copies of this rank's layout; the last ones last.
        count: of exchanges.
    """

    shards: dict[int, tuple[Copies, Shards]] = field(default_factory=dict)
    count: int = 0


class Session:
    """One exchange between ranks: layouts, if they are new, and checks that settings are equal.

    Args:
        group: the ranks.
    """

    _of_groups: ClassVar[WeakKeyDictionary[dist.ProcessGroup, Exchanged]] = WeakKeyDictionary()

    def __init__(self, group: Group) -> None:
        self.group = group
        self._exchanged = self._of_groups.setdefault(group.handle, Exchanged())

    def shards(self, layout: Layout) -> Shards:
        """The layouts of all ranks without signals; exchanged if one of them has changed.

        All ranks must call this alike: each time they tell each other whether theirs is known. A
        layout whose positions have gradients never is.
        """
        exchanged = self._exchanged.shards
        content = [getattr(layout, name) for name in ("positions", "order", *FIELDS)]
        matches = (n for n, (copies, _) in reversed(exchanged.items()) if copies.hold(content))
        number = next(matches, -1)
        if layout.positions.requires_grad:
            number = -1
        facts = [
            number,
            layout.length,
            max(x.shape[0] for x in content if x is not None),
            DTYPES.index(layout.positions.dtype),
            int(layout.positions.requires_grad),
            *(int(getattr(layout, name) is not None) for name in FIELDS),
        ]
        table = self._exchange(facts, layout.device)
        numbers, lengths, rows, dtypes, graded = table.T[:5].tolist()
        if number >= 0 and set(numbers) == {number}:
            return exchanged[number][1]
        fields = tuple(
            name for name, has in zip(FIELDS, table[:, 5:].any(0).tolist(), strict=True) if has
        )
        like = Layouts(max(rows), fields, DTYPES[max(dtypes)], any(graded))
        shards = Shards.gather(self.group, layout, tuple(lengths), like)
        if not any(graded):
            while len(exchanged) >= KEPT:
                del exchanged[next(iter(exchanged))]
            self._exchanged.count += 1
            exchanged[self._exchanged.count] = Copies(content), shards
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

    def all(self, holds: bool, device: torch.device) -> bool:
        """True if something holds on all ranks, which all ask."""
        return bool(self._exchange([int(holds)], device).all())

    def seed(self, device: torch.device) -> int:
        """A random number of rank 0, the same on all ranks; every rank draws one."""
        return int(self._exchange([int(torch.randint(2**31, ()))], device)[0, 0])

    def _exchange(self, facts: list[int], device: torch.device) -> Tensor:
        """Integers of every rank, ``[ranks, facts]`` on the CPU."""
        local_facts = torch.tensor([facts], dtype=torch.int64, device=device)
        return self.group.gather(local_facts, [1] * self.group.size).cpu()


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """The arguments of ``attend``.

    Args:
        q, k, v: of this rank's tokens.
        grid: of this rank's queries and this rank's keys.
        encoding, backend, dropout, scale: as of ``attend``.
        session: of the group.
        sinks, softcap: as of ``attend``.
        seed: of the dropout, the same on all ranks.
    """

    q: Float[Tensor, "B H L D"]
    k: Float[Tensor, "B G K D"]
    v: Float[Tensor, "B G K E"]
    grid: Grid
    encoding: Encoding
    backend: str | Backend
    dropout: float
    scale: float | None
    session: Session
    sinks: Float[Tensor, " H"] | None = None
    softcap: float | None = None
    seed: int = 0

    def logit_scale(self) -> float:
        """Factor of the logits: as given, or the encoding's default."""
        return self.encoding.default_scale(self.q.shape[3]) if self.scale is None else self.scale

    def counter_dropout(self, query: Layout, key: Layout) -> CounterDropout | None:
        """Dropout of these tokens; None where nothing is dropped."""
        if not self.dropout:
            return None
        return CounterDropout(self.dropout, self.seed, token_numbers(query), token_numbers(key))

    @cached_property
    def shards(self) -> Shards:
        """The key layouts of all ranks."""
        return self.session.shards(self.grid.key)
