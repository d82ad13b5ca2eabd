#!/bin/sh
# onnxruntime-genai 0.18.0 with transformers 5.24.0: the model builder leaves out the scaling of a
# Llama's RoPE, without a word, unless it is llama3's. Linear, YaRN, LongRoPE and dynamic scaling of
# LlamaForCausalLM all give the graph of the model as it was before it was extended; texts past the
# trained length are read by angles that the model was not trained on. Other architectures, such as
# Qwen3ForCausalLM, get linear scaling and YaRN, and the builder fails with what it does not know.
#
# Seen: the angle of the slowest pair at position 1 is 0.0001334 with linear scaling by 4 and without
# it, and in a Qwen3 3.334e-05; the gain of YaRN is 1 in the Llama in place of 1.1386.
# Expected: a quarter of the angle, or an error.
#
# Ends with 1 if any of this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet onnxruntime-genai==0.18.0 onnxruntime==1.32.0 \
    onnx==1.23.2 onnx-ir==1.1.0 transformers==5.24.0 torch==2.13.0
HF_HUB_OFFLINE=1 FOLDER=$folder "$folder/venv/bin/python" - <<'PY'
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

FOLDER = Path(os.environ["FOLDER"])
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def rotation(kind, scaling):
    """The slowest pair's angle at position 1, and the gain, in the graph of a small model."""
    sizes = {"vocab_size": 8, "hidden_size": 64, "head_dim": 64, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    rope = {"rope_type": "default"} | scaling | {"rope_theta": 10000.0}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, max_position_embeddings=8192, rope_parameters=rope, eos_token_id=1
    )
    model, built = FOLDER / "model", FOLDER / "built"
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(model)
    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate("abcdefgh")}, []))
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="b").save_pretrained(model)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", model, "-o", built]
    command += ["-p", "fp32", "-e", "cpu", "-c", FOLDER / "cache"]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "scaling" not in (said.stdout + said.stderr).lower()
    graph = onnx.load(built / "model.onnx").graph
    cos, sin = (
        next(onnx.numpy_helper.to_array(one) for one in graph.initializer if one.name == name)
        for name in ("cos_cache", "sin_cache")
    )
    return float(np.arctan2(sin[1, -1], cos[1, -1])), float(np.hypot(sin[0, 0], cos[0, 0]))


plain, linear, yarn = (rotation("Llama", scaling) for scaling in ({}, LINEAR, YARN))
others = [rotation("Qwen3", scaling) for scaling in (LINEAR, YARN)]
print(f"Llama: plain {plain}, linear {linear}, yarn {yarn}; Qwen3: linear, yarn {others}")
assert plain == linear == yarn
assert np.isclose(plain[0], 10000 ** (-31 / 32), rtol=1e-4)
assert np.isclose(others[0][0], plain[0] / 4, rtol=1e-4)
assert np.isclose(others[1][1], 0.1 * np.log(4) + 1, rtol=1e-4)
PY
