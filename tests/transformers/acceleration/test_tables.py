"""Projections of positions are kept while table and weights stay as they are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from posenc.encoding.prepared import MOST
from posenc.transformers.acceleration import terms
from tests.transformers.acceleration.case import whole_sounds, whole_texts
from tests.transformers.acceleration.cases import funnel, seamless_m4t, wav2vec2_conformer, xlnet
from tests.transformers.acceleration.test_laws import put_under

Inputs = Callable[[int], dict[str, Tensor]]


def features(length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"input_features": torch.randn(2, length, 10, generator=generator)}


def typed_texts(length: int) -> dict[str, Tensor]:
    inputs = whole_texts(length)
    return inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])}


FAMILIES: dict[str, tuple[Callable[..., PreTrainedModel], Inputs, str]] = {
    "wav2vec2_conformer": (
        wav2vec2_conformer.make,
        lambda n: whole_sounds(32 * n),
        "linear_pos.weight",
    ),
    "seamless_m4t": (seamless_m4t.make, features, "linear_pos.weight"),
    "xlnet": (xlnet.make, whole_texts, ".r"),
    "causal xlnet": (lambda: xlnet.make(attn_type="uni"), whole_texts, ".r"),
    "funnel": (funnel.make, typed_texts, "r_kernel"),
    "repeated funnel": (funnel.base, typed_texts, "r_kernel"),
}

all_families = pytest.mark.parametrize(
    ("make", "inputs", "name"), FAMILIES.values(), ids=list(FAMILIES)
)


def perturbed(make: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def pair(make: Callable[..., PreTrainedModel]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model as it was, and one under which posenc computes."""
    plain, model = perturbed(make), perturbed(make)
    put_under(model, check=False)
    return plain, model


def near(model: PreTrainedModel, plain: PreTrainedModel, given: dict[str, Tensor]) -> None:
    got, expected = model(**given)[0], plain(**given)[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


class Projections(TorchFunctionMode):
    """Counts products of rows with some weights."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights, self.count = weights, 0

    def __torch_function__(
        self, function: Any, types: Any, given: Any = (), options: Any = None
    ) -> Any:
        if function in (torch.einsum, nn.functional.linear):
            rows, weight = [x for x in given if isinstance(x, Tensor)][:2]
            self.count += any(weight is x for x in self.weights) and rows.numel() > 0
        return function(*given, **options or {})


@all_families
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_each_layer_keeps_its_projections(
    make: Callable[..., PreTrainedModel],
    inputs: Inputs,
    name: str,
    context: Callable[[], AbstractContextManager[None]],
) -> None:
    """Of one range of positions for many lengths."""
    model = perturbed(make)
    put_under(model, check=False)
    weights = [x for n, x in model.named_parameters() if n.endswith(name)]
    counts = []
    with context():
        for length in (24, 24, 24, 24, 22, 20, 27, 30):
            with Projections(weights) as projections:
                model(**inputs(length))
            counts.append(projections.count)
    assert counts[0] >= len(weights) - 1  # Funnel's decoder is no part of its base model
    assert counts[4:] == [0] * 4


@all_families
def test_kept_projections_are_those_of_every_length(
    make: Callable[..., PreTrainedModel], inputs: Inputs, name: str
) -> None:
    plain, model = pair(make)
    with torch.no_grad():
        for length in (24, 17, 40, 24, 33, 16, 9, 70):
            for _ in range(3):
                near(model, plain, inputs(length))


def rescaled(model: PreTrainedModel) -> None:
    for module in model.modules():
        if hasattr(module, "pe"):
            module.pe.mul_(0.5)


def observed(model: PreTrainedModel) -> None:
    """Dropout of positions, and layers that project them, with hooks that write to results."""

    def write(module: nn.Module, given: Any, result: Tensor) -> None:
        result[:, :1].mul_(2.0)

    for name, module in model.named_modules():
        if name.endswith(("linear_pos", "sin_dropout")) or name == "dropout":
            module.register_forward_hook(write)


def added(model: PreTrainedModel, name: str) -> None:
    for n, parameter in model.named_parameters():
        if n.endswith(name):
            parameter.add_(0.3)


def configured(model: PreTrainedModel) -> None:
    model.clamp_len = 5
    model.config.separate_cls = False


@all_families
@pytest.mark.parametrize("changed", ["weights", "data", "table", "hooks", "settings", "dtype"])
def test_changes_are_noticed(
    make: Callable[..., PreTrainedModel], inputs: Inputs, name: str, changed: str
) -> None:
    models, given = pair(make), inputs(24)
    with torch.no_grad():
        for _ in range(4):
            near(models[1], models[0], given)
        for model in models:
            if changed == "weights":
                added(model, name)
            elif changed == "data":
                for n, parameter in model.named_parameters():
                    parameter.data = parameter.data * 1.5 if n.endswith(name) else parameter.data
            elif changed == "dtype":
                model.double()
                given = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
            else:
                {"table": rescaled, "hooks": observed, "settings": configured}[changed](model)
        for _ in range(4):
            near(models[1], models[0], given)


@all_families
def test_gradients_follow_kept_projections(
    make: Callable[..., PreTrainedModel], inputs: Inputs, name: str
) -> None:
    plain, model = pair(make)
    with torch.no_grad():
        for _ in range(4):
            near(model, plain, inputs(24))
    for each in (plain, model):
        each(**inputs(24))[0].square().sum().backward()
    expected = dict(plain.named_parameters())
    found = [(n, x) for n, x in model.named_parameters() if n.endswith(name) and x.grad is not None]
    assert found
    for n, x in found:
        gradient = expected[n].grad
        assert gradient is not None
        assert x.grad is not None
        bound = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(x.grad, gradient, rtol=0, atol=bound)


@all_families
def test_autocast_has_projections_of_its_own(
    make: Callable[..., PreTrainedModel], inputs: Inputs, name: str
) -> None:
    plain, model = pair(make)
    with torch.no_grad():
        for single in (True, False, True):
            for _ in range(4):
                if single:
                    near(model, plain, inputs(24))
                    continue
                with torch.autocast("cpu", torch.bfloat16):
                    found, expected = model(**inputs(24))[0], plain(**inputs(24))[0]
                torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)


@all_families
def test_nothing_outlives_the_model(
    make: Callable[..., PreTrainedModel], inputs: Inputs, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, read, reused = [], [], terms.reused_later

    def seen(compute: Callable[[], Tensor], *kind: Any, **options: Any) -> Tensor | None:
        result = reused(compute, *kind, **options)
        if result is not None:
            results.append(weakref.ref(result))
            read.append(weakref.ref(options["tensors"][-1]))
        return result

    monkeypatch.setattr(terms, "reused_later", seen)
    model = perturbed(make)
    put_under(model, check=False)
    with torch.no_grad():
        for length in (24, 24, 24, 40, 40, 70, 70, 140, 140):
            model(**inputs(length))
    gc.collect()
    weights = [n for n, _ in model.named_parameters() if n.endswith(name)]
    alive = {id(x()) for x in results if x() is not None}
    assert 0 < len(alive) <= MOST * len(weights)
    del model
    gc.collect()
    assert not any(x() is not None for x in results + read)


@pytest.mark.usefixtures("entered")
def test_rows_are_those_of_the_table() -> None:
    """Also for views that are no consecutive rows, tables that are too long, and no views."""
    weight, table = torch.randn(4, 3), torch.randn(9, 4)
    views = {
        "part": (table[2:5], True),
        "end": (table[5:], True),
        "whole": (table[:], True),
        "own": (table, False),
        "steps": (table[::2], False),
        "columns": (table[:, :3], False),
        "turned": (table.T[:, :4], False),
        "shifted": (table.view(-1)[2:14].view(3, 4), False),
        "long": (torch.randn(2100, 4)[3:9], False),
    }
    for label, (rows, expected) in views.items():
        other = torch.randn(rows.shape[-1], 3) if rows.shape[-1] != 4 else weight

        def project(x: Tensor, other: Tensor = other) -> Tensor:
            return (x @ other).unsqueeze(0)

        with torch.no_grad():
            for _ in range(2):
                found = terms.cached_projection(project, rows, 0, weights=(other,))
        assert (found is not None) == expected, label
        if found is not None:
            torch.testing.assert_close(found, project(rows))
