"""posenc doctor --engine and posenc extend --for."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from posenc.lab.cli.console import terminal_table
from posenc.lab.doctor.report import tables
from posenc.lab.doctor.words import Engines
from posenc.lab.evaluation.checkpoint import as_llama
from posenc.transformers.doctor.diagnosis import diagnose
from tests.support.commands import printed, printed_json, refusal, run_command
from tests.support.samples import next_token_model
from tests.support.tiny_models import tiny_model
from tests.transformers.engines.released import RELEASED

pytest.importorskip("transformers")

SMALL = {"num_hidden_layers": 2, "intermediate_size": 8, "vocab_size": 16}


def folder_of(name: str, at: Path, **scaling: Any) -> Path:
    fields = RELEASED[name] | SMALL
    if scaling:
        fields["rope_scaling"] = fields["rope_scaling"] | scaling
    return write(at, fields)


def write(at: Path, fields: dict[str, Any]) -> Path:
    (at / "config.json").write_text(json.dumps(fields))
    return at


def diagnosed(folder: Path, engine: str) -> str:
    return printed("doctor", folder, "--seconds", "0", "--engine", engine)


def test_a_scaling_that_one_engine_ignores(tmp_path: Path) -> None:
    fields = RELEASED["Llama-3.1-8B"] | SMALL
    theta = {"rope_theta": fields.pop("rope_theta")}
    fields["rope_parameters"] = fields.pop("rope_scaling") | theta
    words = diagnosed(write(tmp_path, fields), "all")
    for engine in ("vLLM", "SGLang", "llama.cpp", "OpenVINO"):
        assert f"{engine} as transformers" in " ".join(words.split())
    assert "ignores base and scaling: wrong from the first" in words
    assert "In config.json: right in more engines" in words
    assert '"rope_theta": 500000.0' in words


def test_the_same_as_json(tmp_path: Path) -> None:
    folder = folder_of("Qwen3-8B, YaRN of its card", tmp_path, attention_factor=1.0)
    found = printed_json("doctor", folder, "--seconds", "0", "--engine", "llama.cpp")
    assert [one["engine"] for one in found["engines"]] == ["transformers", "llama.cpp"]
    gains = [one["rotations"][""]["gain"] for one in found["engines"]]
    assert gains == pytest.approx([1.0, 0.1 * math.log(4) + 1])
    assert found["engines"][1]["source"].startswith("llama.cpp ")
    changes = found["right_in_all"]["changes"]
    assert changes["rope_parameters"]["mscale_all_dim"] == changes["rope_scaling"]["mscale"] == 1
    assert {"llama.cpp", "CTranslate2"} <= set(found["right_in_all"]["left"])


def test_longest_texts_and_differences_without_a_remedy(tmp_path: Path) -> None:
    words = diagnosed(folder_of("Phi-3-mini-128k", tmp_path), "vllm")
    assert re.search(r"vLLM .* 4,096", words)
    assert "no line of config.json makes more of them rotate as transformers does" in words


WINDOWS = {
    "model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64, "head_dim": 256,
    "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 32768,
    "intermediate_size": 8, "vocab_size": 16,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_is_cut_at_no_width(width: int, tmp_path: Path) -> None:
    terminal = Console(file=io.StringIO(), width=width)
    with terminal.capture() as capture:
        model = write(tmp_path, WINDOWS)
        engines = Engines.of(model, "all")
        _, rotations, *_ = tables(diagnose(model, budget=0, run_seconds=0), engines)
        terminal.print(terminal_table(rotations, " "))
    table = capture.get()
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= width
    for text in ("58,470 tokens", "45,122,677 tokens", "gain", "no limit", "sliding_attention"):
        assert text in table
    assert ("mlx-lm, full_attention" in table) is (width > 80)


def test_a_model_without_a_rule_is_not_said_to_differ(tmp_path: Path) -> None:
    chunks = {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}}
    fields = RELEASED["Qwen2.5-7B-Instruct-1M"] | SMALL | chunks
    words = diagnosed(write(tmp_path, fields), "vllm")
    told = " ".join(words.split())
    assert "is not compared: it counts positions in chunks" in told
    assert "no line of config.json" not in told
    assert "differs" not in told


def test_layers_that_rotate_by_no_rule_are_named(tmp_path: Path) -> None:
    """nanochat rotates in its own code, by the config's frequencies; GPT-J has no such fields."""
    fields = {"model_type": "gptj", "n_layer": 1, "n_embd": 64, "n_head": 2, "rotary_dim": 8}
    words = diagnosed(write(tmp_path, fields | {"vocab_size": 8}), "all")
    assert "not compared, the config states no rotation" in words


@pytest.mark.parametrize(("engine", "ending"), [("vllm", " --for vllm"), ("all", "")])
def test_the_command_that_extends_it_is_for_the_engine(
    engine: str, ending: str, tmp_path: Path
) -> None:
    command = f"posenc extend {tmp_path} --method yarn --factor 4{ending}"
    words = diagnosed(folder_of("Qwen3-8B", tmp_path), engine)
    assert "".join(words.split()).endswith("".join(command.split()))


@pytest.mark.parametrize(("command", "option"), [("doctor", "--engine"), ("extend", "--for")])
def test_an_unknown_engine_is_refused(tmp_path: Path, command: str, option: str) -> None:
    said = refusal(command, folder_of("Qwen3-8B", tmp_path), option, "ollama")
    assert f"{option}: expected a known name, got 'ollama'. Did you mean 'llama.cpp'" in said
    for engine in ("llama.cpp", "mlx", "onnxruntime-genai", "openvino", "sglang", "vllm"):
        assert engine in said.partition("Valid: ")[2]


def test_what_to_type(tmp_path: Path) -> None:
    as_llama(next_token_model(b"abc" * 99, length=16)).save_pretrained(tmp_path / "in")
    given = ("extend", tmp_path / "in", "--factor", "2", "--no-report", "--method", "yarn")
    told = printed(*given, "--for", "vllm", "--out", tmp_path / "out")
    assert f"vllm serve {tmp_path / 'out'} --max-model-len 32" in told
    assert f"vllm serve {tmp_path / 'in'} --hf-overrides '{{" in told
    told = printed(*given, "--for", "llama.cpp", "--out", tmp_path / "gguf")
    assert "llama.rope.scaling.original_context_length = 16 (uint32)" in told
    found = printed_json(*given, "--for", "mlx", "--out", tmp_path / "mlx")
    assert [one["engine"] for one in found["serving"]] == ["mlx-lm"]


def test_commands_are_whole_in_a_narrow_terminal(tmp_path: Path) -> None:
    tiny_model("qwen3", max_position_embeddings=16).save_pretrained(tmp_path / "in")
    given = ("extend", tmp_path / "in", "--method", "yarn", "--factor", "2", "--no-report")
    options = ("--for", "vllm,sglang,llama.cpp", "--out", tmp_path / "out")
    done = run_command(*map(str, (*given, *options)), columns=80)
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("  ")]
    commands = [words for words in lines if str(tmp_path) in " ".join(words)]
    for option, longest in (
        ("--hf-overrides", "--max-model-len"),
        ("--json-model-override-args", "--context-length"),
    ):
        [words] = [words for words in commands if option in words]
        start = words.index(option)
        assert words[start - 1] == str(tmp_path / "in")
        changes = json.loads(words[start + 1])
        assert changes["rope_parameters"]["rope_type"] == "yarn"
        assert words[start + 2 :] == [longest, "32"]
    [convert] = [words for words in commands if words[0] == "python" and "&&" in words]
    assert convert[-6:] == ["&&", "llama-server", "-m", "model.gguf", "-c", "32"]


def test_a_library_that_rotates_otherwise_than_the_config_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    tiny_model("qwen3").save_pretrained(tmp_path)
    given = ("doctor", tmp_path, "--seconds", "0", "--live")
    alike = "model.rotary_emb.inv_freq: 8 pairs, gain 1, as its config says."
    assert alike in printed(*given)
    usual = Qwen3RotaryEmbedding.compute_default_rope_parameters

    def doubled(*args: Any, **options: Any) -> Any:
        theta, gain = usual(*args, **options)
        return 2 * theta, gain

    name = "compute_default_rope_parameters"
    monkeypatch.setattr(Qwen3RotaryEmbedding, name, staticmethod(doubled))
    other = "has other frequencies than its config says, by up to 1 of their size."
    assert other in printed(*given)
    [one] = printed_json(*given)["live"]
    assert one["own"]["frequencies"][0] == 2 * one["stated"]["frequencies"][0]
