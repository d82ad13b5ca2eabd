"""Swin's windows beyond the laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.transformers.acceleration.cases import CASES
from tests.transformers.acceleration.test_laws import put_under


class SizesByValue(TorchDispatchMode):
    """Records operators whose outputs have sizes by value, for which one waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.dynamic_output_shape in function.tags:
            index = args[1] if function is torch.ops.aten.index.Tensor else None
            if index is None or any(x is not None and x.dtype == torch.bool for x in index):
                self.found.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("key", ["swin-model", "swinv2-model", "swin-padded"])
def test_shifted_windows_are_found_without_sizes_by_value(key: str) -> None:
    case = CASES[key]
    model = case.model()
    put_under(model, check=False)
    with torch.no_grad(), SizesByValue() as watched:
        case.outputs(model)
    assert watched.found == []
