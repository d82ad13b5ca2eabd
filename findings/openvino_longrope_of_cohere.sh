#!/bin/sh
# optimum-intel 2.2.0 with openvino 2026.4.1 and transformers 5.5.4: the export replaces LongRoPE of
# every model by its own, whose cosines are those of half-split pairs. Cohere rotates neighbouring
# features, so that the two of a pair turn by different angles.
#
# Seen: without a scaling, logits of a small Cohere in float32 are off by less than 1e-3; with
# LongRoPE whose factors are all 1, the same rotation, by more than 0.1.
# Expected: the same logits.
#
# Ends with 1 if any of this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet optimum-intel==2.2.0 openvino==2026.4.1 \
    openvino-tokenizers==2026.4.1.0 transformers==5.5.4 torch==2.13.0
HF_HUB_OFFLINE=1 FOLDER=$folder "$folder/venv/bin/python" - <<'PY'
import os
from pathlib import Path

import numpy as np
import openvino
import torch
from optimum.exporters.openvino import main_export
from transformers import CohereConfig, CohereForCausalLM

FOLDER = Path(os.environ["FOLDER"])
ONES = {"short_factor": [1.0] * 16, "long_factor": [1.0] * 16, "attention_factor": 1.0}
LONG = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128} | ONES


def off_by(name, scaling):
    """The largest difference of logits from those of transformers."""
    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
        rope_parameters={"rope_type": "default"} | scaling | {"rope_theta": 10000.0},
        logit_scale=1.0,
    )
    model = CohereForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(FOLDER / name)
    main_export(
        str(FOLDER / name), FOLDER / f"{name}-ov", task="text-generation-with-past",
        convert_tokenizer=False,
    )
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    path = FOLDER / f"{name}-ov/openvino_model.xml"
    compiled = openvino.Core().compile_model(path, "CPU", exact)
    ids = torch.randint(3, 64, (1, 50))
    inputs = {
        "input_ids": ids.numpy(),
        "attention_mask": np.ones((1, 50), dtype=np.int64),
        "position_ids": np.arange(50)[None],
        "beam_idx": np.zeros(1, dtype=np.int32),
    }
    logits = compiled(inputs)["logits"]
    with torch.no_grad():
        return float(np.abs(logits - model(ids).logits.numpy()).max())


plain, longrope = off_by("plain", {}), off_by("longrope", LONG)
print(f"off by {plain} without a scaling, by {longrope} with LongRoPE of factors 1")
assert plain < 1e-3
assert longrope > 0.1
PY
