"""The small sets of tile sizes that are tried, once for each kind of problem."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import triton

__all__ = [
    "CARRY_KEYS",
    "DECODE",
    "DIAGONAL_BLOCKS",
    "FORWARD",
    "FP_FUSION",
    "KEYS_PER_SPLIT",
    "OFFSETS",
    "PROGRAMS",
    "SPANS",
    "SUMS_FORWARD",
    "SUMS_KEYS",
    "SUMS_QUERIES",
    "TOKENS",
    "all_or_first",
    "bytes_per_token",
    "diagonal_block",
    "fitting",
    "fitting_sums",
    "tuning_key",
]

FP_FUSION = True
"""A product and the sum that it goes into are rounded once; not all versions of Triton do so by
default."""


def _config(block_x: int, block_y: int, warps: int, stages: int) -> Any:
    return triton.Config(
        {"block_x": block_x, "block_y": block_y}, num_warps=warps, num_stages=stages
    )


def _config_of_warps(warps: int, stages: int) -> Any:
    return triton.Config({}, num_warps=warps, num_stages=stages)


# CARRY_KEYS: keys of the tiles of the gradients, between which sums are carried.
# SPANS: sides of the squares of pairs that the gradients take apart, with unrolled tables and
# without; multiples of all tiles' sides.
if triton.knobs.runtime.interpret:
    # Nothing to be measured; small blocks, so that small tests have many.
    KEYS_PER_SPLIT = 16
    PROGRAMS = 8
    DIAGONAL_BLOCKS: tuple[int, ...] = (16, 16)
    SPANS = (64, 64)
    FORWARD = SUMS_FORWARD = TOKENS = [_config(16, 16, 4, 1)]
    OFFSETS = [_config_of_warps(4, 1)]
    DECODE = [triton.Config({"block": 16})]
    CARRY_KEYS = 16
    SUMS_QUERIES = SUMS_KEYS = [triton.Config({"block_q": 16})]
else:
    KEYS_PER_SPLIT = 256
    PROGRAMS = 1024
    DIAGONAL_BLOCKS = (64, 32, 16)
    SPANS = (64, 128)
    FORWARD = [
        _config(128, 128, 8, 2),
        _config(128, 64, 4, 3),
        _config(128, 64, 8, 2),
        _config(64, 64, 4, 2),
        _config(64, 64, 8, 1),
        _config(32, 32, 4, 1),
        _config(16, 16, 4, 1),
    ]
    TOKENS = [
        _config(64, 64, 4, 2),
        _config(64, 64, 8, 1),
        _config(128, 64, 8, 1),
        _config(32, 32, 4, 1),
        _config(16, 16, 4, 1),
    ]
    OFFSETS = [_config_of_warps(4, 2), _config_of_warps(8, 1), _config_of_warps(8, 2)]
    CARRY_KEYS = 32
    # Two for narrow heads, two for those of middle width, two for wide ones.
    SUMS_FORWARD = [
        _config(64, 64, 4, 2),
        _config(128, 64, 8, 2),
        _config(64, 64, 4, 2),
        _config(64, 64, 4, 1),
        _config(32, 32, 4, 1),
        _config(16, 16, 4, 1),
    ]
    SUMS_QUERIES = [
        triton.Config({"block_q": 64}, num_warps=4, num_stages=1),
        triton.Config({"block_q": 64}, num_warps=4, num_stages=2),
        triton.Config({"block_q": 64}, num_warps=4, num_stages=1),
        triton.Config({"block_q": 32}, num_warps=4, num_stages=1),
        triton.Config({"block_q": 32}, num_warps=4, num_stages=1),
        triton.Config({"block_q": 16}, num_warps=4, num_stages=1),
    ]
    SUMS_KEYS = [
        triton.Config({"block_q": 64}, num_warps=4, num_stages=2),
        triton.Config({"block_q": 64}, num_warps=4, num_stages=1),
        triton.Config({"block_q": 64}, num_warps=4, num_stages=1),
        triton.Config({"block_q": 32}, num_warps=4, num_stages=1),
        triton.Config({"block_q": 32}, num_warps=4, num_stages=1),
        triton.Config({"block_q": 16}, num_warps=4, num_stages=1),
    ]
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
    arguments = {**call, **more}
    tables, tokens, others = arguments["tables"], arguments["x"].tokens, arguments["y"].second
    unrolled = sum(table is not None for table in (tables.x, tables.y, tables.value))
    width = max(tokens.block.value, others.block.value)
    needed = bytes_per_token(width, tokens.pointer.element_size(), unrolled)
    # Gradients are held beside the tokens they are of.
    largest = _largest(needed, 1536 if "into" in arguments else 2560)
    sides = [(config.kwargs["block_x"], config.kwargs["block_y"]) for config in configs]
    fitting_configs = [
        config
        for config, (x, y) in zip(configs, sides, strict=True)
        if len(configs) == 1 or ((x == y or not unrolled) and _smallest(needed) <= x <= largest)
    ]
    return all_or_first(fitting_configs, arguments)


def all_or_first(configs: list[Any], call: dict[str, Any], **more: Any) -> list[Any]:
    """All configurations, or only the first for problems that are not tuned."""
    return configs[:1] if {**call, **more}["key"] < 0 else configs


def fitting_sums(configs: list[Any], call: dict[str, Any], **more: Any) -> list[Any]:
    """Configurations for heads of a width, few because each takes long to compile."""
    arguments = {**call, **more}
    x, y = arguments["x"], arguments["y"]
    width = max(tokens.block.value for tokens in (x.tokens, y.tokens, y.second))
    needed = bytes_per_token(width, x.tokens.pointer.element_size(), 0)
    first = 2 * ((needed > 256) + (needed > 512))
    return all_or_first(configs[first : first + 2] or configs, arguments)


def bytes_per_token(width: int, itemsize: int, unrolled: int) -> int:
    """Rough size in bytes of a token of a tile, with so many unrolled tables."""
    return 2 * width * itemsize * (1 + 2 * unrolled)


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
