"""The small sets of tile sizes that are tried, once for each kind of problem."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import triton

FP_FUSION = True
"""A product and the sum that it goes into are rounded once; not all versions of Triton do so by
default."""


def _tiles(*sizes: tuple[int, int, int, int]) -> list[Any]:
    """Configurations of ``block_x``, ``block_y``, warps and stages."""
    return [
        triton.Config({"block_x": x, "block_y": y}, num_warps=warps, num_stages=stages)
        for x, y, warps, stages in sizes
    ]


def _queries(*sizes: tuple[int, int]) -> list[Any]:
    """Configurations of ``block_q`` and stages."""
    return [triton.Config({"block_q": q}, num_warps=4, num_stages=stages) for q, stages in sizes]


# CARRY_KEYS: keys of the tiles of the gradients, between which sums are carried.
# SPANS: sides of the squares of pairs that the gradients take apart, with unrolled tables and
# without; multiples of all tiles' sides.
if triton.knobs.runtime.interpret:
    # Nothing to be measured; small blocks, so that small tests have many.
    KEYS_PER_SPLIT = 16
    PROGRAMS = 8
    DIAGONAL_BLOCKS: tuple[int, ...] = (16, 16)
    SPANS = (64, 64)
    FORWARD = SUMS_FORWARD = TOKENS = _tiles((16, 16, 4, 1))
    OFFSETS = [triton.Config({}, num_warps=4, num_stages=1)]
    DECODE = [triton.Config({"block": 16})]
    CARRY_KEYS = 16
    SUMS_QUERIES = SUMS_KEYS = [triton.Config({"block_q": 16})]
else:
    KEYS_PER_SPLIT = 256
    PROGRAMS = 1024
    DIAGONAL_BLOCKS = (64, 32, 16)
    SPANS = (64, 128)
    FORWARD = _tiles(
        *((128, 128, 8, 2), (128, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 1)),
        *((32, 32, 4, 1), (16, 16, 4, 1)),
    )
    TOKENS = _tiles(
        *((64, 64, 4, 2), (64, 64, 8, 1), (128, 64, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))
    )
    OFFSETS = [
        triton.Config({}, num_warps=warps, num_stages=stages)
        for warps, stages in ((4, 2), (8, 1), (8, 2))
    ]
    CARRY_KEYS = 32
    # Two for narrow heads, two for those of middle width, two for wide ones.
    SUMS_FORWARD = _tiles(
        *((64, 64, 4, 2), (128, 64, 8, 2)),
        *((64, 64, 4, 2), (64, 64, 4, 1)),
        *((32, 32, 4, 1), (16, 16, 4, 1)),
    )
    SUMS_QUERIES = _queries((64, 1), (64, 2), (64, 1), (32, 1), (32, 1), (16, 1))
    SUMS_KEYS = _queries((64, 2), (64, 1), (64, 1), (32, 1), (32, 1), (16, 1))
    DECODE = [triton.Config({"block": block}, num_stages=3) for block in (32, 64, 128)]
    DECODE.append(triton.Config({"block": 16}, num_stages=1))  # fits wherever others do not


@lru_cache(1024)
def tuning_key(*kind: object, tuned: bool) -> int:
    """A number of 64 bits for a kind of problem; negative if it takes the first tiles, unmeasured.

    A number, which kernels take as any other argument: compiled code serves all kinds of problems
    that differ in nothing else, as lengths do.
    """
    digest = hashlib.sha256(" ".join(map(str, kind)).encode()).digest()
    number = 1 << 62 | int.from_bytes(digest[:8]) >> 2
    return number if tuned else -number


def fitting(configs: list[Any], call: dict[str, Any], **more: Any) -> list[Any]:
    """Configurations that are worth compiling for a problem.

    Where something is unrolled along tiles, they are square, since a window of
    ``block_x + block_y`` entries has to be a power of two.
    """
    named = {**call, **more}
    tables = named["args"].tables
    unrolled = sum(x is not None for x in (tables.x_rows, tables.y_rows, tables.value_rows))
    needed = _bytes_per_token(named["args"], unrolled)
    # Gradients are held beside the tokens they are of.
    largest = _largest(needed, 1536 if "into" in named else 2560)
    sides = [(config.kwargs["block_x"], config.kwargs["block_y"]) for config in configs]
    fitting_configs = [
        config
        for config, (x, y) in zip(configs, sides, strict=True)
        if len(configs) == 1 or ((x == y or not unrolled) and _smallest(needed) <= x <= largest)
    ]
    return all_or_first(fitting_configs, named)


def all_or_first(configs: list[Any], call: dict[str, Any], **more: Any) -> list[Any]:
    """All configurations, or only the first for problems that are not tuned."""
    return configs[:1] if {**call, **more}["key"] < 0 else configs


def fitting_sums(configs: list[Any], call: dict[str, Any], **more: Any) -> list[Any]:
    """Configurations for heads of a width, few because each takes long to compile."""
    named = {**call, **more}
    needed = _bytes_per_token(named["args"], 0)
    first = 2 * ((needed > 256) + (needed > 512))
    return all_or_first(configs[first : first + 2] or configs, named)


def bytes_per_token(width: int, itemsize: int, unrolled: int) -> int:
    """Rough size in bytes of a token of a tile, with so many unrolled tables."""
    return 2 * width * itemsize * (1 + 2 * unrolled)


def _bytes_per_token(args: Any, unrolled: int) -> int:
    width = max(args.x.tokens.block.value, args.y.second.block.value)
    return bytes_per_token(width, args.x.tokens.pointer.element_size(), unrolled)


def _smallest(needed: int) -> int:
    if needed < 1024:
        return 64
    return 32 if needed < 2048 else 16


def _largest(needed: int, most: int) -> int:
    """Side of the largest tiles of which the registers hold most; ``most`` for 64."""
    if needed <= 512:
        return 128
    return 64 if needed <= most else 32


def diagonal_block(needed: int, fits: Callable[[int], bool]) -> int:
    """Side of the tiles of ``offsets_kernel``: the largest that ``fits`` the shared memory.

    They hold gradients of twice as many rows in registers.
    """
    sides = DIAGONAL_BLOCKS[needed > 1536 :]
    return next((side for side in sides if fits(side)), sides[-1])
