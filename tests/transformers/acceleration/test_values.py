"""Accelerated models on tensors whose values Python may not read, and differentiated twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call, grad, vmap

from posenc.attention import dispatch
from tests.support.exhaustive import kept_in_suite
from tests.transformers.acceleration.case import Case
from tests.transformers.acceleration.cases import CASES
from tests.transformers.acceleration.test_laws import FIRST, FIRST_OF_WAYS, put_under

pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),  # WavLM's
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of vmap
]

WITH_ROUTER = "switch_transformers-model"
"""Its router reads values, on its own."""

READ_BY_TRANSFORMERS = ("inkling", "layoutlmv3", "mpnet", "seamless", "speecht5")
"""Families whose masks transformers reads on the meta device and inside ``vmap``."""


READ = [key for key in FIRST if key.startswith(READ_BY_TRANSFORMERS)]
"""Cases that the meta device, on which no family may read values either, is not tried with."""


def on(inputs: dict[str, Any], change: Any) -> dict[str, Any]:
    return {name: change(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}


@pytest.mark.parametrize(
    "key", kept_in_suite([key for key in FIRST if key != WITH_ROUTER], [*FIRST_OF_WAYS, *READ])
)
def test_fake_tensors(key: str) -> None:
    model = CASES[key].model()
    put_under(model, check=False)
    expected = model(**CASES[key].inputs())[0]
    with (
        torch._dynamo.config.patch(fake_tensor_cache_enabled=True),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        output = model(**on(CASES[key].inputs(), mode.from_tensor))[0]
    assert isinstance(output, FakeTensor)
    assert (output.shape, output.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize(
    "key",
    [key for key in FIRST if key != WITH_ROUTER and not key.startswith(READ_BY_TRANSFORMERS)]
    + ["xlnet-segments", "xlnet-queried", "mpnet-whole"],
)
def test_meta_tensors(key: str) -> None:
    model = CASES[key].model()
    put_under(model, check=False)
    expected = model(**CASES[key].inputs())[0]
    output = model.to("meta")(**on(CASES[key].inputs(), lambda x: x.to("meta")))[0]
    assert output.is_meta
    assert (output.shape, output.dtype) == (expected.shape, expected.dtype)


def gradients(case: Case, model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients of a loss for each row of the batch."""

    def loss(parameters: dict[str, Tensor], inputs: dict[str, Any]) -> Tensor:
        row = on(inputs, lambda x: x.unsqueeze(0))
        output = functional_call(model, parameters, (), row)[0]
        if case.compared is not None:
            seen = inputs["attention_mask"].cumsum(0) > 0
            output = output.where(seen.view(1, -1, 1), 0.0)
        return output.square().sum()

    parameters = {name: x.detach() for name, x in model.named_parameters()}
    found: dict[str, Tensor] = vmap(grad(loss), (None, 0))(parameters, case.inputs())
    return found


@pytest.mark.parametrize(
    "key",
    [
        *("beit-model", "deberta-padded", "deberta_v2-v3", "falcon-padded", "funnel-padded"),
        *("layoutlmv2-texts", "mpt-padded", "sam-sdpa", "swin-model", "swinv2-model"),
        "xlnet-padded",
    ],
)
def test_gradients_for_each_sample(key: str) -> None:
    """Of the models whose own layers allow it."""
    case = CASES[key]
    model = case.model()
    expected = gradients(case, model)
    put_under(model, check=False)
    got = gradients(case, model)
    assert got.keys() == expected.keys()
    require_close(list(got.values()), list(expected.values()))


def test_gradients_for_each_sample_where_the_own_masks_forbid_them() -> None:
    case = CASES["t5-encoder"]
    model = case.model()
    put_under(model, check=False)
    got = gradients(case, model)
    inputs = case.inputs()
    for row in range(2):
        model.zero_grad()
        one = {name: x[row : row + 1] for name, x in inputs.items()}
        model(**one)[0].square().sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                bound = 1e-4 * float(parameter.grad.abs().max()) + 1e-6
                torch.testing.assert_close(got[name][row], parameter.grad, rtol=0, atol=bound)


# Second derivatives

UNDERIVED = ("falcon", "mt5", "seamless")
"""Families whose own layers, as the cases configure them, have no second derivatives."""


def weighed(outputs: list[Tensor]) -> Tensor:
    sums = [(x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in outputs]
    return sum(sums[1:], sums[0])


def second(case: Case, model: torch.nn.Module) -> list[Tensor]:
    """Gradients of the squares of all gradients."""
    parameters = list(model.parameters())
    loss = weighed(case.outputs(model))
    first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    squares = torch.stack([x.square().sum() for x in first if x is not None and x.requires_grad])
    return list(torch.autograd.grad(squares.sum(), parameters, materialize_grads=True))


def require_close(got: list[Tensor], expected: list[Tensor]) -> None:
    largest = max(float(x.abs().max()) for x in expected)
    for a, b in zip(got, expected, strict=True):
        bound = 1e-4 * max(float(b.abs().max()), 1e-3 * largest)
        torch.testing.assert_close(a, b, rtol=0, atol=bound)


@pytest.mark.parametrize("key", [key for key in FIRST if not key.startswith(UNDERIVED)])
def test_second_derivatives(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[key]
    expected = second(case, case.model())
    monkeypatch.setattr(dispatch, "SMALL", 0)  # as for long inputs
    model = case.model()
    put_under(model, check=False)
    require_close(second(case, model), expected)


@pytest.mark.parametrize("backend", ["native", "blockwise", "reference"])
def test_second_derivatives_through_parts_of_the_keys(backend: str) -> None:
    """Patches of images attend among themselves, and the class token joins them."""
    if dispatch.BACKENDS[backend].unavailable(torch.device("cpu")):
        pytest.skip("kernels are not built")
    case = CASES["beit-model"]
    expected, model = second(case, case.model()), case.model()
    put_under(model, check=False, backend=backend)
    require_close(second(case, model), expected)


def test_second_derivatives_of_functions() -> None:
    case = CASES["beit-model"]
    inputs = case.inputs()

    def found(model: torch.nn.Module) -> list[Tensor]:
        parameters = {name: x.detach() for name, x in model.named_parameters()}

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return weighed([functional_call(model, parameters, (), inputs)[0]])

        def squares(parameters: dict[str, Tensor]) -> Tensor:
            first = grad(loss)(parameters)
            return torch.stack([x.square().sum() for x in first.values()]).sum()

        return list(grad(squares)(parameters).values())

    expected = found(case.model())
    model = case.model()
    put_under(model, check=False)
    require_close(found(model), expected)
