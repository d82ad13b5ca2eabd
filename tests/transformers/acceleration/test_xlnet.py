"""XLNet beyond the laws: causal attention, which checks do not reach, and calls left to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from posenc.transformers.acceleration import accelerated
from tests.transformers.acceleration.case import Case, texts, whole_texts
from tests.transformers.acceleration.cases.xlnet import CASES, make, memories, segments
from tests.transformers.acceleration.test_laws import put_under, require_near

ONE_ROW = {name: tensor[:1] for name, tensor in texts().items()}

CAUSAL = {
    "whole": Case(lambda: make(attn_type="uni"), whole_texts),
    "memories": Case(
        lambda: make(attn_type="uni"), lambda: whole_texts() | {"mems": memories()["mems"]}
    ),
    "same_length": Case(
        lambda: make(attn_type="uni", same_length=True),
        lambda: whole_texts() | {"mems": memories()["mems"]},
    ),
    "padded": Case(lambda: make(attn_type="uni"), lambda: ONE_ROW),
}


@pytest.mark.parametrize("case", CAUSAL.values(), ids=list(CAUSAL))
def test_causal_attention(case: Case) -> None:
    model = case.model()
    outputs, gradients = case.outputs(model), case.gradients(model)
    # transformers' causal XLNet takes no padded batch of several rows, as the check has.
    put_under(model, check=False)
    require_near(case.outputs(model), outputs)
    for name, gradient in case.gradients(model).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-3, atol=1e-4, msg=name)


def test_positions_dropped_out_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(make, segments)
    model = case.model()
    for layer in model.layer:  # dropout of the embeddings and positions remains
        for module in layer.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    model.train()
    torch.manual_seed(3)
    outputs = case.outputs(model)
    put_under(model, check=False)
    torch.manual_seed(3)
    require_near(case.outputs(model), outputs)


@pytest.mark.parametrize("name", ["permuted", "weights"])
def test_what_posenc_has_no_form_for_runs_as_it_did(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["permuted" if name == "permuted" else "segments"]
    options: dict[str, Any] = {"output_attentions": True} if name == "weights" else {}
    model = case.model()
    outputs = case.outputs(model, **options)
    put_under(model)
    monkeypatch.delattr(accelerated, "attend")
    for a, b in zip(case.outputs(model, **options), outputs, strict=True):
        assert torch.equal(a, b)


def test_rows_that_are_padding_alone() -> None:
    def inputs() -> dict[str, Any]:
        made = segments()
        made["attention_mask"][1] = 0
        return made

    case = Case(make, inputs)
    model = case.model()
    outputs = case.outputs(model)
    put_under(model)
    require_near(case.outputs(model), outputs)


def test_saved_models_are_those_of_transformers(tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path / "own")
    put_under(model)
    model.save_pretrained(tmp_path / "accelerated")
    own, saved = ((tmp_path / name / "config.json").read_text() for name in ("own", "accelerated"))
    assert saved == own
    assert "XLNetModel" in saved


def test_generation() -> None:
    model = CASES["lm"].model()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    ids = whole_texts()["input_ids"]
    expected = model.generate(ids, **options)
    put_under(model)
    assert torch.equal(model.generate(ids, **options), expected)
