"""Second derivatives of accelerated models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad

from posenc.attention import dispatch
from tests.transformers.acceleration.case import Case
from tests.transformers.acceleration.cases import CASES
from tests.transformers.acceleration.test_laws import FIRST, put_under

WITHOUT = ("falcon", "mt5", "seamless")
"""Families whose own layers, as the cases configure them, have no second derivatives."""

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # WavLM's


def weighed(outputs: list[Tensor]) -> Tensor:
    sums = [(x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in outputs]
    return sum(sums[1:], sums[0])


def second(case: Case, model: torch.nn.Module) -> list[Tensor]:
    """Gradients of the squares of all gradients."""
    parameters = list(model.parameters())
    loss = weighed(case.outputs(model))  # type: ignore[arg-type]
    first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    squares = torch.stack([x.square().sum() for x in first if x is not None and x.requires_grad])
    return list(torch.autograd.grad(squares.sum(), parameters, materialize_grads=True))


def require_near(got: list[Tensor], expected: list[Tensor]) -> None:
    largest = max(float(x.abs().max()) for x in expected)
    for a, b in zip(got, expected, strict=True):
        bound = 1e-4 * max(float(b.abs().max()), 1e-3 * largest)
        torch.testing.assert_close(a, b, rtol=0, atol=bound)


@pytest.mark.parametrize("key", [key for key in FIRST if not key.startswith(WITHOUT)])
def test_second_derivatives(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[key]
    expected = second(case, case.model())
    monkeypatch.setattr(dispatch, "SMALL", 0)  # as for long inputs
    model = case.model()
    put_under(model, check=False)
    require_near(second(case, model), expected)


@pytest.mark.parametrize("backend", ["native", "blockwise", "reference"])
def test_second_derivatives_through_parts_of_the_keys(backend: str) -> None:
    """Patches of images attend among themselves, and the class token joins them."""
    if dispatch.BACKENDS[backend].unavailable(torch.device("cpu")):
        pytest.skip("kernels are not built")
    case = CASES["beit-model"]
    expected, model = second(case, case.model()), case.model()
    put_under(model, check=False, backend=backend)
    require_near(second(case, model), expected)


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
    require_near(found(model), expected)
