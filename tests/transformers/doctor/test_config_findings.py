"""Settings without effect: each found where it is, and nothing found where it is not."""

from __future__ import annotations

from typing import Any

import pytest

from posenc.transformers.doctor.config_findings import findings

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}
THETA = {"rope_theta": 500000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 1024,
}

WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "theta at the top": (
        LLAMA | THETA | {"rope_parameters": {"rope_theta": 10000.0}},
        "rope_theta",
        "500,000 is ignored",
    ),
    "no theta": (
        LLAMA | {"rope_parameters": {"rope_type": "default"}},
        "rope_theta",
        "is given nowhere",
    ),
    "two dicts": (
        LLAMA | THETA | {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3},
        "rope_parameters",
        "because rope_scaling is there",
    ),
    "nested without layer types": (
        LLAMA | THETA | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "rope_parameters",
        "there is no layer_types",
    ),
    "scaling without a type": (
        LLAMA | THETA | {"rope_scaling": {"factor": 4.0}},
        "factor",
        "4 is ignored",
    ),
    "two types": (
        LLAMA | THETA | {"rope_scaling": LLAMA3 | {"type": "linear"}},
        "type",
        "'linear' is ignored",
    ),
    "unknown type": (
        LLAMA | THETA | {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
        "rope_type",
        "'ntk' is unknown",
    ),
    "scaling by one": (
        LLAMA | THETA | {"rope_scaling": {"rope_type": "linear", "factor": 1.0}},
        "factor",
        "changes nothing",
    ),
    "no factor": (LLAMA | THETA | {"rope_scaling": {"rope_type": "linear"}}, "factor", "has none"),
    "frequency factors": (
        LLAMA | THETA | {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
        "high_freq_factor",
        "is not above",
    ),
    "dynamic": (
        LLAMA | THETA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "max_position_embeddings",
        "begins beyond 2,048",
    ),
    "no trained length": (
        LLAMA | THETA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "original_max_position_embeddings",
        "is missing",
    ),
    "length at odds": (
        LLAMA | THETA | {"rope_scaling": LLAMA3 | {"factor": 8.0}},
        "max_position_embeddings",
        "8 × 512 = 4,096",
    ),
    "too few factors": (
        LLAMA | THETA | {"rope_scaling": LONGROPE | {"long_factor": [2.0] * 3}},
        "long_factor",
        "has 3 numbers for 4 pairs",
    ),
    "factors of one": (
        LLAMA | THETA | {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 4}},
        "long_factor",
        "changes nothing",
    ),
    "window off": (
        LLAMA | THETA | {"sliding_window": 512, "use_sliding_window": False},
        "sliding_window",
        "is ignored",
    ),
    "window too wide": (LLAMA | THETA | {"sliding_window": 4096}, "sliding_window", "never masks"),
    "relative keys of BERT": (
        {"model_type": "bert", "position_embedding_type": "relative_key_query"},
        "position_embedding_type",
        "ignored by transformers 5",
    ),
    "DeBERTa off": (
        {"model_type": "deberta-v2", "pos_att_type": ["c2p"], "relative_attention": False},
        "pos_att_type",
        "relative_attention is not true",
    ),
    "DeBERTa without terms": (
        {"model_type": "deberta-v2", "relative_attention": True},
        "pos_att_type",
        "adds nothing",
    ),
    "Falcon": ({"model_type": "falcon", "alibi": True} | THETA, "alibi", "rules out RoPE"),
}

RIGHT: dict[str, dict[str, Any]] = {
    "plain": LLAMA | THETA,
    "new": LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "llama3": LLAMA | THETA | {"rope_scaling": LLAMA3},
    "longrope": LLAMA | THETA | {"rope_scaling": LONGROPE},
    "nested": LLAMA
    | {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "sliding_window": 512,
    },
    "deberta": {
        "model_type": "deberta-v2",
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
    },
    "bert": {"model_type": "bert", "max_position_embeddings": 512},
}


@pytest.mark.parametrize(("config", "field", "problem"), WRONG.values(), ids=list(WRONG))
def test_wrong_settings_are_found(config: dict[str, Any], field: str, problem: str) -> None:
    found = [finding for finding in findings(config, {}, None) if finding.field == field]
    assert any(problem in finding.problem for finding in found), findings(config, {}, None)


@pytest.mark.parametrize("config", RIGHT.values(), ids=list(RIGHT))
def test_right_settings_are_not(config: dict[str, Any]) -> None:
    assert findings(config, {"model_max_length": 10**30}, 512) == []


def test_a_tokenizer_that_lets_too_much_through() -> None:
    found = findings(RIGHT["bert"], {"model_max_length": 1024}, 512)
    assert [finding.field for finding in found] == ["model_max_length"]
