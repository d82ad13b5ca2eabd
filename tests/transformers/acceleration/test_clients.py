"""Accelerated models in the hands of generate, PEFT, Trainer, pipelines and the compiler."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    XLMConfig,
    XLMModel,
)
from transformers.integrations.executorch import register_dynamic_cache_export_support

from posenc.errors import ArgumentError, UnknownNameError
from posenc.transformers.acceleration import accelerate, register, restore
from posenc.transformers.acceleration.accelerated import Accelerated
from posenc.transformers.acceleration.masks import attended_keys
from tests.support.caches import given
from tests.support.tiny_models import tiny_model
from tests.transformers.acceleration.case import VOCABULARY, texts
from tests.transformers.acceleration.cases import CASES
from tests.transformers.acceleration.cases.deberta_v2 import SIZES as DEBERTA
from tests.transformers.acceleration.cases.t5 import SIZES as T5


def t5(**options: Any) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(**T5 | {"decoder_start_token_id": 0} | options)
    return T5ForConditionalGeneration(config).eval()


def deberta(kind: type[PreTrainedModel] = DebertaV2Model, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return kind(DebertaV2Config(**DEBERTA | options)).eval()


def changed(model: nn.Module) -> int:
    return sum(isinstance(module, Accelerated) for module in model.modules())


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
@pytest.mark.filterwarnings("ignore")
def test_generation_is_the_same(options: dict[str, Any]) -> None:
    model = t5()
    inputs: dict[str, Any] = texts() | {"max_new_tokens": 12, "do_sample": False} | options
    expected = model.generate(**inputs)
    accelerate(model, shortest=0)
    assert torch.equal(model.generate(**inputs), expected)


def test_attention_weights_are_made_on_request() -> None:
    model = t5(attn_implementation="eager")
    inputs = texts() | {"decoder_input_ids": texts()["input_ids"], "output_attentions": True}
    expected = model(**inputs)
    accelerate(model, shortest=0)
    found = model(**inputs)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        for a, b in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    encoder = deberta()
    expected = encoder(**texts(), output_attentions=True)
    accelerate(encoder, shortest=0)
    for a, b in zip(
        encoder(**texts(), output_attentions=True).attentions, expected.attentions, strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("first", ["accelerate", "peft"])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_train(first: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["query_proj", "key_proj"], init_lora_weights=False)

    def adapted(model: PreTrainedModel) -> nn.Module:
        torch.manual_seed(1)
        wrapped: nn.Module = peft.get_peft_model(model, config)
        return wrapped.eval()

    expected = adapted(deberta())
    model: Any = deberta()
    if first == "accelerate":
        accelerate(model, shortest=0)
        model = adapted(model)
    else:
        model = adapted(model)
        accelerate(model, shortest=0)
    assert changed(model) == 3
    outputs = [wrapped(**texts()).last_hidden_state for wrapped in (model, expected)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    others = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        if "lora" in name:
            gradient = others[name].grad
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4)


def test_compiled_models_give_the_same() -> None:
    model = deberta(num_hidden_layers=1)
    inputs = texts()
    expected = model(**inputs).last_hidden_state
    accelerate(model, shortest=0)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    found = compiled(**inputs).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.square().sum().backward()
    assert all(
        parameter.grad is not None
        for name, parameter in model.named_parameters()
        if "rel_embeddings" in name
    )


@torch.no_grad()
def test_exported_programs_take_any_length() -> None:
    """Also one from which on posenc is faster, and others before it."""
    encoder = t5(num_layers=1).encoder
    accelerate(encoder, check=False, shortest=24)
    tokens = {1: torch.export.Dim("tokens", min=4, max=4096)}
    shapes = dict.fromkeys(inputs := texts(), tokens)
    program = torch.export.export(encoder, (), inputs, dynamic_shapes=shapes).module()
    for length in (23, 31):
        inputs = texts(length)
        expected, found = encoder(**inputs)[0], program(**inputs)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_exported_programs_take_any_batch() -> None:
    model = deberta(num_hidden_layers=1)
    accelerate(model, check=False)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("tokens", max=40)}
    shapes = dict.fromkeys(inputs := texts(), sizes)
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes).module()
    for rows, length in ((1, 31), (4, 9)):
        inputs = {name: x[:1].repeat(rows, 1) for name, x in texts(length).items()}
        expected, found = model(**inputs)[0], program(**inputs)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_caches_of_accelerated_models_are_exported() -> None:
    """Once registered for that, caches are trees, whose keys of padding are no output."""
    register_dynamic_cache_export_support()
    model, ids = tiny_model("gpt2"), texts()["input_ids"]

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor, cache: Any) -> Tensor:
            logits: Tensor = self.model(ids, **given(self.model, cache)).logits
            return logits

    caches = [DynamicCache() for _ in range(2)]
    expected = model(ids).logits[:, -1:]
    accelerate(model, shortest=0, check=True)
    for cache in caches:
        for part in (ids[:, :-2], ids[:, -2:-1]):
            model(part, **given(model, cache))
    program = torch.export.export(Step(), (ids[:, -1:], caches[0])).module()
    found = program(ids[:, -1:], caches[1])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_bias_written_out_compiles_into_one_graph() -> None:
    """Two layers of the decoder share it."""
    model = t5(attn_implementation="eager", num_layers=1, num_decoder_layers=2)
    ids = texts()["input_ids"]
    causal = torch.zeros(23, 23).masked_fill(torch.ones(23, 23).triu(1).bool(), float("-inf"))
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    inputs["decoder_attention_mask"] = causal.expand(2, 1, 23, 23)  # as a static cache's
    expected = model(**inputs, use_cache=False).logits
    accelerate(model, shortest=0)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = compiled(**inputs, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_trainer_trains(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    losses = []
    for fast in (False, True):
        model = deberta(DebertaV2ForSequenceClassification).eval()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if fast:
            accelerate(model, shortest=0)
        inputs = texts()
        rows = [
            {"labels": i % 2} | {name: value[i % 2] for name, value in inputs.items()}
            for i in range(4)
        ]
        arguments = TrainingArguments(
            output_dir=str(tmp_path / str(fast)),
            max_steps=3,
            per_device_train_batch_size=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            logging_strategy="no",
            seed=0,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        losses.append(trainer.train().training_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_stored_models_load_where_posenc_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = deberta(), texts()
    expected = model(**inputs).last_hidden_state
    accelerate(model, shortest=0)
    model.save_pretrained(tmp_path / "folder")
    torch.save(model, tmp_path / "model.pt")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 2
    assert not [path.name for path in files if b"posenc" in path.read_bytes()]
    for name in [name for name in sys.modules if name.partition(".")[0] == "posenc"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        importlib.import_module("posenc.transformers")
    stored = (
        DebertaV2Model.from_pretrained(tmp_path / "folder"),
        torch.load(tmp_path / "model.pt", weights_only=False),
    )
    for loaded in stored:
        assert "posenc" not in type(loaded.encoder).__module__
        torch.testing.assert_close(loaded.eval()(**inputs).last_hidden_state, expected)


def test_sentence_encoders() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    inner = deberta()

    class Tokens(nn.Module):
        """The first module of a sentence encoder, without a tokenizer."""

        def __init__(self) -> None:
            super().__init__()
            self.auto_model = inner

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return features | {"token_embeddings": self.auto_model(**features).last_hidden_state}

    from sentence_transformers.sentence_transformer.modules import Pooling

    model = sentence_transformers.SentenceTransformer(modules=[Tokens(), Pooling(24)], device="cpu")
    expected = model(texts())["sentence_embedding"]
    report = accelerate(model, shortest=0)
    assert report.accelerated == 3
    found = model(texts())["sentence_embedding"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    restore(model)
    assert torch.equal(model(texts())["sentence_embedding"], expected)


def test_every_model_of_the_attention_interface_can_name_posenc() -> None:
    register()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    rows = texts()["attention_mask"].bool().unsqueeze(-1)
    expected = model(**texts()).logits.where(rows, 0.0)
    generated = model.generate(**texts(), max_new_tokens=6, do_sample=False, pad_token_id=0)
    model.set_attn_implementation("posenc")
    torch.testing.assert_close(
        model(**texts()).logits.where(rows, 0.0), expected, rtol=1e-4, atol=1e-5
    )
    again = model.generate(**texts(), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(again, generated)
    packed = {
        "input_ids": texts()["input_ids"][:1],
        "position_ids": torch.cat([torch.arange(9), torch.arange(14)]).unsqueeze(0),
    }
    found = model(**packed).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, model(**packed).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["mpnet-model", "t5-eager", "t5-sdpa", "umt5-eager"])
def test_packed_texts(key: str) -> None:
    """Masks of all pairs, under which two texts in one row do not see each other."""
    case = CASES[key]
    model = case.model()
    same = torch.arange(23).lt(9)
    same = same == same.unsqueeze(1)
    added = torch.zeros(1, 1, 23, 23).masked_fill(~same, torch.finfo(torch.float32).min)
    inputs = {"input_ids": texts()["input_ids"][:1], "attention_mask": added}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    expected = model(**inputs)[0]
    accelerate(model, shortest=0)
    torch.testing.assert_close(model(**inputs)[0], expected, rtol=1e-4, atol=1e-5)
    # As numbers, which eager attention of transformers adds, they would mask nothing.
    found = model(**inputs | {"attention_mask": same.expand(1, 1, 23, 23)})[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_models_without_a_bias_are_left_alone() -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=32, num_hidden_layers=1))
    report = accelerate(model)
    assert report.accelerated == 0
    assert "PyTorch's kernel is as fast" in str(report)
    assert changed(model) == 0


def test_unknown_models_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"DeBERTa-v2 and v3.*T5.*Linear"):
        accelerate(nn.Linear(2, 2))
    xlm = XLMModel(XLMConfig(vocab_size=9, emb_dim=8, n_layers=1, n_heads=2))
    with pytest.raises(ArgumentError, match="XLMModel"):
        accelerate(xlm)
    with pytest.raises(UnknownNameError, match="nativ"):
        accelerate(deberta(), backend="nativ")


def test_a_model_whose_own_outputs_are_not_numbers_is_not_compared() -> None:
    model = deberta()
    with torch.no_grad():
        next(model.parameters()).fill_(float("inf"))
    with pytest.raises(ArgumentError, match="not finite"):
        accelerate(model)
    assert changed(model) == 0


def test_a_model_that_was_wrapped_since_is_not_restored() -> None:
    model = deberta()
    accelerate(model, shortest=0)
    module = next(m for m in model.modules() if isinstance(m, Accelerated))
    module.__class__ = type("Sharded", (type(module),), {})
    with pytest.raises(ArgumentError, match="Sharded"):
        restore(model)


def test_masks_are_read_back() -> None:
    attended = texts()["attention_mask"].bool()
    pairs = attended[:, None, None, :].expand(2, 1, 23, 23)
    assert torch.equal(attended_keys(pairs), attended)
    added = torch.zeros(2, 1, 23, 23).masked_fill(~pairs, torch.finfo(torch.float32).min)
    assert torch.equal(attended_keys(added), attended)
    assert attended_keys(torch.ones(2, 1, 23, 23, dtype=torch.bool)) is None
    causal = torch.ones(23, 23, dtype=torch.bool).tril().expand(2, 1, 23, 23)
    assert attended_keys(causal) is causal
    graded = torch.zeros(1, 1, 3, 3) - torch.arange(3.0)
    assert attended_keys(graded) is graded
