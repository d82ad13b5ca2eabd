"""A loaded model beside the servers that are to run it: differences and remedies."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from posenc.errors import ArgumentError
from posenc.lab.evaluation.extend import extend_checkpoint
from posenc.transformers import check_served
from posenc.transformers.engines import ENGINES
from posenc.transformers.served import CheckedServer, ServedDifference
from posenc.transformers.served.launch import windows
from tests.transformers.engines.released import TRAINED
from tests.transformers.engines.test_loaded import made

transformers = pytest.importorskip("transformers")

SHORT, LONG = 128, 512
YARN = {"rope_type": "yarn", "factor": 4.0, TRAINED: SHORT}
WHOLE = YARN | {"rope_theta": 5e5}
GAIN = 0.1 * math.log(4) + 1


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model as it was."""
    folder = tmp_path_factory.mktemp("a model") / "in"
    made(rope_theta=5e5, max_position_embeddings=SHORT).save_pretrained(folder)
    return folder


def trained(**fields: Any) -> Any:
    return made(**{"rope_parameters": WHOLE, "max_position_embeddings": LONG} | fields)


def vllm(folder: Path, overrides: dict[str, Any], longest: int = LONG) -> CheckedServer:
    settings = {"model": str(folder), "hf_overrides": overrides, "max_model_len": longest}
    return check_served(trained(), settings)[0]


def sglang(folder: Path, overrides: dict[str, Any]) -> CheckedServer:
    command = f"python -m sglang.launch_server --model-path {shlex.quote(str(folder))} "
    command += f"--json-model-override-args {shlex.quote(json.dumps(overrides))}"
    return check_served(trained(), f"{command} --context-length {LONG}")[0]


def of(one: CheckedServer) -> dict[str, tuple[str, str]]:
    return {m.what: (m.trained, m.served) for m in one.mismatches}


LENGTHS = {"max_position_embeddings": LONG}


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_overrides_of_vllm_replace_the_base_too(before: Path, name: str) -> None:
    """SkyRL 976 and vLLM's recipes pass a scaling alone; vLLM 0.32 then rotates by base 10,000."""
    found = vllm(before, {name: YARN} | LENGTHS)
    assert of(found) == {"base": ("500,000", "10,000")}
    assert found.mismatches[0].effect.startswith("15 of 16 pairs differ")
    words = shlex.split(found.remedy)
    assert words[0::2] == ["--hf-overrides", "--max-model-len"]
    assert words[3] == str(LONG)
    assert vllm(before, json.loads(words[1])).same


def test_overrides_of_sglang_keep_the_base(before: Path) -> None:
    for name in ("rope_parameters", "rope_scaling"):
        assert sglang(before, {name: YARN} | LENGTHS).same


def test_a_base_beside_the_parameters_is_not_read(before: Path) -> None:
    """By vLLM 0.32 and SGLang 0.5.23, which have it in the parameters."""
    overrides = {"rope_theta": 7.0, "rope_parameters": WHOLE} | LENGTHS
    assert vllm(before, overrides).same
    assert sglang(before, overrides).same
    assert of(vllm(before, {"rope_theta": 5e5, "rope_parameters": YARN} | LENGTHS))["base"]


def test_a_base_of_the_family_stands_in_for_one_that_is_lost(tmp_path: Path) -> None:
    scaled = YARN | {"rope_theta": 1e6}
    made("qwen3", rope_theta=1e6, max_position_embeddings=SHORT).save_pretrained(tmp_path)
    model = made("qwen3", rope_parameters=scaled, **LENGTHS)
    settings = {"model": str(tmp_path), "max_model_len": LONG}
    settings["hf_overrides"] = {"rope_parameters": YARN} | LENGTHS
    assert check_served(model, settings)[0].same


def test_a_scaling_that_the_server_does_not_get(before: Path) -> None:
    """unsloth 3083: vLLM was started without it; the length alone is refused."""
    found = vllm(before, {})
    assert of(found)["scaling"] == ("yarn by 4", "none")
    assert of(found)["gain"] == (f"{GAIN:.5g}", "1")
    gain = next(m for m in found.mismatches if m.what == "gain")
    assert gain.effect == f"logits {GAIN**-2:.3g} times as large"
    assert "--max-model-len 512 is more than the 128 tokens" in str(found.mismatches[0])


def test_a_factor_that_is_applied_twice(before: Path) -> None:
    twice = WHOLE | {"factor": 16.0}
    assert of(vllm(before, {"rope_parameters": twice} | LENGTHS)) == {
        "scaling": ("yarn by 4", "yarn by 16"),
        "gain": (f"{GAIN:.5g}", f"{0.1 * math.log(16) + 1:.5g}"),
    }


def test_a_gain_that_is_lost(before: Path) -> None:
    model = trained(rope_parameters=WHOLE | {"attention_factor": 1.0})
    settings = {"model": str(before), "max_model_len": LONG}
    settings["hf_overrides"] = {"rope_parameters": WHOLE} | LENGTHS
    [found] = check_served(model, settings)
    assert of(found) == {"gain": ("1", f"{GAIN:.5g}")}
    given = json.loads(shlex.split(found.remedy)[1])
    assert given["rope_parameters"]["attention_factor"] == 1.0
    [served] = check_served(model, str(before), engine="sglang")
    assert served.remedy.startswith("No option of SGLang computes it.")


def test_a_ramp_of_another_length(before: Path) -> None:
    found = vllm(before, {"rope_parameters": WHOLE | {TRAINED: 64}} | LENGTHS)
    assert of(found) == {"trained length": ("128", "64")}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, f"have no {TRAINED}"),
        ({"rope_parameters": {"type": "yarn", "factor": 4.0}}, "need rope_type, not type"),
    ],
)
def test_overrides_that_vllm_does_not_start_with(
    before: Path, given: dict[str, Any], reason: str
) -> None:
    [start, *_] = vllm(before, given | LENGTHS).mismatches
    assert reason in start.served


def test_the_longest_text(before: Path) -> None:
    """NeMo-RL, ms-swift 5146: the server's is shorter than that of training."""
    [short] = vllm(before, {"rope_parameters": WHOLE} | LENGTHS, longest=256).mismatches
    assert (short.what, short.trained, short.served) == ("longest text", "512", "256")
    settings = f"vllm serve {shlex.quote(str(before))} --hf-overrides.rope_parameters "
    settings += shlex.quote(json.dumps(WHOLE)) + " --max-model-len 512"
    assert not check_served(trained(), settings)[0].same
    [allowed] = check_served(trained(), f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 {settings}")
    assert allowed.same
    [enough] = check_served(trained(), f"{settings[:-3]}128", longest=128)
    assert enough.same


def test_the_side_of_longrope_by_the_served_length(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "rope_type": "longrope"}
    scaling = factors | {TRAINED: SHORT, "factor": 4.0, "rope_theta": 1e4}
    model = made(rope_parameters=scaling, max_position_embeddings=LONG, **{TRAINED: SHORT})
    model.save_pretrained(tmp_path)
    [short] = check_served(model, f"vllm serve {tmp_path} --max-model-len 128", longest=128)
    assert short.same
    [long] = check_served(model, f"vllm serve {tmp_path} --max-model-len 512")
    [side] = long.mismatches
    assert side.what == "frequencies"
    assert side.trained == "those of longrope for 128 tokens"
    assert side.served == "those of longer texts"
    assert long.remedy.startswith("No option of vLLM computes it.")
    [usual] = check_served(model, f"vllm serve {tmp_path}")
    assert of(usual) == {"longest text": ("512", "128")}


def test_windows_that_are_switched_off(tmp_path: Path) -> None:
    model = made("mistral", sliding_window=32, max_position_embeddings=SHORT)
    model.save_pretrained(tmp_path)
    assert check_served(model, f"vllm serve {tmp_path}")[0].same
    [found] = check_served(model, f"vllm serve {tmp_path} --disable-sliding-window")
    assert of(found)["window of layers 0, 1"] == ("32 tokens", "none")
    assert of(found)["longest text"] == ("128", "32")
    settings = {"model": str(tmp_path), "json_model_override_args": {"sliding_window": 16}}
    [found] = check_served(model, settings)
    assert of(found) == {"window of layers 0, 1": ("32 tokens", "16 tokens")}


def test_layers_of_several_types(tmp_path: Path) -> None:
    fields = {"max_position_embeddings": SHORT, "sliding_window": 16}
    model = made("gemma3_text", **fields, layer_types=["sliding_attention", "full_attention"])
    model.save_pretrained(tmp_path)
    assert check_served(model, f"vllm serve {tmp_path}")[0].same
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["full_attention"]["rope_theta"] = 7e6
    [found] = check_served(model, config, engine="vllm")
    [base] = found.mismatches
    assert (base.what, base.layer_type, base.served) == ("base", "full_attention", "7,000,000")
    assert str(base).startswith("base of full_attention: 1,000,000 in training, 7,000,000 served:")


def test_a_part_of_a_config_is_merged_by_vllm_and_replaced_by_sglang(tmp_path: Path) -> None:
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    text = trained().config.to_dict() | plain
    outer = {"model_type": "llava", "text_config": text | {"max_position_embeddings": SHORT}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    inside = {"text_config": {"rope_parameters": YARN} | LENGTHS}
    assert vllm(tmp_path, inside).same
    assert of(sglang(tmp_path, inside)) == {"base": ("500,000", "10,000")}
    assert "scaling" in of(vllm(tmp_path, {"rope_parameters": WHOLE} | LENGTHS)), "not for the part"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "mlx"])
@pytest.mark.parametrize(
    "method", ["yarn", "interpolate", "ntk", "llama3", "ntk_by_parts", "yarn@temperature=1.4"]
)
def test_commands_that_posenc_prints_compute_the_same(
    before: Path, tmp_path: Path, engine: str, method: str
) -> None:
    options: dict[str, Any] = {"methods": method, "factor": 4, "engine": engine, "report": False}
    if (engine, method) == ("sglang", "yarn@temperature=1.4"):
        pytest.skip("not served")
    [serving] = extend_checkpoint(before, tmp_path / "the out", **options).serving
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "the out")
    for command in filter(None, (serving.command, serving.original)):
        [found] = check_served(model, command)
        assert found.mismatches == ()
        assert found.remedy == ""


def test_the_option_of_a_gain_is_needed(before: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"methods": "yarn@temperature=1.4", "factor": 4, "report": False}
    [serving] = extend_checkpoint(before, tmp_path / "out", engine="llama.cpp", **options).serving
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    [found] = check_served(model, serving.command.partition(" --override-kv")[0])
    assert of(found) == {"gain": ("1.4", f"{GAIN:.5g}")}
    assert f"--override-kv llama.rope.scaling.attn_factor=float:{1.4 / GAIN:.9g}" in found.remedy


class _Wrapped(torch.nn.Module):
    """As FSDP, DDP and torch.compile hold a model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
def test_wrapped_models_are_read(before: Path) -> None:
    settings = {"model": str(before), "max_model_len": LONG}
    settings["hf_overrides"] = {"rope_parameters": WHOLE} | LENGTHS
    for model in (_Wrapped(trained()), torch.compile(trained()), _Wrapped(_Wrapped(trained()))):
        assert check_served(model, settings)[0].same
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(trained(), peft.LoraConfig(target_modules=["q_proj"]))
    assert check_served(adapted, settings)[0].same


def test_a_scaling_written_after_the_model_was_made(before: Path) -> None:
    """The server has what the config says; the trainer's buffers do not."""
    model = made(rope_theta=5e5, max_position_embeddings=LONG)
    model.config.rope_parameters = dict(WHOLE)
    settings = {"model": str(before), "max_model_len": LONG}
    settings["hf_overrides"] = {"rope_parameters": WHOLE} | LENGTHS
    [found] = check_served(model, settings)
    assert set(of(found)) == {"frequencies", "gain"}
    assert found.remedy.startswith("The loaded model has the gain 1, its config says 1.1386:")


def test_frequencies_in_half_precision_differ(before: Path) -> None:
    model = trained().to(torch.bfloat16)
    settings = {"model": str(before), "max_model_len": LONG}
    settings["hf_overrides"] = {"rope_parameters": WHOLE} | LENGTHS
    assert "frequencies" in of(check_served(model, settings)[0])


def test_a_config_alone_is_compared_in_every_engine(before: Path, tmp_path: Path) -> None:
    model = trained()
    model.save_pretrained(tmp_path)
    found = {one.engine: one for one in check_served(model, tmp_path)}
    assert set(found) == set(ENGINES) - {"transformers"}
    assert found["vLLM"].same
    assert found["SGLang"].same
    assert of(found["mlx-lm"])["base"] == ("500,000", "10,000"), "read beside the parameters"
    [one] = check_served(model, tmp_path / "config.json", engine="vllm")
    assert one.same


def test_one_token_more_than_the_config_has(tmp_path: Path) -> None:
    model = trained()
    model.save_pretrained(tmp_path)
    longest = model.config.max_position_embeddings
    [all_of_it] = check_served(model, f"vllm serve {tmp_path} --max-model-len {longest}")
    [one_more] = check_served(model, f"vllm serve {tmp_path} --max-model-len {longest + 1}")
    assert all_of_it.same
    assert "more than the" in str(one_more.mismatches[0])


def test_windows_of_chunks() -> None:
    kinds = ["chunked_attention", "full_attention"]
    assert windows({"layer_types": kinds, "attention_chunk_size": 8}) == (8, 0)


def test_models_without_rotary_frequencies_are_refused() -> None:
    config = transformers.BertConfig(hidden_size=16, num_attention_heads=1, num_hidden_layers=1)
    model = transformers.BertForMaskedLM(config)
    with pytest.raises(ArgumentError, match="got BertForMaskedLM"):
        check_served(model, {"model_type": "llama"})


def test_mismatches_are_sentences() -> None:
    one = ServedDifference("base", "", "1", "2", "so")
    assert str(one) == "base: 1 in training, 2 served: so"
    assert str(ServedDifference("start", "", "", "does not start: x")) == "does not start: x"
