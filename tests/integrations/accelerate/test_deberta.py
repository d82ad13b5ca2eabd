"""DeBERTa beyond the laws: attention weights, and models left as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from tests.integrations.accelerate.case import texts
from tests.integrations.accelerate.cases import deberta, deberta_v2
from tests.integrations.accelerate.test_laws import accelerated, put_under


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
