"""Random values that are none of an argument's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from decimal import Decimal

import numpy as np
import torch
from torch import Tensor

Draw = Callable[[random.Random], object]
"""A random value that is none of an argument's."""

NUMBERS = (float("nan"), float("inf"), -float("inf"), 2.5, 1j, Decimal("1.5"), np.float32(2.5))
TEXTS = ("", "x", "3", "true", "none", "0.5", b"8", bytearray(b"x"))
GROUPS = ((), (1,), [2, 3], (1, 2, 3, 4), {}, {"a": 1}, {1}, range(3), np.arange(3))
OBJECTS = (object, len, Ellipsis, NotImplemented, slice(3), random)
TENSORS = (
    *(torch.tensor(2.5), torch.tensor([1.0, 2.0]), torch.zeros(2, 3), torch.tensor(1j)),
    *(torch.tensor([True, False]), torch.zeros(0), torch.eye(3).to_sparse()),
)
"""Values of other kinds; what one domain has in common with them is left out there."""


def some(*pools: Sequence[object]) -> Draw:
    """A value of one of the pools, each as likely as the others."""
    filled = [pool for pool in pools if len(pool)]
    return lambda source: source.choice(source.choice(filled))


def any_of(*draws: Draw) -> Draw:
    """A value of one of the draws."""
    return lambda source: source.choice(draws)(source)


def whole(least: int = 1, *, most: int | None = 2**53, optional: bool = False) -> Draw:
    """No whole number from ``least`` (to ``most``)."""

    def draw(source: random.Random) -> object:
        below = least - 1 - source.choice((0, 1, source.randrange(10**6), 2**31, 2**63, 10**400))
        beyond = 2**53 if most is None else most + source.choice((1, 2**63, 2**64, 10**400))
        bounds = (below,) if most is None else (below, beyond)
        fraction = source.randrange(1, 100) + source.choice((0.5, 0.0, 1e-9))
        return source.choice((source.choice(bounds), fraction, source.choice((True, False))))

    kinds = any_of(draw, some(NUMBERS, TEXTS, GROUPS, OBJECTS, TENSORS))
    return kinds if optional else any_of(kinds, kinds, kinds, lambda source: None)


REAL_KINDS = some((1j, True, False), TEXTS, GROUPS, OBJECTS, TENSORS[1:])


def real(*, above: float, below: float = float("inf"), optional: bool = False) -> Draw:
    """No number between ``above`` and ``below``, both excluded."""

    def draw(source: random.Random) -> object:
        outside = [float("nan"), above - 10 ** source.uniform(-3, 30), -float("inf"), 10**400]
        if below < float("inf"):
            outside.append(below + 10 ** source.uniform(-3, 30))
        return source.choice((*outside, float("inf")))

    kinds = any_of(draw, REAL_KINDS)
    return kinds if optional else any_of(kinds, kinds, kinds, lambda source: None)


def truth(*, optional: bool = False) -> Draw:
    """Neither True nor False."""
    others = (0, 1, 2, -1, "yes", "False", np.int64(1), torch.tensor(True), *NUMBERS)
    return some(others, TEXTS, GROUPS, OBJECTS, () if optional else (None,), others)


def not_a(*, optional: bool = False, but: tuple[type, ...] = ()) -> Draw:
    """No object of posenc's classes, and of none of ``but``."""
    pools = [
        [value for value in pool if not isinstance(value, but)]
        for pool in (NUMBERS, TEXTS, GROUPS, OBJECTS, TENSORS, (0, 1, True), (None,))
    ]
    return some(*pools[: -1 if optional else None])


NAME = some(("ropa", "rope+", "+", "rope+rope", "rope@", "rope@bas=1", "rope@base", "rope@base=x"))
ANY_NAME = any_of(NAME, not_a(but=()))
DEVICE = some(("gpu", "x", "cuda:x", ""), (2.5, 1j, True, object, (), [], {}), TENSORS)


def indices(rows: int) -> Draw:
    """No tensor of row numbers below ``rows``."""
    wrong = (
        torch.tensor([rows]),
        torch.tensor([0, -rows - 1]),
        torch.tensor([[0]]),
        torch.tensor(0),
        torch.tensor([0.0]),
        torch.tensor([True] * (rows + 1)),
    )
    return any_of(some(wrong), not_a(but=(Tensor,)))


def tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    optional: bool = False,
    free: int = 0,
) -> Draw:
    """A tensor of another shape (but for the ``free`` first axes) or dtype, or none at all."""

    def draw(source: random.Random) -> object:
        good = torch.ones(shape, dtype=dtype)
        axis = source.randrange(len(shape))
        if dtype.is_floating_point:
            kinds: tuple[Callable[[], Tensor], ...] = (
                lambda: good.long(),
                lambda: good.to(torch.complex64),
                lambda: good.to_sparse(),
                lambda: good > 0,
            )
        else:
            kinds = (lambda: good.float(), lambda: good.to(torch.complex64), good.to_sparse)
        shapes: tuple[Callable[[], Tensor], ...] = (
            lambda: torch.cat([good, good, good], dim=max(axis, free)),
            lambda: good.unsqueeze(axis),
            lambda: good.select(axis, 0),
            lambda: good.flatten(),
            lambda: good.to("meta"),
        )
        return source.choice((*kinds, *shapes[free == len(shape) :]))()

    return any_of(draw, draw, not_a(optional=optional, but=(Tensor,)))
