#!/bin/sh
# speechbrain 1.1.2 with PyTorch 2.15.0: relative positions of RelPosEncXL, which Conformer encoders
# have (attention_type="RelPosMHAXL"), are the same for as many frames before a query as after it.
# Sines are odd, and the code has "same for past and future"; Transformer-XL and ESPnet have
# sin(-x) there. Attention in both directions then cannot tell what was before from what comes after.
#
# Seen: a layer given its frames in reversed order gives its outputs in reversed order, to 1e-6; with
# the sines of the future negated outputs differ by more than 0.01. No warning. Expected: other
# outputs.
#
# Ends with 1 if any of this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet speechbrain==1.1.2 torch==2.15.0 torchaudio==2.11.1
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from speechbrain.nnet.attention import RelPosEncXL, RelPosMHAXL

torch.manual_seed(0)
layer = RelPosMHAXL(embed_dim=32, num_heads=4).eval()
frames = torch.randn(1, 50, 32)
same = RelPosEncXL(32)(frames)
odd = same.clone()
odd[:, 50:, 0::2] *= -1


def moved(positions):
    with torch.no_grad():
        forwards, backwards = (layer(x, x, x, positions)[0] for x in (frames, frames.flip(1)))
    return (forwards - backwards.flip(1)).abs().max().item()


print(f"reversed frames move outputs by {moved(same):.1e}, with odd sines by {moved(odd):.3f}")
assert moved(same) < 1e-6
assert moved(odd) > 0.01
PY
