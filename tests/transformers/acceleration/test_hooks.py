"""Accelerated models under the hooks of accelerate: ``dispatch_model``, ``cpu_offload``."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from posenc.errors import ArgumentError
from posenc.transformers.acceleration import restore
from posenc.transformers.acceleration.accelerated import Accelerated
from tests.support.tiny_models import build
from tests.transformers.acceleration.cases import CASES
from tests.transformers.acceleration.cases.texts import XLNET
from tests.transformers.acceleration.test_laws import (
    FIRST,
    accelerated,
    one_a_way,
    posenc_calls,
    put_under,
    require_near,
)

hooks = pytest.importorskip("accelerate.hooks")
big_modeling = pytest.importorskip("accelerate.big_modeling")

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # WavLM's


def hooked(model: PreTrainedModel) -> None:
    """Put a hook on every module, as ``dispatch_model`` does."""
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu"))


@one_a_way
def test_hooks_before(key: str) -> None:
    case = CASES[key]
    model = case.model()
    outputs = case.outputs(model)
    hooked(model)
    put_under(model)
    copied = copy.deepcopy(model)
    require_near(case.outputs(model), outputs, case.relative)
    assert posenc_calls(case, model) > 0
    restore(model)
    assert posenc_calls(case, model) == 0
    for a, b in zip(case.outputs(model), outputs, strict=True):
        assert torch.equal(a, b)
    assert posenc_calls(case, copied) > 0
    hooks.remove_hook_from_module(copied, recurse=True)
    require_near(case.outputs(copied), outputs, case.relative)


@one_a_way
def test_hooks_after(key: str) -> None:
    case = CASES[key]
    model = case.model()
    outputs = case.outputs(model)
    put_under(model, check=False)
    hooked(model)
    assert posenc_calls(case, model) > 0
    restore(model)
    for a, b in zip(case.outputs(model), outputs, strict=True):
        assert torch.equal(a, b)
    hooks.remove_hook_from_module(model, recurse=True)
    put_under(model, check=False)
    assert posenc_calls(case, model) > 0


class Arrived(Exception):
    """Raised where a layer on another device has run."""


def layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The second of each list of layers that hold accelerated modules."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    seconds = (part[1] for part in lists if len(part) > 1)
    return (x for x in seconds if accelerated(x) and not isinstance(x, nn.ModuleList))


@pytest.mark.parametrize("key", [key for key in FIRST if not key.startswith("switch")])
def test_layers_on_two_devices(key: str) -> None:
    """Biases, masks and memories that layers hand on go along. Routers read values."""
    case = CASES[key]
    model = case.model()
    put_under(model, check=False)
    layer = next(layers(model)).to("meta")
    hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("meta"))

    def arrived(module: nn.Module, given: Any, output: Any) -> None:
        found = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        raise Arrived({x.device.type for x in found})

    layer.register_forward_hook(arrived)
    with pytest.raises(Arrived, match=r"\{'meta'\}"):
        case.outputs(model)


@pytest.mark.parametrize(
    ("key", "under_others"),
    [
        *((key, False) for key in ("mpnet-model", "swin-model", "t5-eager", "udop-eager")),
        ("mpnet-model", True),
    ],
)
def test_offloaded_weights(key: str, under_others: bool) -> None:
    """accelerate makes one hook of several on a module, which moves inputs as one of them does."""
    case = CASES[key]
    model = case.model()
    outputs = case.outputs(model)
    for module in model.modules() if under_others else ():
        hooks.add_hook_to_module(module, hooks.ModelHook())
    big_modeling.cpu_offload(model)
    report = put_under(model)
    assert report.difference is not None
    assert report.accelerated > 0
    require_near(case.outputs(model), outputs, case.relative)


def wrapped(model: PreTrainedModel) -> PreTrainedModel:
    """The model as ``Accelerator.prepare`` leaves it under mixed precision."""
    function = type(model).forward

    @functools.wraps(function)
    def in_context(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    model.forward = MethodType(in_context, model)
    return model


def test_other_methods_in_place_of_a_module_s_are_refused() -> None:
    torch.manual_seed(0)
    model = build("XLNetModel", XLNET).eval()
    ids = torch.arange(20).view(2, 10)
    expected = model(ids)[0]
    with pytest.raises(ArgumentError, match="XLNetModel whose forward was replaced"):
        put_under(wrapped(model))
    assert accelerated(model) == []
    assert torch.equal(model(ids)[0], expected)
    del model.forward
    put_under(model)
    modules = len(accelerated(model))
    with pytest.raises(ArgumentError, match="XLNetModel whose forward was replaced"):
        restore(wrapped(model))
    assert len(accelerated(model)) == modules
    del model.forward
    restore(model)
    assert not any(isinstance(module, Accelerated) for module in model.modules())
