"""``accelerate``, ``stretch`` and both ways back, in every order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from posenc.errors import ArgumentError
from posenc.transformers import restore, stretch
from posenc.transformers.acceleration import accelerate
from posenc.transformers.acceleration import restore as unaccelerate
from tests.testing.tiny_models import inputs_of, tiny_config

KINDS = {
    "llama": ("rerope", {"window": 4}),
    "gemma3_text": ("self_extend", {"window": 4, "factor": 2}),
    "gpt_oss": ("ntk", {"factor": 2, "of": "theta"}),
    "bloom": ("interpolate", {"factor": 2}),
}
"""Types of models with a method of extension: two that move positions, one by frequencies, and one
of an accelerated family."""


def attributes(model: PreTrainedModel) -> list[tuple[str, set[str], type]]:
    """Names of all that a model and its modules hold, with their classes."""
    return [(name, set(vars(part)), type(part)) for name, part in model.named_modules()]


def implementations(model: PreTrainedModel) -> list[str | None]:
    return [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]


def run(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs_of(model)).logits
    return logits


@pytest.mark.parametrize("count", [3, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_order_leaves_the_model_as_it_was(kind: str, count: int) -> None:
    """Outputs to the bit, configs and all attributes; a model that is not stretched is served or
    as it was at every step."""
    method, options = KINDS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    steps: dict[str, Callable[[Any], Any]] = {
        "accelerate": lambda x: accelerate(x, check=False, shortest=0),
        "stretch": lambda x: stretch(x, method, **options),
        "restore": restore,
        "accelerate.restore": unaccelerate,
    }
    expected, config = run(model), deepcopy(model.config.to_dict())
    held, named = attributes(model), implementations(model)
    for order in product(steps, repeat=count):
        stretched = accelerated = False
        for step in order:
            try:
                steps[step](model)
            except ArgumentError:
                assert step == "stretch", order
                assert stretched, order
            stretched = step == "stretch" or (stretched and step != "restore")
            accelerated = step == "accelerate" or (accelerated and not step.endswith("restore"))
            if step.endswith("restore") and not stretched:
                assert implementations(model) == named, order
                assert attributes(model) == held, order
        if order[-1] == "stretch" or order[-2:] == ("stretch", "accelerate"):
            assert run(model).isfinite().all(), order
        text = str(restore(model))
        assert (" part" in text) == stretched, order
        assert ("its own attention" in text) == accelerated, order
        assert ("nothing was changed" in text) == (not stretched and not accelerated), order
        assert attributes(model) == held, order
        assert implementations(model) == named, order
        assert model.config.to_dict() == config, order
    assert torch.equal(run(model), expected)
