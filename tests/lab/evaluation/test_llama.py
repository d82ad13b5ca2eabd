"""Decoders of posenc as Llamas: the same numbers, or refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from posenc.errors import ArgumentError, CheckpointError
from posenc.extension import extend_layers
from posenc.lab.evaluation.checkpoint import Checkpoint, as_llama
from posenc.lab.evaluation.demo_model import demo_checkpoint
from posenc.models import Decoder, DecoderConfig

SIZES: dict[str, Any] = {"vocabulary": 61, "dim": 32, "layers": 2, "heads": 4, "max_length": 24}


def decoder(**changes: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**(SIZES | changes))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def close(ours: Decoder, theirs: Any) -> None:
    tokens = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 2, "head_dim": 12, "tied": False, "norm_eps": 1e-3},
        {"embedding_scale": 1.0, "bias": True, "max_length": None},
        {"attention_bias": "all", "options": {"base": 500.0}},
    ],
    ids=str,
)
@torch.no_grad()
def test_the_same_numbers(changes: dict[str, Any], tmp_path: Path) -> None:
    ours = decoder(**changes)
    state = torch.get_rng_state()
    llama = as_llama(ours)
    assert torch.equal(torch.get_rng_state(), state)
    close(ours, llama)
    llama.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.config.max_position_embeddings == (ours.config.max_length or 2048)
    assert theirs.config.tie_word_embeddings == ("embedding_scale" in changes)
    close(ours, theirs)


@pytest.mark.parametrize("method", ["interpolate", "ntk", "yarn"])
@torch.no_grad()
def test_the_same_numbers_of_other_frequencies(method: str) -> None:
    length = {"length": 24} if method == "yarn" else {}
    encodings = extend_layers(decoder().encodings, method, factor=4.0, **length)
    ours = Decoder(DecoderConfig(**SIZES), encodings=encodings).eval()
    close(ours, as_llama(ours))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"encoding": "alibi"}, "Alibi"),
        ({"encoding": "nope"}, "no encoding"),
        ({"encoding": "rope+alibi"}, "Rope and Alibi"),
        ({"options": {"pairing": "adjacent"}}, "pairing='adjacent'"),
        ({"options": {"learned": True}}, "learned=True"),
        ({"options": {"fraction": 0.5}}, r"fraction=0\.5"),
        ({"norm": "layer"}, "norm='layer'"),
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"merged": True}, "merged=True"),
        ({"attention_bias": "inputs"}, "biases='inputs'"),
        ({"window": 4}, "window=4"),
        ({"sinks": True}, "sinks=True"),
        ({"softcap": 20.0}, r"softcap=20\.0"),
    ],
)
def test_what_is_no_llama_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        as_llama(decoder(**changes))


def test_other_extensions_are_refused() -> None:
    first, second = (extend_layers(decoder().encodings, "ntk", factor=f) for f in (4.0, 2.0))
    for encodings, named in (
        (extend_layers(decoder().encodings, "rerope", length=24), "rope only"),
        (extend_layers(decoder().encodings, "dynamic_ntk", length=24, factor=2.0), "DynamicNtk"),
        ([first[0], *second[1:]], "one encoding for all layers"),
    ):
        with pytest.raises(ArgumentError, match=named):
            as_llama(Decoder(DecoderConfig(**SIZES), encodings=encodings))


def test_a_missing_transformers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder().save(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"posenc\[extend\]"):
        Checkpoint.open(tmp_path / "saved", extendable=True)
    with pytest.raises(CheckpointError, match=r"posenc\[extend\]"):
        demo_checkpoint(tmp_path / "demo", text=None)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
