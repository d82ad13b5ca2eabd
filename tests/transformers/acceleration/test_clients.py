"""Accelerated models in the hands of PEFT, Trainer, other libraries and the compiler."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.executorch import register_dynamic_cache_export_support

from posenc.errors import ArgumentError, UnknownNameError
from posenc.transformers.acceleration import accelerate, restore
from posenc.transformers.acceleration.accelerated import Accelerated
from tests.support.caches import given
from tests.support.tiny_models import build, tiny_model, word_tokenizer
from tests.transformers.acceleration.case import VOCABULARY, texts
from tests.transformers.acceleration.cases import CASES
from tests.transformers.acceleration.cases.texts import DEBERTA_V2, MPNET, T5
from tests.transformers.acceleration.test_laws import put_under
from tests.transformers.acceleration.test_switching import causal


def t5(**options: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return build("T5ForConditionalGeneration", T5, decoder_start_token_id=0, **options).eval()


def deberta(kind: str = "DebertaV2Model", **options: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return build(kind, DEBERTA_V2, **options).eval()


def near(found: Any, expected: Any) -> None:
    found, expected = map(torch.as_tensor, (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def changed(model: nn.Module) -> int:
    return sum(isinstance(module, Accelerated) for module in model.modules())


@pytest.mark.parametrize("first", ["accelerate", "peft"])
@pytest.mark.parametrize(
    ("kind", "targets"),
    [("deberta", ["query_proj", "key_proj"]), ("mistral", ["q_proj", "v_proj"])],
)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_train(kind: str, targets: list[str], first: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=targets, init_lora_weights=False)

    def made() -> transformers.PreTrainedModel:
        return deberta() if kind == "deberta" else causal(kind)

    def adapted(model: transformers.PreTrainedModel) -> nn.Module:
        torch.manual_seed(1)
        return peft.get_peft_model(model, config).eval()

    expected, model = adapted(made()), made()
    steps = (adapted, lambda x: put_under(x) and x)
    for step in steps if first == "peft" else reversed(steps):
        model = step(model)
    assert changed(model) == (3 if kind == "deberta" else 0)
    seen = texts()["attention_mask"].bool()
    outputs = [wrapped(**texts())[0][seen] for wrapped in (model, expected)]
    near(*outputs)
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
    near(found, expected)
    found.square().sum().backward()
    embeddings = [x for name, x in model.named_parameters() if "rel_embeddings" in name]
    assert all(parameter.grad is not None for parameter in embeddings)


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
        near(program(**inputs)[0], encoder(**inputs)[0])


@torch.no_grad()
def test_exported_programs_take_any_batch() -> None:
    model = deberta(num_hidden_layers=1)
    accelerate(model, check=False)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("tokens", max=40)}
    shapes = dict.fromkeys(inputs := texts(), sizes)
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes).module()
    for rows, length in ((1, 31), (4, 9)):
        inputs = {name: x[:1].repeat(rows, 1) for name, x in texts(length).items()}
        near(program(**inputs)[0], model(**inputs)[0])


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

    caches = [transformers.DynamicCache() for _ in range(2)]
    expected = model(ids).logits[:, -1:]
    accelerate(model, shortest=0, check=True)
    for cache in caches:
        for part in (ids[:, :-2], ids[:, -2:-1]):
            model(part, **given(model, cache))
    program = torch.export.export(Step(), (ids[:, -1:], caches[0])).module()
    near(program(ids[:, -1:], caches[1]), expected)


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
    near(found, expected)


@pytest.mark.parametrize("kind", ["deberta", "gemma2"])
@pytest.mark.filterwarnings("ignore")
def test_trainer_trains(kind: str, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    losses = []
    for change in (lambda model: None, put_under):
        torch.manual_seed(0)
        if kind == "deberta":
            model, inputs = deberta("DebertaV2ForSequenceClassification"), texts()
            rows = [
                {"labels": i % 2} | {name: value[i % 2] for name, value in inputs.items()}
                for i in range(4)
            ]
        else:
            model = causal(kind)
            rows = [{"input_ids": x, "labels": x} for x in torch.randint(3, 100, (4, 20))]
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        change(model)
        quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
        quiet |= {"save_strategy": "no", "use_cpu": True, "seed": 0}
        steps = {"max_steps": 3, "per_device_train_batch_size": 2}
        arguments = TrainingArguments(str(tmp_path), **steps, **quiet)
        losses.append(Trainer(model, arguments, train_dataset=rows).train().training_loss)
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
        transformers.DebertaV2Model.from_pretrained(tmp_path / "folder"),
        torch.load(tmp_path / "model.pt", weights_only=False),
    )
    for loaded in stored:
        assert "posenc" not in type(loaded.encoder).__module__
        torch.testing.assert_close(loaded.eval()(**inputs).last_hidden_state, expected)


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
    near(model(**inputs)[0], expected)
    # As numbers, which eager attention of transformers adds, they would mask nothing.
    found = model(**inputs | {"attention_mask": same.expand(1, 1, 23, 23)})[0]
    near(found, expected)


def test_unknown_models_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"DeBERTa-v2 and v3.*T5.*Linear"):
        accelerate(nn.Linear(2, 2))
    xlm = transformers.XLMModel(
        transformers.XLMConfig(vocab_size=9, emb_dim=8, n_layers=1, n_heads=2)
    )
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


# With a tokenizer beside them

of_libraries = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

WORDS = ["a", "b", "c", "d"]
SENTENCES = ["a b c d a b c", "d c b", "a a a a a a a a a b"]
PAIRS = [("a b c", "d d d a b c a"), ("b", "c d")]


def stored(model: transformers.PreTrainedModel, folder: Path) -> str:
    """A folder with the model, and with a tokenizer of four words."""
    words = ["<s>", "<pad>", "</s>", "<unk>", *WORDS]
    unused = (f"unused{number}" for number in range(len(words), VOCABULARY))
    tokenizer = word_tokenizer([*words, *unused], "<unk>")
    named = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=32, **named
    )
    wrapped.save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def classifier(labels: int) -> transformers.PreTrainedModel:
    return deberta("DebertaV2ForSequenceClassification", num_labels=labels, pad_token_id=1)


@of_libraries
def test_sentence_encoders_of_mpnet(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    folder = stored(build("MPNetModel", MPNET), tmp_path)
    model = library.SentenceTransformer(folder, device="cpu")
    expected = model.encode(SENTENCES)
    assert accelerate(model, shortest=0).accelerated == 3
    near(model.encode(SENTENCES), expected)
    restore(model)
    assert (model.encode(SENTENCES) == expected).all()


@of_libraries
def test_cross_encoders_of_deberta(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    model = library.CrossEncoder(stored(classifier(1), tmp_path), device="cpu")
    others = [text for _, text in PAIRS]
    expected, ranked = model.predict(PAIRS), model.rank("a b c", others)
    assert accelerate(model, shortest=0).accelerated == 3
    near(model.predict(PAIRS), expected)
    found = model.rank("a b c", others)
    assert [row["corpus_id"] for row in found] == [row["corpus_id"] for row in ranked]
