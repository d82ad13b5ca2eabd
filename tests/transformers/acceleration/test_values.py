"""Accelerated models on tensors whose values Python may not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call, grad, vmap

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
        "beit-model",
        "deberta-padded",
        "deberta_v2-v3",
        "falcon-padded",
        "funnel-padded",
        "layoutlmv2-texts",
        "mpt-padded",
        "sam-sdpa",
        "swin-model",
        "swinv2-model",
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
    largest = max(float(x.abs().max()) for x in expected.values())
    for name, gradient in expected.items():
        bound = 1e-4 * max(float(gradient.abs().max()), 1e-3 * largest)
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=bound, msg=name)


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
