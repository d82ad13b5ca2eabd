"""State of a group of ranks between calls: their layouts, and encodings that have been compared."""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from posenc.distributed.group import Group
from posenc.distributed.shards import FIELDS, KEPT, Layouts, Shards
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.layout import Layout

DTYPES = (torch.float32, torch.float64)


class Session:
    """The layouts and encodings that the ranks of a group have exchanged.

    Args:
        group: the ranks.
    """

    _of_groups: ClassVar[WeakKeyDictionary[dist.ProcessGroup, Session]] = WeakKeyDictionary()

    def __init__(self, group: Group) -> None:
        self.group = group
        self._shards: list[tuple[tuple[Tensor | None, ...], Shards]] = []
        self._compared: dict[str, WeakSet[Encoding]] = {}

    @classmethod
    def of(cls, group: Group) -> Session:
        """The session of a process group, one as long as the group exists."""
        if group.handle not in cls._of_groups:
            cls._of_groups[group.handle] = cls(group)
        return cls._of_groups[group.handle]

    def shards(self, layout: Layout) -> Shards:
        """The layouts of all ranks; exchanged once for a layout, signals left aside.

        All ranks must call this alike. A layout whose positions have gradients is exchanged at
        every call.
        """
        key = tuple(getattr(layout, name) for name in ("positions", "order", *FIELDS))
        for known, shards in self._shards:
            if all(a is b for a, b in zip(known, key, strict=True)):
                return shards
        facts = [
            layout.length,
            max(x.shape[0] for x in key if x is not None),
            DTYPES.index(layout.positions.dtype),
            int(layout.positions.requires_grad),
            *(int(getattr(layout, name) is not None) for name in FIELDS),
        ]
        table = self._exchange(facts, layout.device)
        lengths, rows, dtypes, graded = table.T[:4].tolist()
        fields = tuple(
            name for name, has in zip(FIELDS, table[:, 4:].any(0).tolist(), strict=True) if has
        )
        like = Layouts(max(rows), fields, DTYPES[max(dtypes)], any(graded))
        shards = Shards.gather(self.group, layout, tuple(lengths), like)
        if not any(graded):
            self._shards = [(key, shards), *self._shards[: KEPT - 1]]
        return shards

    def require_same(self, encoding: Encoding, settings: str, device: torch.device) -> None:
        """Compare encodings and settings between ranks, once an encoding and its settings.

        Raises:
            ArgumentError: on every rank, with the ranks that differ from rank 0.
        """
        compared = self._compared.setdefault(settings, WeakSet())
        if encoding in compared:
            return
        shapes = [f"{name}{list(x.shape)}{x.dtype}" for name, x in encoding.named_parameters()]
        text = f"{encoding!r} {shapes} {settings}"
        if others := self.group.differing(text, device):
            raise ArgumentError(
                "encoding",
                expected="the same encoding and options of attend on all ranks",
                got=f"others on rank {', '.join(map(str, others))} than on rank 0; here {text}",
                remedy="Create the encoding from one configuration, and pass equal options.",
            )
        compared.add(encoding)

    def seed(self, device: torch.device) -> int:
        """A random number of rank 0, the same on all ranks; every rank draws one."""
        return int(self._exchange([int(torch.randint(2**31, ()))], device)[0, 0])

    def _exchange(self, facts: list[int], device: torch.device) -> Tensor:
        """Integers of every rank, ``[ranks, facts]`` on the CPU."""
        own = torch.tensor([facts], dtype=torch.int64, device=device)
        return self.group.gather(own, [1] * self.group.size).cpu()
