"""Test vectors of rotations, read back from the file and compared with transformers' own."""

from __future__ import annotations

import cmath
import copy
import importlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from posenc import __version__
from posenc.errors import OutputError
from posenc.transformers.engines import ENGINES, ModelConfig, vectors, write_vectors
from tests.support.commands import printed, printed_json, refusal
from tests.transformers.engines.released import RELEASED, TRAINED

transformers = pytest.importorskip("transformers")
rope_utils = importlib.import_module("transformers.modeling_rope_utils")

NAMES = [name for configs in vectors.CONFIGS.values() for name in configs]
CONFIRMED = {
    "Llama 3.1 8B": "Llama-3.1-8B",
    "Qwen3 8B, YaRN of its card": "Qwen3-8B, YaRN of its card",
    "gpt-oss 20B": "gpt-oss-20b",
    "Gemma 3 4B": "Gemma-3-4B",
    "DeepSeek-V3": "DeepSeek-V3",
}
"""Cases of released models whose config the tests have too, as it was published."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vectors") / "rotations.json"
    assert write_vectors(path) == len(NAMES)
    return path


@pytest.fixture(scope="module")
def written(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_text())
    return values


def case_of(written: dict[str, Any], name: str) -> dict[str, Any]:
    cases: dict[str, dict[str, Any]] = {case["name"]: case for case in written["cases"]}
    assert len(cases) == len(written["cases"]) == len(NAMES)
    return cases[name]


def rotations(written: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for case in written["cases"]:
        yield from case["rotations"]


def config_of(case: dict[str, Any]) -> Any:
    fields = copy.deepcopy(case["config"])
    return transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)


def part_of(config: Any, ending: str) -> Any:
    """The class of the config's own module whose name ends so, that of texts."""
    place = type(config).__module__.replace("configuration_", "modeling_")
    classes = [
        found
        for name, found in vars(importlib.import_module(place)).items()
        if name.endswith(ending) and found.__module__ == place
    ]
    (found,) = (c for c in classes if len(classes) == 1 or c.__name__.endswith(f"Text{ending}"))
    return found


def test_the_file_says_what_it_is(written: dict[str, Any]) -> None:
    assert (written["format"], written["version"]) == ("posenc rotation vectors", 1)
    assert written["posenc"] == __version__
    fields = {f for line in written["conventions"] for f in line.split(":")[0].split(", ")}
    assert all(set(rotation) == fields | {"positions"} for rotation in rotations(written))


def test_every_scaling_of_transformers_has_a_case(written: dict[str, Any]) -> None:
    texts = set(rope_utils.ROPE_INIT_FUNCTIONS) - {"axial"}  # of pictures
    assert texts <= set(re.findall(r'"rope_type": "(\w+)"', json.dumps(written["cases"])))


@pytest.mark.parametrize("name", NAMES)
def test_frequencies_and_factor_are_those_of_transformers(
    name: str, written: dict[str, Any]
) -> None:
    case = case_of(written, name)
    config = config_of(case)
    for rotation in case["rotations"]:
        layer_type, length = rotation["layer_type"] or None, rotation["text_length"]
        parameters = config.rope_parameters
        parameters = parameters[layer_type] if layer_type else parameters
        kind = parameters["rope_type"]
        if kind == "default":
            module = part_of(config, "RotaryEmbedding")(config=config)
            theta, factor = (
                getattr(module, f"{layer_type}_inv_freq" if layer_type else "inv_freq"),
                1,
            )
        else:
            theta, factor = rope_utils.ROPE_INIT_FUNCTIONS[kind](
                config, torch.device("cpu"), seq_len=length, layer_type=layer_type
            )
        assert rotation["frequencies"] == pytest.approx(theta.tolist(), rel=2e-6, abs=1e-30)
        assert rotation["attention_factor"] == pytest.approx(factor, rel=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_cosines_and_sines_are_those_of_the_modules_of_transformers(
    name: str, written: dict[str, Any]
) -> None:
    """In float32, whose angles are right to a share of 1e-6: at positions up to 100."""
    case = case_of(written, name)
    config = config_of(case)
    for rotation in case["rotations"]:
        module = part_of(config, "RotaryEmbedding")(config=config)
        last = (rotation["text_length"] or 101) - 1
        positions = [p for p in rotation["positions"] if p <= 100]
        ids = torch.tensor([[*positions, last]])
        more = {"layer_type": rotation["layer_type"]} if rotation["layer_type"] else {}
        cos, sin = module(torch.empty(1, 1, 1), ids, **more)
        pairs = len(rotation["frequencies"])
        interleaved = cos.shape[-1] == 2 * pairs and bool(
            (cos[0, 1, 0::2] == cos[0, 1, 1::2]).all()
        )
        for name, found in (("cosines", cos), ("sines", sin)):
            one = found[0, :-1, ::2] if interleaved else found[0, :-1, :pairs]
            rows = torch.tensor(rotation[name][: len(positions)], dtype=torch.float64)
            expected = rows * rotation["attention_factor"]
            torch.testing.assert_close(one.double(), expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_the_rotation_of_one_token_to_the_power_of_its_position(
    name: str, written: dict[str, Any]
) -> None:
    for rotation in case_of(written, name)["rotations"]:
        positions = rotation["positions"]
        assert positions == sorted(set(positions))
        assert positions[:5] == [0, 1, 2, 3, 100]
        for p, cosines, sines in zip(
            positions, rotation["cosines"], rotation["sines"], strict=True
        ):
            rotated = [cmath.exp(1j * theta) ** p for theta in rotation["frequencies"]]
            assert cosines == pytest.approx([z.real for z in rotated], abs=1.2e-8)
            assert sines == pytest.approx([z.imag for z in rotated], abs=1.2e-8)


@pytest.mark.parametrize("name", NAMES)
def test_the_logit_scale_is_what_attention_multiplies_its_scale_by(
    name: str, written: dict[str, Any]
) -> None:
    """In attention of transformers, beside the same one without ``mscale_all_dim``."""
    case = case_of(written, name)
    scaled, plain = config_of(case), config_of(case)
    plain.rope_parameters.pop("mscale_all_dim", None)
    attention = part_of(scaled, "Attention")
    with torch.device("meta"):
        scale, usual = (attention(config, layer_idx=0).scaling for config in (scaled, plain))
    for rotation in case["rotations"]:
        assert rotation["logit_scale"] == pytest.approx(scale / usual)


def test_gains_by_hand(written: dict[str, Any]) -> None:
    """0.1 ln 4 + 1; of DeepSeek-V3 (0.1 ln 40 + 1)² on logits instead, about 1.8738."""
    (yarn,) = case_of(written, "yarn")["rotations"]
    assert (yarn["attention_factor"], yarn["logit_scale"]) == (1.1386294361, 1)
    (latent,) = case_of(written, "DeepSeek-V3")["rotations"]
    assert latent["attention_factor"] == 1
    assert latent["logit_scale"] == pytest.approx(1.8738, abs=1e-4)
    for rotation in case_of(written, "Phi-3 vision 128k")["rotations"]:
        gain = math.sqrt(1 + math.log(32) / math.log(4096))
        assert rotation["attention_factor"] == pytest.approx(gain)


@pytest.mark.parametrize("name", CONFIRMED)
def test_released_models_rotate_as_their_published_config(
    name: str, written: dict[str, Any]
) -> None:
    case, published = case_of(written, name), ModelConfig.of(RELEASED[CONFIRMED[name]])
    found = ENGINES["transformers"].rotations(published, 1)
    assert {r["layer_type"] for r in case["rotations"]} == set(found)
    for rotation in case["rotations"]:
        expected = found[rotation["layer_type"]]
        assert rotation["frequencies"] == pytest.approx(expected.frequencies, rel=1e-10)
        assert rotation["attention_factor"] == pytest.approx(expected.gain, rel=1e-10)
        assert rotation["positions"][-1] + 1 == published.longest


def test_factors_of_a_released_model_are_as_many_as_pairs_and_grow() -> None:
    parameters = vectors.CONFIGS["models"]["Phi-3 vision 128k"]["rope_parameters"]
    for side in ("short_factor", "long_factor"):
        assert len(parameters[side]) == 48
        assert parameters[side] == sorted(parameters[side])
    assert parameters[TRAINED] == 4096


@pytest.mark.parametrize(("name", "at"), [("dynamic", 8192), ("longrope", 2048)])
def test_rotations_that_depend_on_the_length_change_after_the_trained_one(
    name: str, at: int, written: dict[str, Any]
) -> None:
    found = case_of(written, name)["rotations"]
    lengths = [rotation["text_length"] for rotation in found]
    assert lengths[:2] == [at, at + 1]
    assert lengths[2] > at + 1
    assert all(rotation["positions"][-1] == rotation["text_length"] - 1 for rotation in found)
    assert found[0]["frequencies"] != found[1]["frequencies"]
    others = (r for case in written["cases"] for r in case["rotations"] if case["name"] != name)
    assert None in {rotation["text_length"] for rotation in others}


def test_no_number_is_nearer_to_a_tie_than_the_rounding_of_float64(
    monkeypatch: pytest.MonkeyPatch, written: dict[str, Any]
) -> None:
    """So that a C library whose last bits differ gives the same file."""
    monkeypatch.setattr(vectors, "SIGNIFICANT", 17)
    for exact, rounded in zip(
        rotations(vectors.rotation_vectors()), rotations(written), strict=True
    ):
        names = ("attention_factor", "logit_scale")
        exact_values = [*exact["frequencies"], *(exact[name] for name in names)]
        values = [*rounded["frequencies"], *(rounded[name] for name in names)]
        for value, kept in zip(exact_values, values, strict=True):
            for near in (value * (1 - 1e-15), value * (1 + 1e-15)):
                assert float(f"{near:.11g}") == kept
        for p, *rows in zip(
            rounded["positions"], rounded["cosines"], rounded["sines"], strict=True
        ):
            for function, row in zip((math.cos, math.sin), rows, strict=True):
                for theta, kept in zip(rounded["frequencies"], row, strict=True):
                    for error in (-1e-15, 1e-15):
                        assert round(function(p * theta) + error, 8) == kept


def test_the_file_is_the_same_each_time_and_short_in_lines(file: Path, tmp_path: Path) -> None:
    write_vectors(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == file.read_bytes()
    assert len(file.read_text().splitlines()) < 2000


def test_the_command_writes_the_same_file(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert f"{len(NAMES)} cases" in printed("engines", "--vectors", out)
    assert out.read_bytes() == file.read_bytes()
    assert printed_json("engines", "--vectors", out) == {"vectors": str(out), "cases": len(NAMES)}


def test_the_command_lists_engines() -> None:
    listed = printed_json("engines")
    assert [engine["name"] for engine in listed] == list(ENGINES)
    told = printed("engines")
    assert all(engine["option"] in told and engine["read"] in told for engine in listed)


@pytest.mark.parametrize("name", ["", "rotations", "rotations.txt", "folder.json", "no/v.json"])
def test_files_that_cannot_be_written_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    path = tmp_path / name if name else ""
    assert "--vectors: expected" in refusal("engines", "--vectors", path)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


def test_a_file_that_cannot_be_written_from_python(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="expected to write"):
        write_vectors(tmp_path)
