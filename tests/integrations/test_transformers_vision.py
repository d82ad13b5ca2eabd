"""Models of images of transformers: the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from posenc.errors import ArgumentError, CheckpointError
from posenc.integrations.transformers import load, save
from posenc.models import ImageConfig, ImageEncoder, Swin, VisionTransformer

VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": (16, 24),
    "patch_size": 4,
}
SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 3],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 5,
}

CASES: dict[str, tuple[str, dict[str, Any], type[nn.Module]]] = {
    "vit": ("ViTModel", VIT, ImageEncoder),
    "vit labels": ("ViTForImageClassification", VIT | {"num_labels": 5}, VisionTransformer),
    "vit two": ("ViTForImageClassification", VIT | {"hidden_act": "relu"}, VisionTransformer),
    "swin": ("SwinForImageClassification", SWIN, Swin),
    "swin bare": (
        "SwinModel",
        {name: value for name, value in SWIN.items() if name != "num_labels"},
        Swin,
    ),
    "swin one window": (
        "SwinForImageClassification",
        SWIN | {"image_size": 16, "num_channels": 1},
        Swin,
    ),
}


def make(case: str) -> nn.Module:
    kind, fields, _ = CASES[case]
    torch.manual_seed(0)
    architecture = getattr(transformers, kind)
    model: nn.Module = architecture(architecture.config_class(**fields))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def images(model: nn.Module) -> Tensor:
    size = model.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    source = torch.Generator().manual_seed(1)
    return torch.randn(2, model.config.num_channels, height, width, generator=source)


def output(model: nn.Module, pictures: Tensor) -> Tensor:
    """Logits of a classifier, token vectors of others."""
    found = model(pictures)[0] if isinstance(model, ImageEncoder) else model(pictures)
    if isinstance(found, Tensor):
        return found
    vectors: Tensor = found[0]
    return vectors


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_read_equals_transformers(case: str, tmp_path: Path) -> None:
    theirs = make(case)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert type(ours) is CASES[case][2]
    close(output(ours, images(theirs)), output(theirs, images(theirs)))


@torch.no_grad()
def test_swin_reads_other_sizes(tmp_path: Path) -> None:
    theirs = make("swin")
    theirs.save_pretrained(tmp_path)
    pictures = torch.randn(1, 3, 48, 16, generator=torch.Generator().manual_seed(1))
    close(load(tmp_path)(pictures), theirs(pictures).logits)


@pytest.mark.parametrize("case", ["vit", "vit labels", "vit two"])
@torch.no_grad()
def test_written_equals_transformers(case: str, tmp_path: Path) -> None:
    theirs = make(case)
    theirs.save_pretrained(tmp_path / "first")
    save(load(tmp_path / "first"), tmp_path / "second", family="vit")
    again = type(theirs).from_pretrained(tmp_path / "second")
    assert torch.equal(output(again, images(theirs)), output(theirs, images(theirs)))


def test_labels_are_kept(tmp_path: Path) -> None:
    theirs = make("vit labels")
    theirs.config.id2label = dict(enumerate("abcde"))
    theirs.save_pretrained(tmp_path / "first")
    ours = load(tmp_path / "first")
    save(ours, tmp_path / "second", family="vit", like=tmp_path / "first")
    labels = transformers.AutoConfig.from_pretrained(tmp_path / "second").id2label
    assert labels == dict(enumerate("abcde"))


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("vit", "qkv_bias", False),
        ("vit", "patch_size", [4, 2]),
        ("vit", "image_size", "16"),
        ("swin", "use_absolute_embeddings", True),
        ("swin", "mlp_ratio", 2.0),
        ("swin", "depths", 2),
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


def test_another_size_does_not_fit(tmp_path: Path) -> None:
    make("vit").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_size": 16}))
    with pytest.raises(CheckpointError, match=r"position_embeddings of shape \[1, 17, 32\]"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"encoding": "rope2d"}, "Rope2d"),
        ({"special": 0}, "special=0"),
        ({"overlap": 1}, "overlap=1"),
        ({"norm": "rms"}, "norm="),
    ],
)
def test_what_is_no_vit_is_not_written(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    fields = {"size": (16, 16), "patch": 4, "dim": 32, "layers": 1, "heads": 2} | changes
    with pytest.raises(ArgumentError, match=named):
        save(ImageEncoder(ImageConfig(**fields)), tmp_path / "out", family="vit")
