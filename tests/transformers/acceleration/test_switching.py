"""Models on transformers' attention interface: switched, restored, and with caches."""

from __future__ import annotations

import pickle
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache, QuantizedLayer

from posenc.errors import ArgumentError, BackendRefusal
from posenc.transformers.acceleration import accelerate, interface, restore
from posenc.transformers.acceleration.accelerated import SHORTEST, settings_of, with_posenc
from posenc.transformers.acceleration.routing import recorded
from tests.support.caches import given
from tests.support.versions import fault_before
from tests.testing.tiny_models import LENGTH, WINDOW, inputs_of, tiny_config
from tests.testing.transformers_sweep import EQUAL, REFUSED, outcome
from tests.transformers.acceleration.case import Case

WINDOWED = ("gemma3_text", "gpt_oss", "gemma2", "llama4_text", "mistral")
UNMASKED_CHUNKS = fault_before("transformers", "5.20", "static caches pass chunks an unknown mask")
KINDS = (
    *("bart", "bert", "cohere2", "deepseek_v3", "distilbert", "doge", "embedding_gemma2"),
    *("gpt2", "lfm2", "llama", "modernbert", "olmo3", "opt", "phi3", "smollm3", "starcoder2"),
    *("t5", "t5gemma2", "vit", "whisper", *WINDOWED),
)
PATTERNS: set[str] = set()
assert 2 * WINDOW < LENGTH, "the windows of the models hide most of the keys"


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_model_types_equal_their_own_attention(kind: str) -> None:
    """Whole, padded, decoding, and gradients; all types: ``make sweep-transformers``."""
    result, reason = outcome(kind, PATTERNS)
    assert result == EQUAL, reason


def test_options_of_unknown_meaning_are_refused() -> None:
    assert outcome("deepseek_v32", PATTERNS)[0] == REFUSED


def causal(kind: str) -> transformers.PreTrainedModel:
    """A causal LM with weights away from zero."""
    options = {"attn_implementation": "eager"}
    return Case(
        lambda: transformers.AutoModelForCausalLM.from_config(tiny_config(kind), **options)
    ).model()


def served(model: nn.Module) -> nn.Module:
    """The model, its attention computed by posenc at all lengths."""
    accelerate(model, check=False, shortest=0)
    return model


@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss"])
def test_restored_models_are_what_they_were(kind: str, tmp_path: Path) -> None:
    def implementations(model: nn.Module) -> list[str]:
        parts = [m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
        return [part.config._attn_implementation for part in parts]

    own = "sdpa" if kind == "gemma3" else "eager"
    model = transformers.AutoModel.from_config(tiny_config(kind), attn_implementation=own).eval()
    before = implementations(model)
    saved, state = model.config.to_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    expected = model(**inputs_of(model))[0]
    report = accelerate(model)
    assert report.difference < 1e-5
    assert report.accelerated > 0
    assert "a window from -6 to 0" in str(report)
    assert model.config.to_dict() == saved
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    model.save_pretrained(tmp_path)
    assert "posenc" not in (tmp_path / "config.json").read_text()
    copies = [deepcopy(model), pickle.loads(pickle.dumps(model))]
    for x in (model, *copies):
        torch.testing.assert_close(x(**inputs_of(x))[0], expected, rtol=1e-4, atol=1e-5)
        accelerate(x)  # changes nothing
        restore(x)
        assert implementations(x) == before
        assert torch.equal(x(**inputs_of(x))[0], expected)


def test_the_class_of_a_view_makes_configs() -> None:
    """As transformers makes one of defaults, to print a config."""
    config = causal("mistral").config
    assert type(type(with_posenc(config))()) is type(config)


def test_settings_follow_copies_and_hold_in_graphs() -> None:
    model = causal("gemma2")
    accelerate(model, backend="sdpa", check=False, shortest=LENGTH)  # which has no soft cap
    for x in (model, deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(BackendRefusal, match="sdpa"):
            x(**inputs_of(model))
        assert x(inputs_of(model)["input_ids"][:, : LENGTH - 1]).logits.isfinite().all()
    module = model.get_submodule("model.layers.0.self_attn")
    shortest = torch.compile(
        lambda x: x + settings_of(module).shortest, backend="eager", fullgraph=True
    )
    assert int(shortest(torch.tensor(0))) == LENGTH


def test_another_implementation_may_follow_and_precede() -> None:
    model = causal("mistral")
    first = accelerate(model)
    assert "accelerated before" in str(accelerate(model, backend="reference"))
    model.set_attn_implementation("sdpa")
    assert accelerate(model).accelerated == first.accelerated == 2
    assert model.config._attn_implementation == "posenc"
    model.set_attn_implementation("eager")
    restore(model)
    assert model.config._attn_implementation == "eager"


@torch.no_grad()
@pytest.mark.parametrize("keys", [SHORTEST - 1, SHORTEST])
def test_the_name_alone_serves_from_as_many_keys_as_accelerate(keys: int) -> None:
    model: Any = causal("mistral")
    model.config.max_position_embeddings = keys
    ids, found = torch.randint(3, 100, (1, keys)), []
    for change in (lambda: model.set_attn_implementation("posenc"), lambda: accelerate(model)):
        model.set_attn_implementation("sdpa")
        change()
        with recorded() as calls:
            model(ids)
        found.append([(by, reason) for _, by, reason in calls])
    assert found[0] == found[1]
    assert {by for by, _ in found[0]} == {"posenc" if keys == SHORTEST else "its own"}


def test_a_model_with_other_outputs_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal("mistral")
    real = interface.attend
    monkeypatch.setattr(interface, "attend", lambda *x, **options: 2 * real(*x, **options))
    with pytest.raises(ArgumentError, match="within"):
        accelerate(model)
    assert model.config._attn_implementation == "eager"


def test_the_report_says_what_is_gained_where() -> None:
    report = str(accelerate(causal("llama")))
    assert "posenc, causal, from 256 keys on" in report
    assert "2 of 2" in report
    report = str(accelerate(causal("gpt_oss")))
    assert "posenc, a window from -6 to 0 with sinks, from 256 keys on" in report
    assert "a mask of all pairs" in str(accelerate(causal("doge")))


def decoded(model: Any, mask: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """Greedy tokens and their logits, after prompts of which some are padded on the left."""
    ids = torch.randint(3, 100, (2, 23), generator=torch.Generator().manual_seed(0))
    options["attention_mask"] = torch.ones_like(ids) if mask is None else mask
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    told = {"output_logits": True, "return_dict_in_generate": True, "disable_compile": True}
    found = model.generate(ids, **greedy, **told, **options)
    return found.sequences, torch.stack(found.logits)


LEFT = torch.ones(2, 23, dtype=torch.long)
LEFT[1, :9] = 0


@pytest.mark.parametrize("padding", [None, LEFT], ids=["whole", "left"])
@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        *((kind, None) for kind in WINDOWED),
        *((kind, "static") for kind in WINDOWED if kind != "llama4_text"),
        pytest.param("llama4_text", "static", marks=UNMASKED_CHUNKS),
    ],
)
def test_caches(kind: str, cache: str | None, padding: Tensor | None) -> None:
    """Dynamic, sliding and static ones: those of windowed layers keep the window alone."""
    model = causal(kind)
    tokens, logits = decoded(model, padding, cache_implementation=cache)
    found, got = decoded(served(model), padding, cache_implementation=cache)
    torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(found, tokens)


class Rounded(QuantizedLayer):
    """A cache in 8 bits, without the packages that do it better."""

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, tensor: Any) -> Tensor:
        numbers, scale = tensor
        return numbers * scale


@pytest.mark.parametrize("kind", ["gpt_oss", "llama"])
def test_quantised_caches(kind: str) -> None:
    model = causal(kind)

    def cache() -> Cache:
        layers = model.config.num_hidden_layers
        return Cache(layers=[Rounded(residual_length=8) for _ in range(layers)])

    tokens, logits = decoded(model, LEFT, **given(model, cache()))
    found, got = decoded(served(model), LEFT, **given(model, cache()))
    torch.testing.assert_close(got, logits, rtol=1e-3, atol=1e-3)
    assert torch.equal(found, tokens)


@torch.no_grad()
def test_decoding_slides_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with windows are left to PyTorch's kernel while they decode; those with sinks not."""
    model: Any = served(causal("mistral"))
    ids, cache = torch.randint(3, 100, (1, 30)), transformers.DynamicCache(config=model.config)
    model(ids, **given(model, cache))
    with recorded() as calls:
        model(ids[:, :1], **given(model, cache))
    assert {by for _, by, _ in calls} == {"its own"}


@pytest.mark.parametrize("kind", WINDOWED)
def test_packed_positions(kind: str) -> None:
    """Documents that ``position_ids`` pack into a row."""
    model: Any = causal(kind).model
    ids = inputs_of(model)["input_ids"]
    places = torch.cat([torch.arange(11), torch.arange(LENGTH - 11)])[None].expand(2, -1)
    expected = model(ids, position_ids=places, use_cache=False).last_hidden_state
    served(model)
    with recorded() as calls:
        packed = model(ids, position_ids=places, use_cache=False).last_hidden_state
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)
    assert "a mask of all pairs" not in {reason for _, _, reason in calls}


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(11, 18), (29,)])
def test_rows_with_the_boundaries_of_flash_attention(lengths: tuple[int, ...]) -> None:
    model: Any = causal("mistral")
    ids = inputs_of(model)["input_ids"][0].split(lengths)
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": part.tolist()} for part in ids])
    expected = model(**batch, use_cache=False)
    found = served(model)(**batch, use_cache=False)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.loss, expected.loss)
    del batch["position_ids"]
    if len(lengths) > 1:
        with pytest.raises(ArgumentError, match=r"cu_seq_lens_.*position_ids"):
            model(**batch, use_cache=False)


@pytest.mark.parametrize("kind", WINDOWED)
@torch.no_grad()
def test_holes_in_the_padding(kind: str) -> None:
    model = causal(kind)
    inputs = inputs_of(model, padding="left")
    inputs["attention_mask"][0, 12:15] = 0
    real = inputs["attention_mask"].bool()
    expected = model(**inputs).logits[real]
    torch.testing.assert_close(served(model)(**inputs).logits[real], expected, rtol=1e-4, atol=1e-4)


def test_masks_and_weights_of_users() -> None:
    model = causal("mistral")
    inputs = inputs_of(model)
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril().triu(-3)
    masked = inputs | {"attention_mask": mask}
    additive = masked | {"attention_mask": torch.zeros(mask.shape).masked_fill(~mask, -1e30)}
    expected = model(**additive).logits
    weights = model(**inputs, output_attentions=True).attentions
    served(model)
    for shown in (masked, additive):
        torch.testing.assert_close(model(**shown).logits, expected, rtol=1e-4, atol=1e-4)
    found = model(**inputs, output_attentions=True).attentions
    for mine, theirs in zip(found, weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2", "modernbert"])
def test_gradient_checkpointing_and_half_precision(kind: str) -> None:
    model = transformers.AutoModel.from_config(
        tiny_config(kind), attn_implementation="eager"
    ).train()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(**inputs_of(model)).last_hidden_state.float().sin().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    options: Any = {"use_reentrant": False}
    expected = gradients()
    served(model)
    model.gradient_checkpointing_enable(options)
    for mine, theirs in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))
    half = deepcopy(model).to(torch.bfloat16).eval()
    restore(model.eval())
    found = served(half)(**inputs_of(half)).last_hidden_state.float()
    exact = model(**inputs_of(model)).last_hidden_state
    torch.testing.assert_close(found, exact, rtol=0.2, atol=0.2)


@torch.no_grad()
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_masks_of_windows_that_show_nothing(padding: str | None) -> None:
    """Qwen2-MoE makes one of 0 keys for its config without windows, and no layer reads it."""
    config = tiny_config("qwen2_moe")
    config.sliding_window, config.layer_types = 0, ["full_attention"] * config.num_hidden_layers
    model = transformers.AutoModel.from_config(config).eval()
    inputs = inputs_of(model, padding=padding)
    expected = model(**inputs)[0]
    accelerate(model, shortest=0)
    assert model.config._attn_implementation == "posenc"
    shown = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    torch.testing.assert_close(model(**inputs)[0][shown], expected[shown], rtol=0, atol=2e-5)
