"""``posenc extend`` and ``evaluate`` on models that only transformers reads."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from posenc.errors import ArgumentError, CheckpointError
from posenc.extension import segments
from posenc.lab.evaluation.checkpoint import Checkpoint
from posenc.lab.evaluation.evaluate import evaluate
from posenc.lab.evaluation.extend import extend_checkpoint
from posenc.lab.evaluation.settings import Tuning
from posenc.layout import Layout
from posenc.transformers import stretch
from posenc.transformers.live import LiveDecoder, LiveImages
from tests.support.tiny_models import tiny_model

LENGTH = 16

MODERNBERT = {"vocab_size": 257, "hidden_size": 32, "num_attention_heads": 2, "pad_token_id": 0}
MODERNBERT |= {"intermediate_size": 32, "max_position_embeddings": LENGTH, "local_attention": 8}
MODERNBERT |= {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
MODERNBERT |= {"initializer_range": 0.5, "initializer_cutoff_factor": 2.0}
MODERNBERT |= dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 60)
    return path


def folder_of(path: Path, kind: str, **sizes: Any) -> Path:
    """A folder with a tiny model that reads bytes."""
    model = tiny_model(kind, vocab_size=256, max_position_embeddings=LENGTH, **sizes)
    model.save_pretrained(path)
    return path


def test_a_folder_becomes_one_that_transformers_runs(tmp_path: Path, text: Path) -> None:
    folder = folder_of(tmp_path / "in", "qwen3", num_hidden_layers=1)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    methods = "yarn@alpha=0.1@beta=1,rerope"
    given = {"methods": methods, "factor": 2.0, "text": text, "always": True}
    done = extend_checkpoint(folder, tmp_path / "out", **given)
    read = {finding.key for finding in done.study.findings if finding.untuned is not None}
    assert read == {"direct", "window", *methods.split(",")}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert (tmp_path / "out" / "report").is_dir()


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("qwen3", {}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_the_written_folder_loads_in_transformers_alone(
    kind: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "in", kind, **sizes)
    done = extend_checkpoint(folder, tmp_path / "yarn", methods="yarn", factor=2.0, report=False)
    assert done.native
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "yarn")
    parameters = loaded.config.rope_parameters
    assert "yarn" in (parameters.get("full_attention") or parameters)["rope_type"]
    assert loaded.config.max_position_embeddings == 2 * LENGTH
    model = AutoModelForCausalLM.from_pretrained(folder)
    stretch(model, "yarn", factor=2)
    ids = torch.arange(30).unsqueeze(0)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, loaded(ids).logits, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_is_extended_and_left_as_it_was(tmp_path: Path, dtype: torch.dtype) -> None:
    folder, ids = folder_of(tmp_path / "in", "qwen3"), torch.arange(30).unsqueeze(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    with torch.no_grad():  # as training would
        model.model.embed_tokens.weight.mul_(2)
        before = model(ids).logits
    options: dict[str, Any] = {"methods": "yarn", "factor": 2.0, "report": False}
    extend_checkpoint(model, tmp_path / "out", **options)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert model.training
    assert model.dtype == dtype
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == dtype
    stretch(model, "yarn", factor=2)
    with torch.no_grad():
        found, expected = loaded(ids).logits, model(ids).logits
    assert torch.allclose(found, expected, atol=1e-5 if dtype == torch.float32 else 5e-2)
    other = AutoModelForCausalLM.from_pretrained(folder)
    stretch(other, "rerope", factor=2)
    with pytest.raises(CheckpointError, match="has not stretched yet"):
        extend_checkpoint(other, tmp_path / "again", **options)


def test_a_loaded_model_is_measured_by_the_tokenizer_of_its_folder(
    tmp_path: Path, text: Path
) -> None:
    folder = folder_of(tmp_path / "in", "qwen3", num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    subjects = Checkpoint.of_model(model), Checkpoint.open(folder)
    losses = []
    for subject in subjects:
        assert (subject.name, subject.family, subject.length) == ("in", "qwen3", LENGTH)
        study = evaluate(subject, subject.data(text=text), lengths=(8, 16))
        losses.append(study.findings[0].untuned.loss)
    assert losses[0] == losses[1]
    made = Checkpoint.of_model(tiny_model("qwen3", max_position_embeddings=LENGTH))
    with pytest.raises(CheckpointError, match="made in memory"):
        made.data(text=text)
    with pytest.raises(CheckpointError, match="adapters merged"):
        Checkpoint.of_model(transformers.Qwen3ForSequenceClassification(made.model.model.config))


def test_what_transformers_lacks_is_stretched_when_it_is_opened(tmp_path: Path, text: Path) -> None:
    folder = folder_of(tmp_path / "in", "smollm3", no_rope_layers=[1, 0])
    done = extend_checkpoint(folder, tmp_path / "out", methods="rerope", factor=2.0, report=False)
    assert not done.native
    opened = Checkpoint.open(tmp_path / "out")
    ids = torch.arange(30).unsqueeze(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        plain = model(ids).logits
        stretch(model, "rerope", factor=2)
        expected = model(ids).logits
        assert torch.allclose(expected, opened.model(ids), atol=1e-5)
        assert not torch.allclose(plain, expected, atol=1e-3)
    study = evaluate(opened, opened.data(text=text), lengths=(8, 16))
    assert study.findings[0].untuned is not None
    with pytest.raises(CheckpointError, match="has not stretched yet"):
        extend_checkpoint(tmp_path / "out", tmp_path / "again", methods="yarn", report=False)


def test_masked_models_are_measured_beside_texts_cut_to_their_length(
    tmp_path: Path, text: Path
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("modernbert", **MODERNBERT)
    folder, out = tmp_path / "in", tmp_path / "out"
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    done = extend_checkpoint(folder, out, methods="yarn,segments", text=text, always=True, factor=2)
    losses = {finding.key: finding.untuned.loss for finding in done.study.findings}
    assert list(losses) == ["direct", "cut", "yarn", "segments"]
    direct, cut, yarn, _ = losses.values()
    assert direct[LENGTH] == cut[LENGTH] == cut[2 * LENGTH]
    assert len({direct[2 * LENGTH], cut[2 * LENGTH], yarn[2 * LENGTH]}) == 3
    loaded, stretched = (AutoModelForMaskedLM.from_pretrained(f) for f in (out, folder))
    stretch(stretched, "yarn", factor=2)
    ids = torch.arange(30).unsqueeze(0)
    with torch.no_grad():
        assert torch.allclose(stretched(ids).logits, loaded(ids).logits, atol=1e-5)
    study = evaluate(Checkpoint.open(folder), Checkpoint.open(folder).data(text=text))
    assert [finding.key for finding in study.findings] == ["direct"]
    with pytest.raises(ArgumentError, match="finetune_steps"):
        extend_checkpoint(folder, tmp_path / "t", text=text, factor=2.0, tuning=Tuning(steps=1))


VISION: dict[str, Any] = {"image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 16}
VISION |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SWIN: dict[str, Any] = {"image_size": 8, "patch_size": 2, "num_channels": 1, "embed_dim": 8}
SWIN |= {"depths": [1], "num_heads": [2], "window_size": 2}


@pytest.mark.parametrize(
    ("kind", "sizes", "head", "tabled"),
    [
        ("dinov2", VISION, "AutoModelForImageClassification", True),
        ("clip_vision_model", VISION, "AutoModel", True),
        ("deit", VISION, "AutoModel", True),
        ("beit", VISION, "AutoModelForImageClassification", False),
        ("swin", SWIN, "AutoModelForImageClassification", False),
    ],
)
def test_models_of_images(
    kind: str, sizes: dict[str, Any], head: str, tabled: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    auto = getattr(transformers, head)
    auto.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(tmp_path / "in")
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images)
    checkpoint = Checkpoint.open(tmp_path / "in")
    study = evaluate(checkpoint, checkpoint.data(images=tmp_path / "images.npz"), lengths=[16])
    assert study.lengths == (8, 16)
    (finding,) = study.findings
    assert finding.key == ("interpolate" if tabled else "direct")
    assert finding.untuned.cosine[8] == pytest.approx(1, abs=1e-5)
    extended = partial(
        extend_checkpoint, tmp_path / "in", tmp_path / "out", methods="interpolate", factor=2.0
    )
    if not tabled:
        with pytest.raises(ArgumentError):
            extended(report=False)
        return
    assert extended(images=tmp_path / "images.npz", always=True).native
    loaded = auto.from_pretrained(tmp_path / "out").eval()
    assert getattr(loaded.config, "vision_config", loaded.config).image_size == 16
    assert loaded(torch.zeros(1, 1, 16, 16))[0].shape[0] == 1


@torch.no_grad()
def test_a_picture_says_nothing_of_the_next() -> None:
    """Layers of Swin change for good at a picture that one of their windows spans."""
    torch.manual_seed(0)
    sizes = SWIN | {"image_size": 16, "depths": [2], "window_size": 4}
    model = LiveImages(AutoModel.from_config(AutoConfig.for_model("swin", **sizes)).eval())
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    large, small = torch.randn(1, 1, 32, 32), torch.randn(1, 1, 8, 8)
    before = model(large)[0]
    model(small)
    assert torch.equal(model(large)[0], before)


@torch.no_grad()
def test_windows_and_layouts() -> None:
    model = LiveDecoder(tiny_model("qwen3", vocab_size=256))
    ids = torch.randint(256, (2, 20))
    near = model.cut(5)(ids)
    one_layer = LiveDecoder(tiny_model("qwen3", vocab_size=256, num_hidden_layers=1))
    cut, whole = one_layer.cut(5)(ids)[:, -1:], one_layer(ids[:, -5:])[:, -1:]
    assert torch.allclose(cut, whole, atol=1e-5)  # RoPE depends on distances alone
    assert torch.allclose(model(ids)[:, :5], near[:, :5], atol=1e-5)
    assert torch.allclose(model(ids), model(ids, Layout.sequence(20, 7)), atol=1e-4)
    assert segments(model, length=8)(ids).shape == (2, 20, 256)
    assert LiveDecoder(tiny_model("gemma3_text")).windowed


def test_folders_and_arguments_that_cannot_be_served_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "in", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config["layer_types"] = ["full_attention"] * 3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no model\.layers\.2"):
        Checkpoint.open(folder)
    (folder / "model.safetensors").write_bytes(b"none")
    with pytest.raises(CheckpointError, match="a complete safetensors file"):
        Checkpoint.open(folder)
