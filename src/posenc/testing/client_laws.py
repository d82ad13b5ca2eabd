"""Laws of adapters (peft), offloading (accelerate) and quantisation of a model's modules.

Each requires its library.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn

from posenc.layout import Layout
from posenc.models import generate
from posenc.testing.stacks import run, stack, tokens
from posenc.testing.subject import (
    LENGTH,
    LawBroken,
    Layer,
    Subject,
    agree,
    inputs,
    named,
    seeded,
    tokens_of,
)


@named
def adapters_merge(subject: Subject) -> None:
    """LoRA adapters on every linear layer change the output, have gradients, and can be merged."""
    for merged in (False, True):
        layer = subject.layer(merged=merged)
        before = _output(subject, layer)
        names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
        model = _adapted(layer, names)
        adapters = {n: p for n, p in model.named_parameters() if "lora_B" in n}
        total = _output(subject, model).sin().sum()
        gradients = torch.autograd.grad(total, list(adapters.values()), allow_unused=True)
        for name, gradient in zip(adapters, gradients, strict=True):
            if gradient is None:
                raise LawBroken(f"{name} has no gradient")
        with torch.no_grad():
            generator = torch.Generator().manual_seed(3)
            for parameter in adapters.values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        adapted = _output(subject, model)
        if torch.allclose(adapted, before, atol=1e-4):
            raise LawBroken(f"adapters on {', '.join(names)} change nothing")
        unloaded = cast(Any, copy.deepcopy(model)).merge_and_unload()
        agree("the model with its adapters merged", _output(subject, unloaded), adapted)


@named
def offloading_changes_nothing(subject: Subject) -> None:
    """accelerate's CPU offloading does not change outputs or generated tokens.

    Of decoders with tied and untied output layers.
    """
    from accelerate import cpu_offload  # type: ignore[import-untyped]

    for tied in (True, False):
        model = stack(subject, tied=tied)
        with torch.no_grad():
            expected = run(subject, model)
            offloaded = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
            got = run(subject, offloaded)
        agree(f"the output, tied={tied}", got, expected)
        if subject.axes == 1 and tied:
            drawn = [
                generate(decoder, tokens(), max_new_tokens=3) for decoder in (offloaded, model)
            ]
            agree("the generated tokens", *drawn)


@named
def quantisation_is_near(subject: Subject) -> None:
    """``quantize_dynamic`` of all linear layers changes logits little."""
    from torch.ao.quantization import quantize_dynamic

    model = stack(subject).float()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated in favour of torchao
        expected = run(subject, model)
        quantised: Any = quantize_dynamic(model, dtype=torch.qint8)  # type: ignore[no-untyped-call]
        got = run(subject, quantised)
    agree("the output", got, expected, tolerance=0.2)


def _adapted(layer: Layer, names: list[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with seeded(5):
        config = LoraConfig(r=2, target_modules=names, bias="none")
        return get_peft_model(layer, config).double()


def _output(subject: Subject, model: nn.Module) -> Tensor:
    layout = subject.place(Layout.sequence(LENGTH))
    output: Tensor = model(inputs(), layout, tokens=tokens_of())
    return output
