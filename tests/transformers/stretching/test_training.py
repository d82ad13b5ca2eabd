"""Stretched models in training, compiled, and in other libraries."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from posenc.transformers import restore, stretch
from posenc.transformers.stretching.attention import inner_attention
from tests.support.versions import checkpoint_activations
from tests.transformers.stretching.cases import FREE, model_of, near, outputs, texts

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

MOVED = {"length": 16, "window": 6}


def gradients(model: Any) -> Tensor:
    """Gradients of two passes with positions of their own, of which only then any are taken."""
    model.zero_grad()
    far = (torch.arange(40) * 3 % 50).expand(2, -1)
    first = model(texts(), use_cache=False).logits[..., 7].mean()
    second = model(texts().flip(1), position_ids=far, use_cache=False).logits[..., 9].square()
    (first + second.mean()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "gptj"])
def test_gradients_are_those_of_the_model(kind: str) -> None:
    model = model_of(kind)
    expected = gradients(model)
    stretch(model, "rerope", **FREE)
    assert near(expected, gradients(model))


def test_attention_drops_weights_in_training_alone() -> None:
    model = model_of("gptj", attn_pdrop=0.5)
    expected = outputs(model)
    stretch(model, "rerope", **FREE)
    assert near(expected, outputs(model))
    assert not near(expected, outputs(model.train()))


@pytest.mark.parametrize("training", [False, True])
def test_modules_that_rotate_by_themselves_drop_weights_in_training_alone(training: bool) -> None:
    """Older versions of transformers have some, with their dropout in a layer."""
    module, given = nn.Module().train(training), []
    module.attn_dropout = nn.Dropout(0.5)

    def function(*operands: Any, dropout: float) -> tuple[Tensor, None]:
        given.append(dropout)
        return operands[1], None

    inner_attention(module, function, *torch.zeros(3, 1, 2, 3, 4))
    assert given == [0.5 if training else 0.0]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gptj"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_computed_again_have_the_positions_of_their_pass(kind: str, reentrant: bool) -> None:
    model = model_of(kind)
    stretch(model, "rerope", **MOVED)
    expected = gradients(model)
    checkpoint_activations(model, reentrant=reentrant)
    if reentrant:
        model.enable_input_require_grads()
    assert near(expected, gradients(model.train()))


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_a_compiled_model_is_the_model(method: str) -> None:
    model = model_of("llama")
    stretch(model, method, **({"factor": 4} if method == "yarn" else MOVED))
    expected = outputs(model)
    compiled = torch.compile(model, backend="eager")
    assert near(expected, outputs(compiled))


@pytest.mark.parametrize("adapted_first", [False, True])
def test_adapters(adapted_first: bool) -> None:
    model = model_of("llama")
    before = outputs(model)
    config = LoraConfig(target_modules=["q_proj", "k_proj"], r=2, init_lora_weights=False)
    if adapted_first:
        adapted = get_peft_model(copy.deepcopy(model), config)
        stretch(adapted, "rerope", **MOVED)
    else:
        stretch(model, "rerope", **MOVED)
        adapted = get_peft_model(model, config)
    assert not near(before, outputs(adapted))
    with adapted.disable_adapter():
        moved = outputs(adapted)
    whole = model_of("llama")
    stretch(whole, "rerope", **MOVED)
    assert near(outputs(whole), moved)
    restore(adapted)
    with adapted.disable_adapter():
        assert torch.equal(before, outputs(adapted))


def test_a_trainer_trains_it(tmp_path: Path) -> None:
    model = model_of("llama", num_hidden_layers=1)
    stretch(model, "rerope", **MOVED)
    before = model.lm_head.weight.clone()
    rows = [{"input_ids": row, "labels": row} for row in texts()]
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(tmp_path, max_steps=2, use_cpu=True, **quiet)
    Trainer(model, arguments, train_dataset=rows).train()
    assert not torch.equal(before, model.lm_head.weight)
    assert outputs(model).isfinite().all()


def test_half_precision() -> None:
    model = model_of("llama").bfloat16()
    expected = outputs(model)
    stretch(model, "rerope", **FREE)
    got = outputs(model)
    assert got.dtype == torch.bfloat16
    assert float((expected - got).abs().max() / expected.abs().max()) < 0.05
