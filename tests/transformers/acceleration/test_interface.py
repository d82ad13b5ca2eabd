"""``attn_implementation="posenc"``: models of all kinds against their own attention."""

from __future__ import annotations

import ast
import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import sliding_window_causal_mask_function

from posenc.attention import api
from posenc.errors import ArgumentError
from posenc.transformers.acceleration import accelerate, accelerated
from posenc.transformers.acceleration.interface import BOUNDARIES, REFUSED_OPTIONS, attention, mask
from tests.support.tiny_models import build
from tests.support.versions import needs_model_type
from tests.transformers.acceleration.case import VOCABULARY, Case, texts
from tests.transformers.acceleration.cases.texts import BLOOM

pytestmark = pytest.mark.usefixtures("at_all_lengths")

TOKENS = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0}
SIZES: dict[str, Any] = TOKENS | {"hidden_size": 32, "intermediate_size": 48}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
ALTERNATING = GROUPED | {"sliding_window": 7}
ALTERNATING |= {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
PAIR: dict[str, Any] = TOKENS | {"d_model": 32, "decoder_start_token_id": 2}
for side in ("encoder", "decoder"):
    PAIR |= {f"{side}_layers": 2, f"{side}_ffn_dim": 48, f"{side}_attention_heads": 4}
VISION = SIZES | {"image_size": 16, "patch_size": 8, "projection_dim": 32}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
CHUNKS = {"intermediate_size_mlp": 48, "attention_chunk_size": 8, "no_rope_layers": [1, 0]}
SEEING = VISION | {"model_type": "siglip_vision_model"}
PALIGEMMA = {"text_config": GROUPED | {"model_type": "gemma"}, "vision_config": SEEING}
T5GEMMA = {"encoder": {"text_config": ALTERNATING, "vision_config": VISION}, "decoder": ALTERNATING}
INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 4}

SERVED: dict[str, dict[str, Any]] = {
    "afmoe": ALTERNATING | EXPERTS | {"moe_intermediate_size": 24, "num_dense_layers": 1},
    "align_text_model": SIZES,
    "aimv2_text_model": SIZES,
    "bart": PAIR,
    "bert": SIZES,
    "bigbird_pegasus": PAIR | {"attention_type": "original_full"},
    "clap_text_model": SIZES,
    "doge": GROUPED,
    "gemma2": ALTERNATING | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": ALTERNATING,
    "gpt_oss": ALTERNATING | EXPERTS,
    "llama": GROUPED,
    "llama4_text": GROUPED | EXPERTS | CHUNKS,
    "mistral": GROUPED | {"sliding_window": 7},
    "modernbert": SIZES | {"local_attention": 8, "global_attn_every_n_layers": 2},
    "nllb-moe": PAIR | {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "paligemma": {**PALIGEMMA, "image_token_index": 59, "hidden_size": 32},
    "pegasus_x": PAIR | {"num_global_tokens": 4, "block_size": 8},
    "qwen3_moe": GROUPED | EXPERTS | {"moe_intermediate_size": 24},
    "siglip_vision_model": VISION,
    "splinter": SIZES | {"question_token_id": 5},
    "t5gemma2": {**T5GEMMA, "image_token_index": 59, "eoi_token_index": 58},
}
"""Types of models, with their sizes."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("indices", SIZES | LATENT | INDEXER | {"qk_nope_head_dim": 8}),
    "inkling2_text": ("sinks", GROUPED),
    "big_bird": ("big_bird", SIZES),
    "bloom": ("bloom", BLOOM),
    "mpnet": ("mpnet", SIZES),
    "roformer": ("roformer", SIZES),
}
"""Types, with the option or the type that the error names, and their sizes."""

TEXT_ALONE = {
    "aimv2_text_model": transformers.Aimv2TextModel,
    "align_text_model": transformers.AlignTextModel,
    "clap_text_model": transformers.ClapTextModel,
}
"""Parts of models, which AutoModel does not make."""


def model_of(
    kind: str, options: dict[str, Any], implementation: str
) -> transformers.PreTrainedModel:
    """A model with weights away from zero, the same for every implementation."""
    config = transformers.AutoConfig.for_model(kind, **options)
    make = (
        TEXT_ALONE[kind]._from_config if kind in TEXT_ALONE else transformers.AutoModel.from_config
    )
    return Case(lambda: make(config, attn_implementation=implementation)).model()


def outputs_of(model: transformers.PreTrainedModel, *, padded: bool) -> Tensor:
    """Last hidden states, zero for padding."""
    if model.main_input_name == "pixel_values":
        image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        states: Tensor = model(image).last_hidden_state
        return states
    inputs = texts() if padded else {"input_ids": texts()["input_ids"]}
    rows = texts()["attention_mask"].bool() if padded else torch.ones(2, 23, dtype=torch.bool)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, 5:]
        rows = torch.ones(2, 18, dtype=torch.bool)
    states = model(**inputs)[0]
    return states.where(rows.unsqueeze(-1), 0.0)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", SERVED)
@torch.no_grad()
def test_models_compute_what_their_own_attention_does(kind: str, padded: bool) -> None:
    expected = outputs_of(model_of(kind, SERVED[kind], "eager"), padded=padded)
    got = outputs_of(model_of(kind, SERVED[kind], "posenc"), padded=padded)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", [pytest.param(x, marks=needs_model_type(x)) for x in REFUSED])
@torch.no_grad()
def test_models_that_posenc_does_not_serve_are_refused_by_name(kind: str) -> None:
    name, options = REFUSED[kind]
    model = model_of(kind, options, "posenc")
    with pytest.raises(ArgumentError, match=rf"{name}.*'eager'"):
        outputs_of(model, padded=True)


def heads(queries: int, keys: int) -> list[Tensor]:
    """Queries, keys and values of 2 rows and 4 heads."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 4, n, 8, generator=generator) for n in (queries, keys, keys)]


HARMLESS = {"deterministic", "max_length_k", "max_length_q", "output_attentions"}
HARMLESS |= {"position_ids", "sliding_window"}
"""Options that layers of transformers name in calls of attention and that say nothing beyond the
mask, but for ``output_attentions``, which ``wants_weights`` reads."""


def test_every_option_that_layers_name_is_known() -> None:
    """A new one of another transformers may change attention."""
    named = set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            called = getattr(getattr(call, "func", None), "id", "")
            if isinstance(call, ast.Call) and re.fullmatch(r"attention_(interface|fn)", called):
                named |= {keyword.arg for keyword in call.keywords if keyword.arg}
    assert {"is_causal", "s_aux", "sliding_window"} <= named
    assert named <= {*signature(attention).parameters, *REFUSED_OPTIONS, *BOUNDARIES, *HARMLESS}


@pytest.mark.parametrize("name", ["shift_labels", "seq_idx", "loss_weights", "ignore_index"])
@torch.no_grad()
def test_options_of_losses_and_other_layers_are_passed_over(name: str) -> None:
    ids = texts()["input_ids"]
    outputs = [
        model_of("llama", SERVED["llama"], implementation)(ids, **{name: ids})[0]
        for implementation in ("posenc", "eager")
    ]
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("name", sorted(REFUSED_OPTIONS))
def test_options_that_are_not_read_are_refused_by_name(name: str) -> None:
    attention(nn.Identity(), *heads(5, 5), None, **dict.fromkeys(HARMLESS, None), **{name: None})
    with pytest.raises(ArgumentError, match=rf"{name}: .*'eager'"):
        attention(nn.Identity(), *heads(5, 5), None, **{name: torch.ones(1)})


@pytest.mark.parametrize("name", sorted(BOUNDARIES))
def test_boundaries_of_documents_that_a_mask_does_not_show_are_refused(name: str) -> None:
    """Those of one document say nothing that a mask would have to show."""
    q, k, v = heads(5, 5)
    whole = attention(nn.Identity(), q, k, v, mask(2, 5, 5), **{name: torch.tensor([0, 5])})[0]
    torch.testing.assert_close(whole, attention(nn.Identity(), q, k, v, mask(2, 5, 5))[0])
    with pytest.raises(ArgumentError, match=rf"{name}: .*position_ids"):
        attention(nn.Identity(), q, k, v, mask(2, 5, 5), **{name: torch.tensor([0, 2, 5])})


def test_nothing_is_causal_without_a_mask() -> None:
    module = nn.Identity()
    module.is_causal = True
    q, k, v = heads(5, 5)
    full = (q @ k.mT / 8**0.5).softmax(-1) @ v
    torch.testing.assert_close(attention(module, q, k, v, None)[0].transpose(1, 2), full)
    with pytest.raises(ArgumentError, match="attention_mask"):
        attention(module, q, k, v, None, is_causal=True)
    one = attention(module, q[:, :, :1], k, v, None, is_causal=True)[0]
    torch.testing.assert_close(one.transpose(1, 2), full[:, :, :1])


@pytest.mark.parametrize("backend", ["reference", "blockwise", "native"])
def test_outputs_are_contiguous(backend: str) -> None:
    module = nn.Identity()
    module.__dict__[accelerated.SETTINGS] = accelerated.AccelerateSettings(backend)
    for seen in (None, mask(2, 40, 40)):
        assert attention(module, *heads(40, 40), seen)[0].is_contiguous()


def test_accelerated_models_see_what_their_config_says() -> None:
    """A decoder made to see both ways, as its config can ask."""
    model = build("BloomModel", BLOOM).eval()
    model.config.is_causal = False
    with torch.no_grad():
        expected = model(**texts()).last_hidden_state
        accelerate(model, shortest=0)
        found = model(**texts()).last_hidden_state
    rows = texts()["attention_mask"].bool().unsqueeze(-1)
    torch.testing.assert_close(found.where(rows, 0), expected.where(rows, 0))


def test_a_config_that_several_models_share() -> None:
    """Some of transformers' are of models on the interface and of models that are not."""

    class Shared(transformers.PreTrainedConfig):
        model_type = "shared"

    class OnInterface(transformers.PreTrainedModel):
        config_class = Shared
        _supports_sdpa = True

        @classmethod
        def _can_set_attn_implementation(cls) -> bool:
            return True

    class Eager(OnInterface):
        _supports_sdpa = False

        @classmethod
        def _can_set_attn_implementation(cls) -> bool:
            return False

    assert issubclass(Eager, OnInterface)
    assert accelerated._traits(Shared) == (True, False)

    class Refused(transformers.PreTrainedConfig):
        model_type = "refused"

    class Own(Eager):
        config_class = Refused

    members = {"__module__": "torch", "_can_set_attn_implementation": lambda: True}
    sharded = type("Sharded", (Own,), members)
    assert not accelerated.is_on_interface(sharded)
    assert accelerated._traits(Refused) == (False, False)


@torch.inference_mode()
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("change", ["none", "hidden", "longer", "weights", "softcap"])
def test_one_query_sees_what_its_mask_says(window: int | None, change: str) -> None:
    """Also where a model has changed the mask, which is then no longer known, and with options."""
    q, k, v = heads(1, 6)
    shown = torch.ones(6, dtype=torch.bool)
    options: dict[str, Any] = {}
    if window:
        function = sliding_window_causal_mask_function(window)
        options, shown[: 6 - window] = {"mask_function": function}, False
    seen = mask(len(q), 1, 6, 5, dtype=torch.bool, **options)
    given: dict[str, Any] = {}
    if change == "hidden":
        seen[..., 4] = False
        shown[4] = False
    if change == "longer":  # static caches hold more keys than a mask has
        k, v = (torch.cat([x, x[:, :, :2]], 2) for x in (k, v))
        seen = torch.nn.functional.pad(seen, (0, 2))
        shown = torch.nn.functional.pad(shown, (0, 2))
    if change == "weights":
        given = {"output_attentions": True}
    if change == "softcap":
        given = {"softcap": 0.1}
    output, weights = attention(nn.Identity(), q, k, v, seen, scaling=0.3, **given)
    logits = 0.3 * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    if change == "softcap":
        logits = 0.1 * (logits / 0.1).tanh()
    expected = logits.masked_fill(~shown, -torch.inf).softmax(-1)
    rows = expected @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    torch.testing.assert_close(output, rows.transpose(1, 2))
    assert (weights is not None) == (change == "weights")
    if weights is not None:
        torch.testing.assert_close(weights, expected)


MISTRAL = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
MISTRAL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}


@torch.no_grad()
def test_layers_without_terms_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three passes the first finds a backend, the second prepares it, the third calls it."""
    model = build("MistralModel", MISTRAL).eval()
    accelerate(model, check=False, shortest=0)
    planned, real = [0], api._attend

    def watched(*arguments: Any, **options: Any) -> Any:
        planned[0] += 1
        return real(*arguments, **options)

    monkeypatch.setattr(api, "_attend", watched)
    ids, counts = torch.randint(3, 50, (1, 40)), []
    for _ in range(3):
        model(ids)
        counts.append(planned[0])
    assert counts[0] > 0
    assert counts[2] == counts[1]
