"""RoPE stretched in each way that transformers knows: read and written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from posenc.errors import ArgumentError, CheckpointError
from posenc.extension import extend_layers
from posenc.integrations.transformers import load, save
from posenc.models import Decoder, DecoderConfig

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
LENGTH = {"original_max_position_embeddings": 24}
FACTORS = {
    "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
    "long_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
}
RAMP = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, **LENGTH, **RAMP},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **LENGTH},
    "yarn options": {
        "rope_type": "yarn",
        "factor": 4.0,
        **LENGTH,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "attention_factor": 1.3,
        "truncate": False,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        **LENGTH,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "longrope": {"rope_type": "longrope", "factor": 4.0, **LENGTH, **FACTORS},
}


def make(rope: dict[str, Any], *, length: int = 96, family: str = "Llama") -> nn.Module:
    torch.manual_seed(0)
    parameters = {"rope_theta": 100.0} | rope
    fields = SIZES | {"rope_parameters": parameters, "max_position_embeddings": length}
    if family in ("Mistral", "Qwen2"):
        fields["num_key_value_heads"] = 2
    config = getattr(transformers, f"{family}Config")(**fields)
    config._attn_implementation = "eager"
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def tokens(length: int) -> Tensor:
    return torch.randint(61, (2, length), generator=torch.Generator().manual_seed(1))


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [20, 60])
@pytest.mark.parametrize("case", ROPES)
@torch.no_grad()
def test_read_equals_transformers(case: str, count: int, tmp_path: Path) -> None:
    # Dynamic NTK begins past max_position_embeddings, the others are there already.
    theirs = make(ROPES[case], length=24 if case == "dynamic" else 96)
    theirs.save_pretrained(tmp_path)
    close(load(tmp_path)(tokens(count)), theirs(tokens(count)).logits)


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "GPTNeoX"])
@torch.no_grad()
def test_other_families(family: str, tmp_path: Path) -> None:
    partial = {"partial_rotary_factor": 0.5} if family == "GPTNeoX" else {}
    theirs = make(ROPES["yarn"] | partial, family=family)
    theirs.save_pretrained(tmp_path / "first")
    ours = load(tmp_path / "first")
    close(ours(tokens(60)), theirs(tokens(60)).logits)
    name = theirs.config.model_type
    save(ours, tmp_path / "second", family=name)
    again = type(theirs).from_pretrained(tmp_path / "second", attn_implementation="eager")
    close(again(tokens(60)).logits, theirs(tokens(60)).logits)


@pytest.mark.parametrize("case", ROPES)
@torch.no_grad()
def test_written_equals_transformers(case: str, tmp_path: Path) -> None:
    theirs = make(ROPES[case], length=24 if case == "dynamic" else 96)
    theirs.save_pretrained(tmp_path / "in")
    ours = load(tmp_path / "in")
    assert isinstance(ours, Decoder)
    save(ours, tmp_path / "plain")
    save(ours, tmp_path / "like", like=tmp_path / "in")
    for name in ("plain", "like"):
        again = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / name, attn_implementation="eager"
        )
        close(again(tokens(60)).logits, theirs(tokens(60)).logits)
        close(load(tmp_path / name)(tokens(60)), ours(tokens(60)))
    kept = transformers.AutoConfig.from_pretrained(tmp_path / "like").rope_parameters
    assert kept == theirs.config.rope_parameters


@torch.no_grad()
def test_older_files(tmp_path: Path) -> None:
    theirs = make(ROPES["linear"])
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["rope_parameters"]
    fields |= {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    path.write_text(json.dumps(fields))
    close(load(tmp_path)(tokens(60)), theirs(tokens(60)).logits)


@pytest.mark.parametrize("method", ["interpolate", "ntk", "ntk_by_parts", "yarn", "longrope"])
@torch.no_grad()
def test_a_stretched_decoder_becomes_a_llama(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(vocabulary=61, dim=64, layers=2, heads=4, max_length=24)
    plain = Decoder(config)
    length = None if method in ("interpolate", "ntk") else 24
    ours = Decoder(
        config, encodings=extend_layers(plain.encodings, method, factor=4.0, length=length)
    ).eval()
    save(ours, tmp_path / "out", fields={"max_position_embeddings": 96})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    assert theirs.config.max_position_embeddings == 96
    close(theirs(tokens(60)).logits, ours(tokens(60)))


@pytest.mark.parametrize("method", ["ntk", "yarn", "longrope"])
@torch.no_grad()
def test_a_stretched_decoder_without_a_longest_text_is_read(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(vocabulary=61, dim=64, layers=1, heads=4)
    length = None if method == "ntk" else 24
    extended = extend_layers(Decoder(config).encodings, method, factor=4.0, length=length)
    ours = Decoder(config, encodings=extended).eval()
    save(ours, tmp_path / "out")
    close(load(tmp_path / "out")(tokens(60)), ours(tokens(60)))


@torch.no_grad()
def test_parameters_in_the_users_words(tmp_path: Path) -> None:
    make(ROPES["yarn"]).save_pretrained(tmp_path / "in")
    ours = load(tmp_path / "in")
    told = {"rope_theta": 100.0, **ROPES["yarn"]}
    save(ours, tmp_path / "out", fields={"rope_parameters": told})
    kept = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert kept == told
    with pytest.raises(ArgumentError, match="rope_parameters: expected values of the model's"):
        save(ours, tmp_path / "no", fields={"rope_parameters": told | {"factor": 2.0}})


@torch.no_grad()
def test_static_scaling_has_a_name(tmp_path: Path) -> None:
    make(ROPES["yarn"]).save_pretrained(tmp_path / "in")
    ours = load(tmp_path / "in")
    assert isinstance(ours, Decoder)
    ours.save(tmp_path / "own")
    close(Decoder.load(tmp_path / "own")(tokens(60)), ours(tokens(60)))


def test_what_transformers_does_not_have_is_not_written(tmp_path: Path) -> None:
    config = DecoderConfig(vocabulary=61, dim=64, layers=2, heads=4)
    plain = Decoder(config)
    records = extend_layers(plain.encodings, "rerope", length=24)
    with pytest.raises(ArgumentError, match="rope only"):
        save(Decoder(config, encodings=records), tmp_path / "out")
    half = Decoder(replace(config, options={"fraction": 0.5}))
    with pytest.raises(ArgumentError, match=r"fraction=0\.5"):
        save(half, tmp_path / "out")
    layers = extend_layers(plain.encodings, "ntk", factor=4.0, layers={1: {"factor": 2.0}})
    with pytest.raises(ArgumentError, match="one encoding for all layers"):
        save(Decoder(config, encodings=layers), tmp_path / "out")


@pytest.mark.parametrize("change", [{"factor": "4"}, {"factor": 0.5}, {"long_factor": [1.0]}])
def test_parameters_that_mean_nothing(change: dict[str, Any], tmp_path: Path) -> None:
    make(ROPES["longrope"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["rope_parameters"] |= change
    path.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=next(iter(change))):
        load(tmp_path)
