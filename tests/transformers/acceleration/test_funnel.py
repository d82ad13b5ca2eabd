"""Funnel beyond the laws: calls and models left to its own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posenc.attention import attend
from posenc.transformers.acceleration import accelerate
from posenc.transformers.acceleration.families import funnel
from tests.transformers.acceleration.case import Case
from tests.transformers.acceleration.cases.funnel import CASES, make, segments, three_types
from tests.transformers.acceleration.test_laws import accelerated, put_under, require_near

ATTEND = "posenc.transformers.acceleration.accelerated.attend"


@pytest.mark.parametrize("left", ["types", "weights"])
def test_what_posenc_has_no_form_for_runs_as_it_did(
    left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, options = CASES["segments"], {}
    if left == "weights":
        options = {"output_attentions": True}
    else:
        monkeypatch.setattr(funnel, "MOST_TYPES", 2)
        case = Case(make, three_types)
    model = case.model()
    outputs = case.outputs(model, **options)
    put_under(model)
    monkeypatch.delattr(ATTEND)
    for a, b in zip(case.outputs(model, **options), outputs, strict=True):
        assert torch.equal(a, b)


def test_pooled_blocks_too_short_to_gain_run_as_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []

    def counted(q: Tensor, k: Tensor, *arguments: Any, **options: Any) -> Tensor:
        keys.append(k.shape[2])
        return attend(q, k, *arguments, **options)

    case = CASES["segments"]
    model = case.model()
    outputs = case.outputs(model)
    accelerate(model, shortest=24)
    monkeypatch.setattr(ATTEND, counted)
    require_near(case.outputs(model), outputs)
    assert set(keys) == {24}


@pytest.mark.parametrize("rows", ["pooled", "padding"])
def test_rows_without_keys(rows: str) -> None:
    """Pooled with padding, or padding alone; as transformers has them, they see all keys."""

    def inputs() -> dict[str, Tensor]:
        made = segments()
        made["attention_mask"][0] = 0
        made["attention_mask"][0, -1] = int(rows == "pooled")
        return made

    case = Case(make, inputs)
    model = case.model()
    outputs, gradients = case.results(model)
    put_under(model)
    found, others = case.results(model)
    require_near(found, outputs)
    require_near(list(others.values()), list(gradients.values()), 1e-4)


def test_positions_dropped_out() -> None:
    """The dropout of sines and cosines is that of the model, shared by its layers."""
    case = Case(lambda: make(attention_dropout=0.0), segments)
    model = case.model().train()
    torch.manual_seed(3)
    outputs = case.outputs(model)
    put_under(model, check=False)
    torch.manual_seed(3)
    require_near(case.outputs(model), outputs)


def test_factorized_positions_stay() -> None:
    model = Case(lambda: make(attention_type="factorized")).model()
    report = put_under(model)
    assert accelerated(model) == []
    assert {module.reason for module in report.modules} == {"its positions are factorized"}
