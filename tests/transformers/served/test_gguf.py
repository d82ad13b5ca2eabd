"""GGUF files and the options of llama.cpp."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from posenc.errors import CheckpointError
from posenc.transformers import check_served
from posenc.transformers.served.gguf import launch_of, read_gguf
from posenc.transformers.served.settings import launches
from tests.transformers.engines.released import TRAINED
from tests.transformers.engines.test_loaded import made
from tests.transformers.served.gguf_files import LLAMA, write_gguf
from tests.transformers.served.test_checking import GAIN, LONG, WHOLE, of, trained

pytest.importorskip("transformers")

YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 128,
    "llama.context_length": LONG,
}
OPTIONS = "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 128 -c 512"


def served(at: Path, options: str = "", more: dict[str, Any] | None = None, **tensors: Any) -> Any:
    path = write_gguf(at / "model.gguf", LLAMA | (more or {}), tensors)
    return check_served(trained(), f"llama-server -m {path} {options}")[0]


def test_the_metadata_is_read(tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": [1.0, 2.0], "other": [3.0] * 5}
    values, found = read_gguf(write_gguf(tmp_path / "x.gguf", LLAMA | {"a.flag": True}, tensors))
    assert values == LLAMA | {"a.flag": True} | {
        "tokenizer.ggml.tokens": None,
        "tokenizer.ggml.scores": (0.5, 1.0),
    }
    assert found == {"rope_freqs.weight": (1.0, 2.0)}


def test_a_file_that_was_converted_after_training(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", LLAMA | YARN)
    assert check_served(trained(), path)[0].same
    assert served(tmp_path, more=YARN).same


def test_a_file_of_before_with_options(tmp_path: Path) -> None:
    found = served(tmp_path)
    assert of(found) == {
        "scaling": ("yarn by 4", "none"),
        "gain": (f"{GAIN:.5g}", "1"),
        "longest text": ("512", "128"),
    }
    assert found.remedy == f"-c 512 --rope-freq-base 500000 {OPTIONS[:-7]}"
    assert served(tmp_path, found.remedy).same
    assert served(tmp_path, OPTIONS).same
    assert served(tmp_path, OPTIONS.replace("--rope-scale 4", "--rope-freq-scale 0.25")).same


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--rope-scale 8", {"scaling": ("yarn by 4", "yarn by 8")}),
        ("--rope-scaling none", {"scaling": ("yarn by 4", "none")}),
        ("--rope-scaling linear", {"scaling": ("yarn by 4", "linear by 4")}),
        ("--yarn-ext-factor 0", {"scaling": ("yarn by 4", "linear by 4")}),
        ("--rope-freq-base 10000", {"base": ("500,000", "10,000")}),
        ("--yarn-orig-ctx 64", {"trained length": ("128", "64")}),
        ("--yarn-attn-factor 2", {}),
        ("--yarn_beta_slow 4", {"frequencies": ("these", "others")}),
        ("--ctx-size 256", {"longest text": ("512", "256")}),
        ("-np 2", {"longest text": ("512", "256")}),
        ("-np 2 --kv-unified", {}),
        ("--override-kv llama.context_length=int:256", {"longest text": ("512", "256")}),
        (
            "--override-kv=llama.rope.scaling.factor=float:2",
            {"scaling": ("yarn by 4", "yarn by 2")},
        ),
        ("--override-kv llama.rope.scaling.type=str:none", {"scaling": ("yarn by 4", "none")}),
    ],
)
def test_options_of_llama_cpp(tmp_path: Path, options: str, expected: dict[str, Any]) -> None:
    found = of(served(tmp_path, options, YARN))
    found.pop("gain", None)
    assert found == expected


def test_the_gain_of_an_option(tmp_path: Path) -> None:
    key = "--override-kv llama.rope.scaling.attn_factor=float:2"
    assert of(served(tmp_path, key, YARN)) == {"gain": (f"{GAIN:.5g}", f"{2 * GAIN:.5g}")}
    plain = made(rope_theta=5e5, max_position_embeddings=128)
    path = write_gguf(tmp_path / "plain.gguf", LLAMA)
    [found] = check_served(plain, f"llama-server -m {path} --yarn-attn-factor 2")
    assert of(found) == {"gain": ("1", "2")}, "without YaRN it counts"


def test_factors_in_tensors(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, TRAINED: 128}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = made(rope_parameters=llama3, max_position_embeddings=128)
    theta = model.model.rotary_emb.inv_freq.tolist()
    factors = [5e5 ** (-t / 16) / theta[t] for t in range(16)]
    path = write_gguf(tmp_path / "model.gguf", LLAMA, {"rope_freqs.weight": factors})
    assert check_served(model, path)[0].same
    path = write_gguf(tmp_path / "lost.gguf", LLAMA)
    [found] = check_served(model, path)
    assert of(found) == {"scaling": ("llama3 by 8", "none")}
    assert found.remedy.startswith("python convert_hf_to_gguf.py")


def test_the_side_of_longrope_is_that_of_the_context(tmp_path: Path) -> None:
    factors = {"rope_factors_short.weight": [1.0] * 16, "rope_factors_long.weight": [2.0] * 16}
    keys = {k: v for k, v in YARN.items() if k.endswith("_length")}
    gain = {"llama.rope.scaling.attn_factor": 1.19}
    path = write_gguf(tmp_path / "model.gguf", LLAMA | keys | gain, factors)
    for context, slowest in ((128, 1.0), (LONG, 2.0)):
        [launch] = launches(f"llama-server -m {path} -c {context}")
        rotation = launch.rotations(64)[""]
        assert rotation.frequencies[0] == pytest.approx(1 / slowest)
        assert rotation.gain == pytest.approx(1.19)


def test_windows_have_a_base_of_their_own(tmp_path: Path) -> None:
    keys = {"general.architecture": "gemma3"}
    keys |= {k.replace("llama", "gemma3"): v for k, v in LLAMA.items() if k.startswith("llama")}
    keys |= {"gemma3.attention.sliding_window": 16, "gemma3.rope.scaling.factor": 8.0}
    launch = launch_of(write_gguf(tmp_path / "model.gguf", keys))
    full, window = (launch.rotations(1)[k] for k in ("full_attention", "sliding_attention"))
    assert full.frequencies[1] == pytest.approx(5e5 ** (-1 / 16) / 8)
    assert window.frequencies[1] == pytest.approx(1e4 ** (-1 / 16))


def test_latent_attention_reads_its_logarithm(tmp_path: Path) -> None:
    keys = LLAMA | YARN | {"llama.rope.scaling.yarn_log_multiplier": 0.5}
    [gain] = {
        r.gain for r in launch_of(write_gguf(tmp_path / "m.gguf", keys)).rotations(1).values()
    }
    assert gain == pytest.approx(GAIN / (0.05 * math.log(4) + 1))


@pytest.mark.parametrize("size", [0, 3, 12, 40, 200])
def test_files_that_end_early(tmp_path: Path, size: int) -> None:
    path = write_gguf(tmp_path / "model.gguf", LLAMA)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="expected a GGUF file of version 2 or 3"):
        launch_of(path)


@pytest.mark.parametrize("missing", ["llama.context_length", "llama.attention.head_count"])
def test_files_without_sizes(tmp_path: Path, missing: str) -> None:
    keys = {name: value for name, value in LLAMA.items() if name != missing}
    with pytest.raises(CheckpointError, match="sizes of a model with RoPE"):
        launch_of(write_gguf(tmp_path / "model.gguf", keys))


def test_the_config_and_the_file_are_read_alike(tmp_path: Path) -> None:
    """By the rules of the converter, and by those of the program."""
    config = trained().config.to_dict()
    [by_config] = [x for x in launches(config) if x.engine.name == "llama.cpp"]
    by_file = launch_of(write_gguf(tmp_path / "model.gguf", LLAMA | YARN))
    assert by_config.rotations(LONG)[""].like(by_file.rotations(LONG)[""])
    assert WHOLE["rope_theta"] == by_file.ropes[""].base
