"""Methods that move positions, in the attention of transformers' models."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from posenc import Grid, Layout
from posenc.errors import ArgumentError
from posenc.transformers import restore, stretch
from posenc.transformers.acceleration import accelerate
from tests.support.caches import cache_of, given
from tests.transformers.stretching.cases import (
    FREE,
    decoded,
    model_of,
    near,
    outputs,
    padded,
    placed,
    texts,
)

METHODS: dict[str, dict[str, Any]] = {
    "rerope": {"length": 16, "window": 6},
    "self_extend": {"length": 16, "factor": 4},
    "leaky_rerope": {"length": 16, "factor": 4},
    "dual_chunk": {"length": 16},
    "string": {"length": 32, "factor": 1.5},
    "yarn+log_n": {"length": 16, "factor": 4, "alpha": 0.1, "beta": 1},
    "log_n": {"length": 16},
    "drope": {},
}

KINDS = ("gemma3_text", "gpt_oss", "smollm3", "llama4_text", "deepseek_v3", "gptj", "glm4")
KINDS += ("gemma2",)
"""Windows with a θ of their own, sinks, layers without positions, chunks and a norm after the
rotation, latent attention, a rotation inside attention, adjacent pairs in a part, soft caps."""


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_gives_what_one_pass_gives(method: str) -> None:
    model = model_of("llama")
    before = outputs(model)
    stretch(model, method, **METHODS[method])
    whole = outputs(model)
    assert not near(before, whole)
    assert near(whole, decoded(model))


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models(kind: str) -> None:
    model = model_of(kind)
    expected = outputs(model)
    stretch(model, "rerope", **FREE)
    assert near(expected, outputs(model))
    restore(model)
    stretch(model, "rerope", length=16, window=6, windows=True)
    whole = outputs(model)
    assert not near(expected, whole)
    assert near(whole, decoded(model))
    restore(model)
    assert torch.equal(expected, outputs(model))


def test_rerope_is_its_formula() -> None:
    model = model_of("llama", num_hidden_layers=1, num_key_value_heads=4)
    stretch(model, "rerope", length=16, window=6)
    attention = model.model.layers[0].self_attn
    hidden = torch.randn(1, 20, 64)
    seen: dict[str, Any] = {}
    hook = attention.register_forward_hook(
        lambda module, args, kwargs, out: seen.update(kwargs, out=out[0]), with_kwargs=True
    )
    with torch.no_grad():
        model.model(inputs_embeds=hidden, use_cache=False)
        hook.remove()
        x = seen["hidden_states"]
        q, k, v = (
            f(x).view(20, 4, 16).transpose(0, 1)
            for f in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        theta = model.model.rotary_emb.inv_freq
        logits = torch.full((4, 20, 20), -torch.inf)
        for i in range(20):
            for j in range(i + 1):
                angles = min(i - j, 6) * theta
                a, b = q[:, i].chunk(2, -1)
                a, b = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
                logits[:, i, j] = (torch.cat([a, b], -1) * k[:, j]).sum(-1) / 4
        expected = attention.o_proj((logits.softmax(-1) @ v).transpose(0, 1).reshape(20, 64))
    assert near(expected, seen["out"][0])


def case_holes(model: Any) -> Any:
    ids, attended = texts(), torch.ones_like(texts())
    attended[0, :5], attended[0, 20:25], attended[1, 33:] = 0, 0, 1
    options = placed(attended)
    begun = {name: x[:, :25] for name, x in options.items()}
    held = given(model, cache_of(model(ids[:, :25], **begun, use_cache=True)))
    places = options["position_ids"][:, 25:]
    return model(ids[:, 25:], attention_mask=attended, position_ids=places, **held).logits


def case_jump(model: Any) -> Any:
    ids, places = texts(), torch.arange(40).repeat(2, 1)
    places[:, 20:] += 100
    first = model(ids[:, :20], position_ids=places[:, :20], use_cache=True)
    held = given(model, cache_of(first))
    return model(ids[:, 20:], position_ids=places[:, 20:], **held).logits


def case_cropped(model: Any) -> Any:
    ids, cache = texts(), DynamicCache(config=model.config)
    if any(cache.is_sliding):
        return torch.ones(1)
    model(ids[:, :30], **given(model, cache))
    cache.crop(-5)
    return model(ids[:, 25:28], **given(model, cache)).logits


def case_static(model: Any) -> Any:
    ids, cache = texts(), StaticCache(config=model.config, max_cache_len=64)
    for _ in range(2):
        cache.reset()
        for begin, end in ((0, 13), (13, 20), (20, 21)):
            output = model(ids[:, begin:end], **given(model, cache))
    return output.logits


def case_growing(model: Any) -> Any:
    ids, cache = texts(), DynamicCache()
    model(ids[:, :20], **given(model, cache))
    return model(ids[:, 20:22], **given(model, cache)).logits


def case_copied(model: Any) -> Any:
    ids, cache = texts(), DynamicCache(config=model.config)
    model(ids[:, :20], **given(model, cache))
    other = copy.deepcopy(cache)
    model(ids[:, 20:25], **given(model, cache))
    return model(ids[:, 25:30], **given(model, other)).logits


def case_packed(model: Any) -> Any:
    places = torch.cat([torch.arange(15), torch.arange(25)]).repeat(2, 1)
    return model(texts(), position_ids=places, use_cache=False).logits


def case_mask_of_pairs(model: Any) -> Any:
    mask = torch.zeros(2, 1, 40, 40).masked_fill(~torch.ones(40, 40).tril().bool(), -1e30)
    mask[..., 3] = -1e30
    mask[..., 3, 3] = 0
    return model(texts(), attention_mask=mask, use_cache=False).logits


def case_embedded(model: Any) -> Any:
    return model(inputs_embeds=model.get_input_embeddings()(texts()), use_cache=False).logits


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_positions_follow_whatever_happens_to_a_cache(kind: str) -> None:
    cases = [case for name, case in globals().items() if name.startswith("case_")]
    model = model_of(kind)
    with torch.no_grad():
        expected = [case(model) for case in cases]
        stretch(model, "rerope", **FREE)
        for case, logits in zip(cases, expected, strict=True):
            assert near(logits, case(model)), case


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_generation_is_the_same_however_it_is_done(kind: str) -> None:
    model = model_of(kind)
    left = {"inputs": texts(), "attention_mask": padded()["attention_mask"]}
    ways: list[dict[str, Any]] = [
        left,
        left | {"cache_implementation": "static"},
        left | {"num_beams": 3, "num_return_sequences": 2},
        {"inputs": texts()[:1], "prompt_lookup_num_tokens": 3},
    ]

    def tokens() -> list[Any]:
        common = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
        return [model.generate(**way, generation_config=common) for way in ways]

    expected = tokens()
    stretch(model, "rerope", **FREE)
    assert all(map(torch.equal, expected, tokens()))


def test_rows_do_not_depend_on_padding() -> None:
    model = model_of("llama")
    stretch(model, "rerope+log_n", length=16, window=6)
    whole = outputs(model, **padded())
    assert near(outputs(model, input_ids=texts()[:1, 9:]), whole[:1, 9:])


@pytest.mark.parametrize("kind", ["llama4_text", "gemma3_text"])
def test_chunks_and_windows_of_padded_rows(kind: str) -> None:
    """A query sees the tokens that it saw before, though positions are no indices."""
    model = model_of(kind)
    attended = padded()["attention_mask"].bool()
    expected = outputs(model, **padded())[attended]
    stretch(model, "rerope", **FREE)
    assert near(expected, outputs(model, **padded())[attended])


def test_an_assistant_drafts_tokens() -> None:
    model, assistant = model_of("llama"), model_of("llama", num_hidden_layers=1)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    stretch(model, "rerope", length=16, window=6)
    expected = model.generate(texts()[:1], **options)
    assert torch.equal(expected, model.generate(texts()[:1], assistant_model=assistant, **options))


@pytest.mark.parametrize(
    ("method", "options"), [("rerope", {"length": 16, "window": 6}), ("yarn", {"factor": 4.0})]
)
def test_copies_and_pickles_are_stretched_and_restored(
    method: str, options: dict[str, Any]
) -> None:
    model = model_of("llama")
    before = outputs(model)
    stretch(model, method, **options)
    expected = outputs(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(expected, outputs(other))
        assert near(expected, decoded(other))
        restore(other)
        assert torch.equal(before, outputs(other))
    assert near(expected, decoded(model))


@pytest.mark.parametrize("accelerated_first", [True, False])
def test_acceleration_before_and_after(accelerated_first: bool) -> None:
    model, other = model_of("llama"), model_of("llama")
    arguments: dict[str, Any] = {"length": 16, "window": 6}
    stretch(other, "rerope", **arguments)
    if accelerated_first:
        accelerate(model)
        stretch(model, "rerope", **arguments)
    else:
        stretch(model, "rerope", **arguments)
        assert "2 × LlamaAttention: posenc, stretched, at all lengths." in str(accelerate(model))
    assert near(outputs(other), outputs(model))
    assert near(outputs(other), decoded(model))
    restore(model)
    assert model.config._attn_implementation == model_of("llama").config._attn_implementation
    assert torch.equal(outputs(model_of("llama")), outputs(model))
    assert not model._forward_pre_hooks


def test_caches_of_another_state_of_the_model_are_refused() -> None:
    model = model_of("llama")
    with torch.no_grad():
        rotated = cache_of(model(texts()[:, :20], use_cache=True))
        stretch(model, "rerope", length=16)
        with pytest.raises(ArgumentError, match="cache: "):
            model(texts()[:, 20:], **given(model, rotated))
        plain = cache_of(model(texts()[:, :20], use_cache=True))
        cut = copy.deepcopy(plain)
        for layer in cut.layers:
            type(layer).crop(layer, -5)  # without the positions
        with pytest.raises(ArgumentError, match="cache: "):
            model(texts()[:, 20:], **given(model, cut))
        restore(model)
        with pytest.raises(ArgumentError, match="restored since"):
            model(texts()[:, 20:], **given(model, plain))


def test_a_norm_after_the_rotation_takes_the_gain_away_here_too() -> None:
    model, arguments = model_of("llama4_text"), {"factor": 4.0, "length": 64, "windows": True}
    assert stretch(model, "yarn", **arguments).place == "frequencies"
    expected = outputs(model)
    restore(model)
    assert stretch(model, "yarn+log_n", **arguments).place == "attention"  # log_n begins at 64
    assert near(expected, outputs(model))


def test_positions_of_images_are_refused() -> None:
    model = model_of("qwen2_vl_text")
    stretch(model, "rerope", length=16, window=6)
    places = torch.arange(40).expand(3, 2, 40)
    expected = outputs(model)
    assert near(expected, outputs(model, position_ids=places))
    places = places.clone()
    places[1] += 1
    with pytest.raises(ArgumentError, match="those of images"):
        outputs(model, position_ids=places)


def test_another_implementation_is_refused() -> None:
    model = model_of("llama")
    stretch(model, "rerope", length=16)
    model.set_attn_implementation("eager")
    with pytest.raises(ArgumentError, match="attn_implementation"):
        outputs(model)


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        ("falcon", "not on the interface"),
        ("hunyuan_v1_dense", "weighted norm"),
        ("deepseek_v32", "indices"),
        ("deepseek_v4", "other outputs"),
    ],
)
def test_refusals_name_the_reason_and_change_nothing(kind: str, got: str) -> None:
    model = model_of(kind)
    expected, names = outputs(model), {name: set(vars(m)) for name, m in model.named_modules()}
    with pytest.raises(ArgumentError, match=got):
        stretch(model, "rerope", length=16)
    assert torch.equal(expected, outputs(model))
    assert {name: set(vars(m)) for name, m in model.named_modules()} == names


def test_methods_of_causal_attention_are_refused_in_encoders() -> None:
    model = model_of("eurobert")
    with pytest.raises(ArgumentError, match="both directions"):
        stretch(model, "dual_chunk", length=16)
    stretch(model, "self_extend", length=16, factor=4)
    assert outputs(model).isfinite().all()


def test_the_report_tells_each_layer() -> None:
    report = stretch(model_of("smollm3"), "rerope", length=16, window=6)
    assert [part.stretched for part in report.parts] == [True, False]
    assert "rotates nothing" in report.parts[1].encoding
    assert "Rerope(window=6)" in str(report)
    report = stretch(model_of("gpt_oss"), "rerope", length=16, window=6)
    assert [part.encoding for part in report.parts if not part.stretched] == ["it sees a window"]


def test_weights_are_those_of_the_definition() -> None:
    model = model_of("llama", num_hidden_layers=1)
    stretch(model, "rerope", length=16, window=6)
    with torch.no_grad():
        output = model(texts(), output_attentions=True)
    assert near(output.logits, outputs(model))
    (weights,) = output.attentions
    grid = Grid.of(Layout.sequence(40), causal=True)
    assert not weights[:, :, ~grid.visible[0, 0]].any()
    assert torch.allclose(weights.sum(-1), torch.ones(1))
