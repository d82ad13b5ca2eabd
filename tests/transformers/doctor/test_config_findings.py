"""Settings without effect: each found where it is, and nothing found where it is not."""

from __future__ import annotations

from typing import Any

import pytest

from posenc.transformers.doctor.config_findings import findings

LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8}
LLAMA |= {"max_position_embeddings": 2048}
THETA = {"rope_theta": 500000.0}
TRAINED = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {TRAINED: 512}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONGROPE |= {TRAINED: 1024}
NTK, LINEAR = ({"rope_type": kind, "factor": 4.0} for kind in ("ntk", "linear"))
YARN, DYNAMIC = ({"rope_type": kind, "factor": 4.0} for kind in ("yarn", "dynamic"))
DEFAULT = {"rope_parameters": {"rope_type": "default"}}
LONGEST = "max_position_embeddings"
FEW = LONGROPE | {"long_factor": [2.0] * 3}

SCALINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "scaling without a type": ({"factor": 4.0}, "factor", "4 is ignored"),
    "two types": (LLAMA3 | {"type": "linear"}, "type", "'linear' is ignored"),
    "unknown type": (NTK, "rope_type", "'ntk' is unknown"),
    "scaling by one": (LINEAR | {"factor": 1.0}, "factor", "changes nothing"),
    "no factor": ({"rope_type": "linear"}, "factor", "has none"),
    "frequency factors": (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor", "is not above"),
    "dynamic": (DYNAMIC, LONGEST, "begins beyond 2,048"),
    "no trained length": (YARN, TRAINED, "is missing"),
    "length at odds": (LLAMA3 | {"factor": 8.0}, LONGEST, "8 × 512 = 4,096"),
    "too few factors": (FEW, "long_factor", "has 3 numbers for 4 pairs"),
    "factors of one": (LONGROPE | {"long_factor": [1.0] * 4}, "long_factor", "changes nothing"),
}
"""Values of ``rope_scaling`` of a Llama."""

DEBERTA = {"model_type": "deberta-v2", "relative_attention": True}
OFF = {"pos_att_type": ["c2p"], "relative_attention": False}
RELATIVE = "position_embedding_type"
BERT = {"model_type": "bert", RELATIVE: "relative_key_query"}
BOTH = LLAMA | THETA | DEFAULT | {"rope_scaling": LLAMA3}
TWICE = {"rope_parameters": {"rope_theta": 10000.0}}
BY_LAYER = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
UNUSED = {"sliding_window": 512, "use_sliding_window": False}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "theta at the top": (LLAMA | THETA | TWICE, "rope_theta", "500,000 is ignored"),
    "no theta": (LLAMA | DEFAULT, "rope_theta", "is given nowhere"),
    "two dicts": (BOTH, "rope_parameters", "because rope_scaling is there"),
    "nested": (LLAMA | THETA | BY_LAYER, "rope_parameters", "there is no layer_types"),
    "window off": (LLAMA | THETA | UNUSED, "sliding_window", "is ignored"),
    "window too wide": (LLAMA | THETA | {"sliding_window": 4096}, "sliding_window", "never masks"),
    "relative keys of BERT": (BERT, RELATIVE, "ignored by transformers 5"),
    "DeBERTa off": (DEBERTA | OFF, "pos_att_type", "relative_attention is not true"),
    "DeBERTa without terms": (DEBERTA, "pos_att_type", "adds nothing"),
    "Falcon": ({"model_type": "falcon", "alibi": True} | THETA, "alibi", "rules out RoPE"),
}
WRONG |= {
    name: (LLAMA | THETA | {"rope_scaling": scaling}, *found)
    for name, (scaling, *found) in SCALINGS.items()
}

BY_TYPE = {"full_attention": 1e6, "sliding_attention": 1e4}
NESTED = {k: {"rope_type": "default", "rope_theta": base} for k, base in BY_TYPE.items()}
WINDOWED = {"layer_types": list(BY_TYPE), "sliding_window": 512}
RIGHT: dict[str, dict[str, Any]] = {
    "plain": LLAMA | THETA,
    "new": LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "llama3": LLAMA | THETA | {"rope_scaling": LLAMA3},
    "longrope": LLAMA | THETA | {"rope_scaling": LONGROPE},
    "nested": LLAMA | WINDOWED | {"rope_parameters": NESTED},
    "deberta": DEBERTA | {"pos_att_type": ["p2c", "c2p"]},
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
