"""DeBERTa beyond the laws: attention weights, and models left as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from tests.transformers.acceleration.case import texts
from tests.transformers.acceleration.cases import deberta, deberta_v2
from tests.transformers.acceleration.test_laws import accelerated, put_under


@pytest.mark.parametrize("make", [deberta.make, deberta_v2.make], ids=["v1", "v2"])
def test_attention_weights(make: Callable[[], PreTrainedModel]) -> None:
    model = make().eval()
    expected = model(**texts(), output_attentions=True)
    put_under(model)
    got = model(**texts(), output_attentions=True)
    torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state)
    for a, b in zip(got.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(a, b)


def test_talking_heads_stay() -> None:
    model = deberta.make(talking_head=True).eval()
    expected = model(**texts()).last_hidden_state
    report = put_under(model)
    assert report.accelerated == len(accelerated(model)) == 0
    assert all("talking" in module.reason for module in report.modules)
    assert torch.equal(model(**texts()).last_hidden_state, expected)


@pytest.mark.parametrize("make", [deberta.make, deberta_v2.make], ids=["v1", "v2"])
def test_each_layer_keeps_its_projections(
    make: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the embeddings, which all layers share."""
    model = make().eval()
    put_under(model, check=False)
    of_rows, linear = [], functional.linear

    def counted(x: Tensor, *weights: Tensor | None) -> Tensor:
        of_rows.extend([x] * (x.dim() == 2))  # tokens have a batch
        return linear(x, *weights)

    monkeypatch.setattr(functional, "linear", counted)
    counts = []
    with torch.no_grad():
        for _ in range(5):
            of_rows.clear()
            model(**texts())
            counts.append(len(of_rows))
    assert counts[0] == 2 * len(model.encoder.layer)
    assert counts[-1] == 0
