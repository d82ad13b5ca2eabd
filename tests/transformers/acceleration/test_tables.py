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
from tests.transformers.acceleration.case import Case, of, whole_texts
from tests.transformers.acceleration.cases import sounds
from tests.transformers.acceleration.cases.texts import BLOCKS, FUNNEL, XLNET
from tests.transformers.acceleration.test_laws import put_under

Inputs = Callable[[int], dict[str, Tensor]]
Maker = Callable[..., PreTrainedModel]


def features(length: int) -> dict[str, Tensor]:
    return {"input_features": sounds.drawn(2, length, 10)}


def typed_texts(length: int) -> dict[str, Tensor]:
    inputs = whole_texts(length)
    return inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])}


SOUNDS = of("Wav2Vec2ConformerModel", sounds.CONFORMER), lambda n: sounds.whole_sounds(32 * n)
FAMILIES: dict[str, tuple[Maker, Inputs, str]] = {
    "wav2vec2_conformer": (*SOUNDS, "linear_pos.weight"),
    "seamless_m4t": (
        of(sounds.SeamlessM4TSpeechEncoder, sounds.SEAMLESS),
        features,
        "linear_pos.weight",
    ),
    "xlnet": (of("XLNetModel", XLNET), whole_texts, ".r"),
    "causal xlnet": (of("XLNetModel", XLNET, attn_type="uni"), whole_texts, ".r"),
    "funnel": (of("FunnelModel", FUNNEL), typed_texts, "r_kernel"),
    "repeated funnel": (of("FunnelBaseModel", FUNNEL, **BLOCKS), typed_texts, "r_kernel"),
}

all_families = pytest.mark.parametrize(
    ("make", "inputs", "name"), FAMILIES.values(), ids=list(FAMILIES)
)


def pair(make: Maker) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model as it was, and one under which posenc computes."""
    plain, model = Case(make).model(), Case(make).model()
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


@pytest.mark.usefixtures("counted_products")
@all_families
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_each_layer_keeps_its_projections(
    make: Maker, inputs: Inputs, name: str, context: Callable[[], AbstractContextManager[None]]
) -> None:
    """Of one range of positions for many lengths."""
    model = Case(make).model()
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
def test_kept_projections_are_those_of_every_length(make: Maker, inputs: Inputs, name: str) -> None:
    plain, model = pair(make)
    with torch.no_grad():
        for length in (24, 17, 40, 24, 33, 16, 9, 70):
            for _ in range(3):
                near(model, plain, inputs(length))


def rescaled(model: PreTrainedModel, name: str) -> None:
    for module in model.modules():
        if hasattr(module, "pe"):
            module.pe.mul_(0.5)


def observed(model: PreTrainedModel, name: str) -> None:
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


def replaced(model: PreTrainedModel, name: str) -> None:
    for n, parameter in model.named_parameters():
        parameter.data = parameter.data * 1.5 if n.endswith(name) else parameter.data


def configured(model: PreTrainedModel, name: str) -> None:
    model.clamp_len = 5
    model.config.separate_cls = False


def widened(model: PreTrainedModel, name: str) -> None:
    model.double()


@all_families
@pytest.mark.parametrize("change", [added, replaced, rescaled, observed, configured, widened])
def test_changes_are_noticed(
    make: Maker, inputs: Inputs, name: str, change: Callable[[PreTrainedModel, str], None]
) -> None:
    models, given = pair(make), inputs(24)
    with torch.no_grad():
        for _ in range(4):
            near(models[1], models[0], given)
        for model in models:
            change(model, name)
        dtype = next(models[0].parameters()).dtype
        given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}
        for _ in range(4):
            near(models[1], models[0], given)


@all_families
def test_gradients_follow_kept_projections(make: Maker, inputs: Inputs, name: str) -> None:
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
        bound = 1e-4 * float(expected[n].grad.abs().max())
        torch.testing.assert_close(x.grad, expected[n].grad, rtol=0, atol=bound)


@all_families
def test_autocast_has_projections_of_its_own(make: Maker, inputs: Inputs, name: str) -> None:
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
    make: Maker, inputs: Inputs, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, read, reused = [], [], terms.reused_later

    def seen(compute: Callable[[], Tensor], *kind: Any, **options: Any) -> Tensor | None:
        result = reused(compute, *kind, **options)
        if result is not None:
            results.append(weakref.ref(result))
            read.append(weakref.ref(options["tensors"][-1]))
        return result

    monkeypatch.setattr(terms, "reused_later", seen)
    model = Case(make).model()
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
