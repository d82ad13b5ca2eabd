#!/bin/sh
# diffusers 0.42.1 with PyTorch 2.15.0: MochiRoPE raises unless it is given a dtype, which its forward
# declares as optional (dtype=None). Frames are then counted in int64, while the centers of rows and
# columns are float32, and torch.meshgrid refuses the two.
#
# Seen: RuntimeError, meshgrid expects all tensors to have the same dtype; with dtype=torch.float32,
# as MochiTransformer3DModel calls it, two tables of 48 tokens. Expected: the same tables without.
#
# Ends with 1 if any of this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet diffusers==0.42.1 torch==2.15.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from diffusers.models.transformers.transformer_mochi import MochiRoPE

rope, frequencies = MochiRoPE(), torch.zeros(3, 4, 8)
tables = rope(frequencies, 2, 4, 6, dtype=torch.float32)
try:
    rope(frequencies, 2, 4, 6)
    message = "none"
except RuntimeError as error:
    message = str(error)
print(f"with a dtype: {[tuple(table.shape) for table in tables]}; without: {message}")
assert [table.shape for table in tables] == [(48, 4, 8)] * 2
assert "same dtype" in message
PY
