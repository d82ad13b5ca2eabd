"""The sides of the Triton kernels' tiles, set without measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def tiles(queries: int, keys: int) -> Iterator[None]:
    """Kernels work in tiles of these sides, or square ones of the first where they have to."""
    import triton
    from triton.runtime.autotuner import Autotuner

    from posenc.attention.backends.triton.kernels import configs

    run = Autotuner.run

    def run_in_tiles(tuner: Any, *given: Any, **named: Any) -> Any:
        (config,) = tuner.configs
        if "block_x" not in config.kwargs:
            return run(tuner, *given, **named)
        tables = given[0].tables
        square = any(each is not None for each in (tables.x_rows, tables.y_rows, tables.value_rows))
        sides = {"block_x": queries, "block_y": queries if square else keys}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuner, "configs", [triton.Config(sides, num_warps=4, num_stages=1)])
            return run(tuner, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Autotuner, "run", run_in_tiles)
        patch.setattr(configs, "DIAGONAL_BLOCKS", (queries, queries))
        yield


@contextmanager
def first_tiles_that_fit() -> Iterator[None]:
    """Kernels work in the first tiles for which the device has memory; no others are compiled."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources

    def run_first(tuner: Any, *given: Any, **named: Any) -> Any:
        tuner.nargs = dict(zip(tuner.arg_names, given, strict=False))
        lacking: Exception | None = None
        for config in tuner.prune_configs(named):
            try:
                return tuner.fn.run(*given, **named, **config.all_kwargs())
            except OutOfResources as error:
                lacking = error
        assert lacking is not None
        raise lacking

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Autotuner, "run", run_first)
        yield
