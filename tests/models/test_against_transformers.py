"""Models with the weights of transformers': the same numbers and the same text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from posenc import Layout
from posenc.extension import extend_layers
from posenc.models import (
    Decoder,
    DecoderConfig,
    Encoder,
    EncoderConfig,
    ImageConfig,
    ImageEncoder,
    MaskedLM,
    Swin,
    SwinConfig,
    Transformer,
    TransformerConfig,
    VisionTransformer,
    generate,
)
from tests.models.transformers_weights import copy_weights

VOCABULARY = 61
BLOCKS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SIZES = BLOCKS | {"vocab_size": VOCABULARY, "max_position_embeddings": 40}
OWN_BLOCKS: dict[str, Any] = {"dim": 32, "hidden": 48, "layers": 3, "heads": 4}
OWN = OWN_BLOCKS | {"vocabulary": VOCABULARY, "embedding_scale": 1.0}


def made(kind: str, fields: dict[str, Any], *, std: float = 0.3) -> Any:
    """A model of transformers with every weight drawn anew, so that none is 0 or 1 by default."""
    torch.manual_seed(0)
    architecture = getattr(transformers, kind)
    config = architecture.config_class(**fields)
    config._attn_implementation = "eager"
    model = architecture(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std)
    return model.eval()


def tokens(length: int = 17) -> Tensor:
    """Ids without 0, 1 and 2, which some families take for padding."""
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


LLAMA = {"tied": False, "norm_eps": 1e-6}
NEOX = {"norm": "layer", "norm_eps": 1e-5, "bias": True, "merged": True, "tied": False}
NEOX |= {"activation": "gelu", "parallel": True, "options": {"fraction": 0.25}}
BLOOM = {"norm": "layer", "norm_eps": 1e-5, "bias": True, "merged": True, "encoding": "alibi"}
BLOOM |= {"activation": "gelu_tanh", "embedding_norm": True, "tied": True}
SERIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}

DECODERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "llama grouped": (
        "Llama",
        {"num_key_value_heads": 2, "head_dim": 12},
        {"kv_heads": 2, "head_dim": 12},
    ),
    "llama tied": ("Llama", {"tie_word_embeddings": True}, {"tied": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, {"bias": True}),
    "mistral": (
        "Mistral",
        {"num_key_value_heads": 2, "sliding_window": 5},
        {"kv_heads": 2, "window": 5},
    ),
    "qwen2 windows": (
        "Qwen2",
        {
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
        {"attention_bias": "inputs", "window": [None, 4, 4]},
    ),
    "gpt_neox": ("GPTNeoX", {}, NEOX),
    "gpt_neox serial": (
        "GPTNeoX",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_new",
            "rope_parameters": SERIAL,
        },
        NEOX
        | {
            "parallel": False,
            "attention_bias": "none",
            "activation": "gelu_tanh",
            "options": {"base": 500.0, "fraction": 0.5},
        },
    ),
    "bloom": ("Bloom", {}, BLOOM | {"hidden": 128}),
    "bloom odd heads": (
        "Bloom",
        {"hidden_size": 36, "num_attention_heads": 6},
        BLOOM | {"dim": 36, "hidden": 144, "heads": 6},
    ),
}


def decoders(case: str) -> tuple[Any, Decoder]:
    kind, theirs, ours = DECODERS[case]
    fields = SIZES | {"eos_token_id": None, "pad_token_id": None} | theirs
    model = made(f"{kind}ForCausalLM", fields)
    return model, copy_weights(model, Decoder(DecoderConfig(**(OWN | LLAMA | ours))))


@pytest.mark.parametrize("case", DECODERS)
@torch.no_grad()
def test_decoders(case: str) -> None:
    theirs, ours = decoders(case)
    text = tokens()
    close(ours(text), theirs(text).logits)
    expected = theirs.generate(text[:, :9], max_new_tokens=12, do_sample=False)
    assert torch.equal(generate(ours, text[:, :9], max_new_tokens=12), expected)


@pytest.mark.parametrize("case", ["llama grouped", "gpt_neox", "bloom", "mistral"])
@torch.no_grad()
def test_padded_rows_of_decoders(case: str) -> None:
    theirs, ours = decoders(case)
    text, mask = tokens(), torch.ones(2, 17, dtype=torch.int64)
    mask[1, :6] = 0
    positions = {} if case == "bloom" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    expected = theirs(text, attention_mask=mask, **positions).logits
    logits = ours(text, Layout.padded([17, 11], side="left"))
    close(logits[0], expected[0])
    close(logits[1, 6:], expected[1, 6:])


TRAINED = {"original_max_position_embeddings": 24}
FACTORS = {"short": [1.0, 1.1, 1.2, 1.3], "long": [1.0, 2.0, 3.0, 4.0]}
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "interpolate": ({"rope_type": "linear"}, {}),
    "dynamic_ntk": ({"rope_type": "dynamic"}, {"length": 24}),
    "llama3": (
        {"rope_type": "llama3", **TRAINED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"length": 24},
    ),
    "yarn": ({"rope_type": "yarn", **TRAINED}, {"length": 24}),
    "longrope": (
        {"rope_type": "longrope", **TRAINED, **{f"{k}_factor": x for k, x in FACTORS.items()}},
        {"length": 24, **{f"{k}_factors": x for k, x in FACTORS.items()}},
    ),
}


@pytest.mark.parametrize("length", [20, 60])
@pytest.mark.parametrize("method", ROPES)
@torch.no_grad()
def test_stretched_decoders(method: str, length: int) -> None:
    parameters, options = ROPES[method]
    longest = 24 if method == "dynamic_ntk" else 96  # from which it begins
    rope = {"rope_theta": 100.0, "factor": 4.0, **parameters}
    fields = {"rope_parameters": rope, "max_position_embeddings": longest}
    theirs = made("LlamaForCausalLM", SIZES | fields, std=0.2)
    config = DecoderConfig(**OWN, **LLAMA, options={"base": 100.0})
    encodings = extend_layers(Decoder(config).encodings, method, factor=4.0, **options)
    ours = copy_weights(theirs, Decoder(config, encodings=encodings))
    close(ours(tokens(length)), theirs(tokens(length)).logits)


DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
}
RELATIVE = {"max_distance": 40, "buckets": 8, "projections": "content", "normalize": True}
RELATIVE |= {"lookup": "released", "clamp": "after"}
OWN_DEBERTA = {"norm_eps": 1e-7, "encoding": "deberta", "options": RELATIVE, "types": 0}
BERT = {"activation": "gelu", "norm_eps": 1e-12, "encoding": "learned", "types": 2}
BERT |= {"max_length": 40}
XLNET = {"d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48, "vocab_size": VOCABULARY}
NEW_HEAD = {
    "head.dense": "lm_predictions.lm_head.dense",
    "head.norm": "lm_predictions.lm_head.LayerNorm",
    "head.bias": "lm_predictions.lm_head.bias",
}

ENCODERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("BertModel", {}, {}),
    "bert masked": ("BertForMaskedLM", {"layer_norm_eps": 1e-3}, {"norm_eps": 1e-3}),
    "bert relu": (
        "BertModel",
        {"hidden_act": "relu", "type_vocab_size": 3},
        {"activation": "relu", "types": 3},
    ),
    "roberta": ("RobertaModel", {"type_vocab_size": 1}, {"types": 1, "max_length": 38}),
    "roberta masked": ("RobertaForMaskedLM", {}, {"max_length": 38}),
    "deberta shared": ("DebertaV2Model", DEBERTA, OWN_DEBERTA),
    "deberta masked": ("DebertaV2ForMaskedLM", DEBERTA, OWN_DEBERTA),
    "deberta masked new": ("DebertaV2ForMaskedLM", DEBERTA | {"legacy": False}, OWN_DEBERTA),
    "deberta own": (
        "DebertaV2Model",
        DEBERTA
        | {
            "share_att_key": False,
            "position_biased_input": True,
            "position_buckets": -1,
            "max_relative_positions": 7,
            "norm_rel_ebd": "none",
            "type_vocab_size": 2,
        },
        OWN_DEBERTA
        | {
            "types": 2,
            "encoding": "deberta+learned",
            "options": RELATIVE
            | {"max_distance": 7, "buckets": None, "projections": "own", "normalize": False},
        },
    ),
    "deberta plain": ("DebertaV2Model", {}, {"norm_eps": 1e-7, "types": 0}),
    "xlnet": (
        "XLNetModel",
        XLNET,
        {"types": 0, "attention_bias": "none", "embedding_norm": False, "encoding": "xlnet"},
    ),
}


def encoders(case: str) -> tuple[Any, nn.Module]:
    kind, theirs, ours = ENCODERS[case]
    model = made(kind, theirs if case == "xlnet" else SIZES | theirs)
    config = EncoderConfig(**(OWN | BERT | ours))
    own = MaskedLM(config) if "masked" in case else Encoder(config)
    return model, copy_weights(model, own, NEW_HEAD if "new" in case else None)


@pytest.mark.parametrize("case", ENCODERS)
@torch.no_grad()
def test_encoders(case: str) -> None:
    theirs, ours = encoders(case)
    text, mask = tokens(), torch.ones(2, 17, dtype=torch.int64)
    close(ours(text), theirs(text)[0])
    text[1, 11:], mask[1, 11:] = theirs.config.pad_token_id, 0
    expected, got = theirs(text, attention_mask=mask)[0], ours(text, Layout.padded([17, 11]))
    close(got[0], expected[0])
    close(got[1, :11], expected[1, :11])


@torch.no_grad()
def test_segments_of_an_encoder() -> None:
    theirs, ours = encoders("bert masked")
    types = torch.arange(17).expand(2, -1) // 9
    close(ours(tokens(), types=types), theirs(tokens(), token_type_ids=types).logits)


T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}
BUCKETS = {"buckets": 8, "max_distance": 16}
OWN_T5: dict[str, Any] = {
    "dim": 32,
    "hidden": 48,
    "heads": 4,
    "head_dim": 12,
    "norm": "rms",
    "norm_eps": 1e-6,
    "bias": False,
    "scale": 1.0,
    "embedding_scale": 1.0,
}

T5_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "first": ({}, "relu"),
    "second": ({"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, "geglu"),
    "silu": ({"feed_forward_proj": "gated-silu"}, "swiglu"),
}


def t5(case: str) -> tuple[Any, Transformer]:
    fields, activation = T5_CASES[case]
    theirs = made("T5ForConditionalGeneration", T5 | fields)
    if case == "second":
        theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.flip(0))
    theirs.generation_config.eos_token_id = None
    config = TransformerConfig(
        **OWN_T5,
        source_vocabulary=VOCABULARY,
        target_vocabulary=VOCABULARY,
        activation=activation,
        encoder_layers=3,
        decoder_layers=2,
        encoder_encoding="t5",
        decoder_encoding="t5",
        encoder_options=BUCKETS,
        decoder_options=BUCKETS,
        shared=True,
        tied=case != "second",
        output_scale=1.0 if case == "second" else 32**-0.5,
    )
    return theirs, copy_weights(theirs, Transformer(config))


@pytest.mark.parametrize("case", T5_CASES)
@torch.no_grad()
def test_t5(case: str) -> None:
    theirs, ours = t5(case)
    source, target = tokens(), tokens(9).flip(1)
    close(ours(source, target), theirs(input_ids=source, decoder_input_ids=target).logits)
    expected = theirs.generate(source, max_new_tokens=12, do_sample=False, decoder_start_token_id=0)
    begin = torch.zeros(2, 1, dtype=torch.int64)
    assert torch.equal(generate(ours.given(source), begin, max_new_tokens=12), expected)


@torch.no_grad()
def test_padded_sources_of_t5() -> None:
    theirs, ours = t5("first")
    source, target, mask = tokens(), tokens(9), torch.ones(2, 17, dtype=torch.int64)
    mask[1, 11:] = 0
    expected = theirs(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    close(ours(source, target, Layout.padded([17, 11])), expected)


@pytest.mark.parametrize("case", T5_CASES)
@torch.no_grad()
def test_the_encoder_of_t5(case: str) -> None:
    fields, activation = T5_CASES[case]
    theirs = made("T5EncoderModel", T5 | fields)
    config = EncoderConfig(
        **OWN_T5,
        vocabulary=VOCABULARY,
        layers=3,
        norm_first=True,
        activation=activation,
        encoding="t5",
        options=BUCKETS,
    )
    ours = copy_weights(theirs, Encoder(config))
    source, mask = tokens(), torch.ones(2, 17, dtype=torch.int64)
    close(ours(source), theirs(source).last_hidden_state)
    mask[1, 11:] = 0
    expected = theirs(source, attention_mask=mask).last_hidden_state[1, :11]
    close(ours(source, Layout.padded([17, 11]))[1, :11], expected)


def images(channels: int, height: int, width: int) -> Tensor:
    return torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("classes", [None, 5])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@torch.no_grad()
def test_vit(activation: str, classes: int | None) -> None:
    fields = BLOCKS | {"image_size": (16, 24), "patch_size": 4, "hidden_act": activation}
    kind = "ViTForImageClassification" if classes else "ViTModel"
    theirs = made(kind, fields | ({"num_labels": classes} if classes else {}), std=0.2)
    config = ImageConfig(
        **OWN_BLOCKS,
        size=(16, 24),
        patch=4,
        norm_eps=1e-12,
        activation=activation,
        encoding="learned2d",
        classes=classes,
    )
    ours = copy_weights(theirs, (VisionTransformer if classes else ImageEncoder)(config))
    got = ours(images(3, 16, 24))
    close(got if classes else got[0], theirs(images(3, 16, 24))[0])


@pytest.mark.parametrize(
    ("heights", "width", "channels", "classes"),
    [((32, 48), 32, 3, 5), ((32, 48), 32, 3, None), ((16,), 16, 1, 5)],
)
@torch.no_grad()
def test_swin(heights: tuple[int, ...], width: int, channels: int, classes: int | None) -> None:
    fields = {
        "image_size": width,
        "num_channels": channels,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 3],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    kind = "SwinForImageClassification" if classes else "SwinModel"
    theirs = made(kind, fields | ({"num_labels": classes} if classes else {}), std=0.2)
    config = SwinConfig(
        size=(width, width),
        patch=2,
        channels=channels,
        dim=16,
        depths=(2, 3),
        heads=(2, 4),
        window=4,
        encoding="swin",
        classes=classes,
    )
    ours = copy_weights(theirs, Swin(config))
    for height in heights:
        pictures = images(channels, height, width)
        close(ours(pictures), theirs(pictures)[0])
