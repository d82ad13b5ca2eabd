"""Methods that only divide frequencies, in the rotary modules of transformers."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from posenc.errors import ArgumentError, UnknownNameError
from posenc.transformers import restore, stretch
from posenc.transformers.acceleration import accelerate
from posenc.transformers.checkpoints import FIELD
from posenc.transformers.stretching.configs import _same
from posenc.transformers.stretching.frequencies import frequencies_in
from tests.support.exhaustive import kept_in_suite
from tests.support.tiny_models import tiny_model
from tests.transformers.stretching.cases import decoded, model_of, near, outputs, texts
from tests.transformers.stretching.sweep import check

TRAINED, FACTOR = 16, 4.0

OWN: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn"},
    "interpolate": {"rope_type": "linear"},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "dynamic_ntk": {"rope_type": "dynamic"},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": None},
}
"""Words of transformers for methods; ``factor`` and the trained length come to them."""


def own(model: Any, words: dict[str, Any]) -> Any:
    """The model as transformers stretches it."""
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = TRAINED
    config.rope_parameters = {
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": FACTOR,
        "original_max_position_embeddings": TRAINED,
        **words,
    }
    made = type(model)(config).eval()
    made.load_state_dict(model.state_dict())
    return made


@pytest.mark.parametrize("method", OWN)
def test_methods_of_transformers_are_its_own(method: str) -> None:
    model, words = model_of("llama"), dict(OWN[method])
    if method == "longrope":
        factors = [FACTOR ** (t / 7) for t in range(8)]
        words["long_factor"] = factors
    expected = outputs(own(model, words))
    report = stretch(model, method, factor=FACTOR, length=TRAINED)
    assert report.saved_as == "transformers"
    assert near(expected, outputs(model))
    varies = method in ("dynamic_ntk", "longrope")
    assert report.place == ("attention" if varies else "frequencies")


def test_small_changes_of_frequencies_are_made() -> None:
    model = model_of("llama")
    before = model.model.rotary_emb.inv_freq.clone()
    stretch(model, "interpolate", factor=1.004)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, before / 1.004)


TYPES = ("llama", "qwen3", "gemma3_text", "phi", "deepseek_v3", "glm4")


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *product(TYPES, ("yarn", "ntk", "ntk_by_parts")),
        # whose config takes factors alone, as LongRoPE has them
        *product(("phi3",), ("yarn", "interpolate", "llama3", "ntk")),
    ],
)
def test_a_saved_model_is_loaded_by_transformers_alone(
    kind: str, method: str, tmp_path: Path
) -> None:
    model = model_of(kind, **({"max_position_embeddings": TRAINED} if kind == "phi3" else {}))
    report = stretch(model, method, factor=FACTOR, length=None if kind == "phi3" else TRAINED)
    assert report.saved_as == "transformers"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.max_position_embeddings == TRAINED * FACTOR
    assert near(outputs(model), outputs(loaded))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", ["yarn", "interpolate", "llama3", "ntk"])
def test_a_model_in_half_precision_is_stretched_and_saved_as_any_other(
    method: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """New frequencies are exact, not those of rounded ones nor rounded themselves."""
    exact, half = (model_of("qwen3", max_position_embeddings=4096) for _ in range(2))
    before = copy.deepcopy(half.to(dtype))
    stretch(exact, method, factor=FACTOR)
    assert stretch(half, method, factor=FACTOR).saved_as == "transformers"
    assert torch.equal(exact.model.rotary_emb.inv_freq, half.model.rotary_emb.inv_freq)
    half.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.rope_parameters == exact.config.rope_parameters
    assert loaded.config.max_position_embeddings == 4096 * FACTOR
    restore(half)
    for kept, restored in zip(before.buffers(), half.buffers(), strict=True):
        assert kept.dtype == restored.dtype
        assert torch.equal(kept, restored)


@pytest.mark.parametrize("kind", ["llama", "gptj"])
def test_frequencies_and_tables_are_exact_in_half_precision(kind: str) -> None:
    """Those that were scaled already, and sines, rounded once."""
    words = {"llama": OWN["llama3"]}
    exact, half = (model_of(kind) for _ in range(2))
    if kind in words:
        exact, half = (own(model, words[kind]) for model in (exact, half))
    half.to(torch.bfloat16)
    for model in (exact, half):
        stretch(model, "interpolate", factor=2, of="frequencies")
    for table, found in zip(exact.buffers(), half.buffers(), strict=True):
        assert torch.equal(table.to(found), found)


def test_attention_caches_and_classes_stay() -> None:
    model = model_of("llama")
    before = {name: type(part) for name, part in model.named_modules()}
    implementation = model.config._attn_implementation
    stretch(model, "yarn", factor=FACTOR)
    assert {name: type(part) for name, part in model.named_modules()} == before
    assert model.config._attn_implementation == implementation
    assert not any(part._forward_hooks for part in model.modules())
    assert near(outputs(model), decoded(model))


def test_the_length_is_that_of_the_config_unless_given() -> None:
    one, other = (model_of("llama", max_position_embeddings=32) for _ in range(2))
    stretch(one, "yarn", factor=FACTOR)
    stretch(other, "yarn", factor=FACTOR, length=32)
    assert torch.equal(outputs(one), outputs(other))
    assert one.config.rope_parameters["original_max_position_embeddings"] == 32


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gptj", "deepseek_v3"])
def test_restoring_is_exact(kind: str) -> None:
    model = model_of(kind)
    expected, config = outputs(model), model.config.to_dict()
    names = {name: set(vars(part)) for name, part in model.named_modules()}
    report = stretch(model, "yarn", factor=FACTOR)
    assert not torch.equal(expected, outputs(model))
    assert len(restore(model).parts) == report.stretched
    assert torch.equal(expected, outputs(model))
    assert model.config.to_dict() == config
    assert {name: set(vars(part)) for name, part in model.named_modules()} == names
    assert restore(model).parts == ()


def test_restoring_follows_a_move() -> None:
    model = model_of("llama")
    expected = outputs(copy.deepcopy(model).double())
    stretch(model, "yarn", factor=FACTOR)
    restore(model.double())
    assert near(expected, outputs(model))


def test_frequencies_of_windows_are_left_alone_unless_asked() -> None:
    model = model_of("gemma3_text")
    rotary = model.model.rotary_emb
    window, full = (
        getattr(rotary, f"{kind}_attention_inv_freq").clone() for kind in ("sliding", "full")
    )
    report = stretch(model, "yarn", factor=FACTOR)
    assert [part.stretched for part in report.parts].count(False) == 1
    assert "its layers see a window" in str(report)
    assert torch.equal(rotary.sliding_attention_inv_freq, window)
    assert not torch.equal(rotary.full_attention_inv_freq, full)
    restore(model)
    stretch(model, "yarn", factor=FACTOR, windows=True)
    assert not torch.equal(rotary.sliding_attention_inv_freq, window)


@pytest.mark.parametrize("method", ["yarn", "ntk"])
def test_a_stretched_model_is_stretched_from_its_theta(method: str) -> None:
    """YaRN has a gain, which goes with it where the new method has none."""
    plain = model_of("llama", max_position_embeddings=TRAINED)
    model = own(plain, OWN["yarn"] | {"factor": 2.0})
    with pytest.raises(ArgumentError, match="of='theta'"):
        stretch(model, method, factor=FACTOR)
    assert stretch(model, method, factor=FACTOR, of="theta").place == "frequencies"
    stretch(plain, method, factor=FACTOR)
    assert near(outputs(plain), outputs(model))


def test_frequencies_that_change_with_the_length_are_refused_by_name() -> None:
    model = own(model_of("llama", max_position_embeddings=TRAINED), OWN["dynamic_ntk"])
    with pytest.raises(ArgumentError, match="'dynamic' in model"):
        stretch(model, "interpolate", factor=2)
    stretch(model, "interpolate", factor=FACTOR, of="theta")
    plain = model_of("llama", max_position_embeddings=TRAINED)
    stretch(plain, "interpolate", factor=FACTOR)
    assert near(outputs(plain), outputs(model))


def test_a_module_without_a_gain_is_served_by_attention() -> None:
    model = model_of("phimoe")
    expected = outputs(model)
    assert stretch(model, "yarn", factor=FACTOR, temperature=1.0).place == "frequencies"
    restore(model)
    assert stretch(model, "yarn", factor=FACTOR).place == "attention"
    restore(model)
    assert torch.equal(expected, outputs(model))


@pytest.mark.parametrize(
    ("kind", "options"), [("llama", {}), ("gemma3_text", {"windows": True, "of": "theta"})]
)
def test_what_transformers_cannot_say_is_said_in_a_field(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = model_of(kind)
    report = stretch(model, "rerope", length=TRAINED, window=6, **options)
    assert report.saved_as == "posenc"
    expected = outputs(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert getattr(loaded.config, FIELD)["method"] == "rerope"
    assert stretch(loaded).stretched == 2
    assert near(expected, outputs(loaded))
    restore(model)
    assert not hasattr(model.config, FIELD)


def test_words_with_another_gain_are_not_those_of_transformers() -> None:
    """Frequencies alone do not make a method what transformers' words say."""
    model = tiny_model("qwen3")
    (frequencies,) = frequencies_in(model)
    encoding = frequencies.encoding("frequencies")
    assert _same(frequencies.module, model.config, {frequencies: encoding})
    encoding.query_key.gain = 1.1
    assert not _same(frequencies.module, model.config, {frequencies: encoding})


@pytest.mark.parametrize("kind", ["xglm", "m2m_100"])
def test_tables_of_sines_that_are_added_rotate_nothing(kind: str) -> None:
    assert not list(frequencies_in(tiny_model(kind)))


def test_one_restore_undoes_acceleration_too() -> None:
    model = tiny_model("mpnet").eval()
    kinds = [type(part) for part in model.modules()]
    assert accelerate(model).accelerated
    stretch(model, "interpolate", factor=2)
    restore(model)
    assert [type(part) for part in model.modules()] == kinds
    assert model.config.max_position_embeddings == 256


def test_errors_name_what_is_wrong() -> None:
    model = model_of("llama")
    expected = outputs(model)
    with pytest.raises(ArgumentError, match="posenc_extension"):
        stretch(model)
    with pytest.raises(UnknownNameError, match="yarm"):
        stretch(model, "yarm", factor=2)
    with pytest.raises(ArgumentError, match="factor"):
        stretch(model, "yarn")
    with pytest.raises(ArgumentError, match="a model of transformers"):
        stretch(torch.nn.Linear(2, 2), "yarn", factor=2)
    for change in (accelerate, partial(stretch, method="yarn", factor=2)):
        with pytest.raises(ArgumentError, match=r"got str\b"):
            change("Qwen/Qwen3-0.6B")
    stretch(model, "yarn", factor=2)
    with pytest.raises(ArgumentError, match="restore"):
        stretch(model, "yarn", factor=2)
    restore(model)
    assert torch.equal(expected, outputs(model))
    assert texts().shape[1] > TRAINED  # longer than what was said to be trained


@pytest.mark.parametrize("kind", ["granite_swa", "granitemoe_swa"])
def test_bases_of_layers_follow(kind: str, tmp_path: Path) -> None:
    """Their layers look rotations up by ``layer_rope_theta``; 0 is that of layers without one."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    types = {"layer_types": ["full_attention"] * 2, "layer_rope_theta": [0, 10000.0]}
    config = transformers.CONFIG_MAPPING[kind](
        max_position_embeddings=TRAINED, **sizes, **heads, **types
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(2 * TRAINED).unsqueeze(0) % 64
    with torch.no_grad():
        before = model(ids).logits
        stretch(model, "ntk", factor=4, length=TRAINED)
        found = model(ids).logits
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.allclose(loaded(ids).logits, found, atol=1e-5)
        assert not torch.allclose(before, found, atol=1e-4)
        restore(model)
        assert torch.equal(model(ids).logits, before)
    assert config.layer_rope_theta == [0, 10000.0]


# A share of the sweep over all types

KEPT = (
    *("diffllama", "gemma3n_text", "gpt_neox", "minicpm3", "modernbert", "phi3", "qwen2_vl_text"),
    "qwen3_next",
)
"""With two softmaxes, norms without scale, a rotated part, latent attention, both sides, factors by
length, three axes, and layers without attention."""

OTHERS = (
    *("apertus", "arcee", "cohere2", "ernie4_5", "exaone4", "glm4", "granite", "helium"),
    *("nanochat", "olmo2", "qwen3", "stablelm"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", kept_in_suite((*KEPT, *OTHERS), KEPT))
def test_type(kind: str) -> None:
    verdicts = check(kind)
    assert verdicts["restored"] == "equal"
    assert verdicts["yarn"].partition(",")[0] in ("equal", "alone"), verdicts
    assert verdicts["rerope"].startswith("equal"), verdicts
