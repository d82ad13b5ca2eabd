"""Stretched checkpoints run in transformers as in posenc, or say what posenc makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from posenc.errors import CheckpointError
from posenc.extension import applicable, extend_layers
from posenc.integrations.transformers import load, save
from posenc.integrations.transformers.extended import FIELD
from posenc.integrations.transformers.stretched import is_stretched, save_stretched
from posenc.models import Decoder, DecoderConfig
from posenc.models.replacing import encodings_of, with_encodings

transformers = pytest.importorskip("transformers")

LENGTH, FACTOR = 32, 1.5

NATIVE = {
    "dynamic_ntk": "dynamic",
    "interpolate": "linear",
    "llama3": "llama3",
    "longrope": "longrope",
    "ntk": "default",
    "ntk_by_parts": "llama3",
    "yarn": "yarn",
}

METHODS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in (*NATIVE, "rerope", "leaky_rerope", "self_extend", "dual_chunk")),
    *((name, {}) for name in ("string", "drope", "log_n", "direct", "rerope+log_n")),
    ("yarn", {"alpha": 0.5, "beta": 4.0}),
    ("yarn", {"truncate": False, "temperature": 1.25}),
    ("llama3", {"low": 0.5, "high": 2.0}),
    ("self_extend", {"window": 8, "group": 3}),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocabulary=64, dim=32, layers=2, heads=2, max_length=LENGTH))
    folder = tmp_path_factory.mktemp("base") / "model"
    save(model, folder)
    return folder


def stretch(base: Path, out: Path, method: str, options: dict[str, Any]) -> tuple[Decoder, bool]:
    model = load(base)
    assert isinstance(model, Decoder)
    records = extend_layers(encodings_of(model), method, factor=FACTOR, length=LENGTH, **options)
    stretched = with_encodings(model, records)
    known = save_stretched(
        stretched,
        out,
        like=base,
        originals=model.encodings,
        method=method,
        factor=FACTOR,
        length=LENGTH,
        options=options,
    )
    return stretched, known


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_what_is_written_is_what_is_read(
    base: Path, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    stretched, known = stretch(base, tmp_path / "out", method, options)
    tokens = torch.randint(64, (2, round(LENGTH * FACTOR)))
    expected = stretched(tokens)
    torch.testing.assert_close(load(tmp_path / "out")(tokens), expected, rtol=1e-6, atol=1e-6)
    fields = json.loads((tmp_path / "out/config.json").read_text())
    assert known == (method in NATIVE or method == "direct")
    assert is_stretched(tmp_path / "out") == (not known)
    if not known:
        assert fields[FIELD]["method"] == method
        assert fields["max_position_embeddings"] == LENGTH
        return
    if method in NATIVE:
        assert fields["rope_parameters"]["rope_type"] == NATIVE[method]
    assert fields["max_position_embeddings"] == (
        LENGTH if method == "dynamic_ntk" else round(LENGTH * FACTOR)
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.inference_mode():
        torch.testing.assert_close(theirs(tokens).logits, expected, rtol=0, atol=1e-5)


def test_every_method_of_an_encoding_is_here(base: Path) -> None:
    model = load(base)
    fitting = set(applicable(encodings_of(model)[0])) - {"segments"}
    assert fitting == {name for name, _ in METHODS if "+" not in name}


@pytest.mark.parametrize("found", [3, {"method": "yarn"}, {"method": "no", "factor": 2}])
def test_a_damaged_extension_is_named(base: Path, tmp_path: Path, found: object) -> None:
    stretch(base, tmp_path / "out", "rerope", {})
    config = tmp_path / "out/config.json"
    fields = json.loads(config.read_text())
    if isinstance(found, dict) and "factor" in found:
        found = {**fields[FIELD], **found}
    config.write_text(json.dumps({**fields, FIELD: found}))
    with pytest.raises(CheckpointError, match=FIELD):
        load(tmp_path / "out")
