#!/bin/sh
# keras-hub 0.32.0 with Keras 3.15.1 on PyTorch 2.15.0: under the policies mixed_bfloat16 and
# mixed_float16 SinePositionEncoding and AlibiBias count positions in half precision, which has every
# other whole number from 256 (2048) on, then every fourth. RotaryEmbedding counts in float32.
#
# Seen: of 4096 positions 769 have a sine vector of their own in bfloat16, and 3073 in float16, as
# many as have an ALiBi bias; sines differ by up to 2.0 from those of float32. No warning.
# Expected: vectors of float32, rounded once: 4096.
#
# Ends with 1 if any of this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 torch==2.15.0 regex sentencepiece tokenizers \
    kagglehub==1.0.2 kagglesdk==0.1.28
"$folder/venv/bin/pip" install --quiet --no-deps keras-hub==0.32.0
KERAS_BACKEND=torch "$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from keras_hub import layers


def apart(vectors):
    return len(torch.unique(vectors.float(), dim=0))


def made(policy):
    sines = layers.SinePositionEncoding(dtype=policy)(torch.zeros(1, 4096, 64))[0]
    bias = layers.AlibiBias(dtype=policy)(torch.zeros(1, 8, 1, 4096))[0, :, 0].T
    rotated = layers.RotaryEmbedding(dtype=policy)(torch.ones(1, 4096, 64))[0]
    return sines, bias, rotated


exact, *_ = made("float32")
for policy, count in (("mixed_bfloat16", 769), ("mixed_float16", 3073)):
    sines, bias, rotated = made(policy)
    counts = apart(sines), apart(bias), apart(rotated)
    off = (sines.float() - exact).abs().max().item()
    print(f"{policy}: sines, biases, rotations of 4096 positions: {counts}; sines off by {off:.2f}")
    assert counts == (count, count, 4096)
    assert off > 1.5
PY
