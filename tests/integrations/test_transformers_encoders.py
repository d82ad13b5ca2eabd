"""Encoders of transformers, read and written: the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posenc import Layout
from posenc.errors import CheckpointError
from posenc.integrations.transformers import load, save
from posenc.models import Encoder, MaskedLM

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}

DEBERTA = SIZES | {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
}
XLNET: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "n_layer": 3,
    "n_head": 4,
    "d_inner": 48,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", SIZES),
    "bert masked": ("BertForMaskedLM", SIZES | {"layer_norm_eps": 1e-3}),
    "bert relu": ("BertModel", SIZES | {"hidden_act": "relu", "type_vocab_size": 3}),
    "roberta": ("RobertaModel", SIZES | {"type_vocab_size": 1}),
    "roberta masked": ("RobertaForMaskedLM", SIZES),
    "deberta shared": ("DebertaV2Model", DEBERTA),
    "deberta masked": ("DebertaV2ForMaskedLM", DEBERTA),
    "deberta masked new": ("DebertaV2ForMaskedLM", DEBERTA | {"legacy": False}),
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
    ),
    "deberta plain": ("DebertaV2Model", SIZES),
    "xlnet": ("XLNetModel", XLNET),
    "xlnet head": ("XLNetLMHeadModel", XLNET),
}


def make(case: str) -> nn.Module:
    """A model of transformers with every weight drawn anew, so that none is 0 or 1 by default."""
    kind, fields = CASES[case]
    torch.manual_seed(0)
    architecture = getattr(transformers, kind)
    model: nn.Module = architecture(architecture.config_class(**fields))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def tokens(rows: int = 2, length: int = 17) -> Tensor:
    """Ids without 0, 1 and 2, which some families take for padding."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def output(model: nn.Module, text: Tensor, **more: Tensor) -> Tensor:
    """Logits of a masked LM, vectors of others."""
    bare = model.transformer if isinstance(model, transformers.XLNetLMHeadModel) else model
    found: Tensor = bare(text, **more)[0]
    return found


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_read_equals_transformers(case: str, tmp_path: Path) -> None:
    theirs = make(case)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert isinstance(ours, MaskedLM if "masked" in case else Encoder)
    close(ours(tokens()), output(theirs, tokens()))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_padded_rows_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = make(case)
    theirs.save_pretrained(tmp_path)
    text, mask = tokens(), torch.ones(2, 17, dtype=torch.int64)
    text[1, 11:] = theirs.config.pad_token_id
    mask[1, 11:] = 0
    expected = output(theirs, text, attention_mask=mask)
    got = load(tmp_path)(text, Layout.padded([17, 11]))
    close(got[0], expected[0])
    close(got[1, :11], expected[1, :11])


@torch.no_grad()
def test_segments_equal_transformers(tmp_path: Path) -> None:
    theirs = make("bert masked")
    theirs.save_pretrained(tmp_path)
    types = torch.arange(17).expand(2, -1) // 9
    expected = theirs(tokens(), token_type_ids=types).logits
    close(load(tmp_path)(tokens(), types=types), expected)


@pytest.mark.parametrize("case", [case for case in CASES if "bert" in case.split()])
@torch.no_grad()
def test_written_equals_transformers(case: str, tmp_path: Path) -> None:
    theirs = make(case)
    theirs.save_pretrained(tmp_path / "first")
    save(load(tmp_path / "first"), tmp_path / "second", family="bert")
    again = type(theirs).from_pretrained(tmp_path / "second")
    assert torch.equal(again(tokens())[0], theirs(tokens())[0])


def rewrite(folder: Path, rename: dict[str, str], **more: Tensor) -> None:
    """Store the tensors under other names, and some more."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for old, new in rename.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors | more, path, metadata={"format": "pt"})


@torch.no_grad()
def test_oldest_names_and_bare_models(tmp_path: Path) -> None:
    theirs = make("bert masked")
    theirs.save_pretrained(tmp_path)
    renames = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    rewrite(tmp_path, renames | {"bert.": ""}, **{"cls.seq_relationship.bias": torch.zeros(2)})
    close(load(tmp_path)(tokens()), theirs(tokens()).logits)


def test_heads_for_other_tasks_are_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"classifier\.bias and 1 more"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "is_decoder", True),
        ("bert", "hidden_act", "silu"),
        ("bert masked", "hidden_act", "relu"),
        ("roberta", "pad_token_id", 0),
        ("roberta", "max_position_embeddings", 2),
        ("deberta shared", "pos_att_type", "c2p"),
        ("deberta plain", "pos_att_type", "c2p|p2c"),
        ("deberta shared", "layer_norm_eps", 1e-5),
        ("deberta shared", "conv_kernel_size", 3),
        ("deberta shared", "embedding_size", 16),
        ("xlnet", "attn_type", "uni"),
        ("xlnet", "clamp_len", 10),
    ],
)
def test_what_our_models_cannot_be_is_refused(
    case: str, field: str, value: object, tmp_path: Path
) -> None:
    make(case).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match=f"{field} in "):
        load(tmp_path)
