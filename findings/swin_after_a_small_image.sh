#!/bin/sh
# transformers 5.24.0 with PyTorch 2.15.0: a Swin model gives an image other features after it has
# seen a smaller one. Where one window spans a side of a picture, its layers set their shift to 0 and
# do not set it back, so that later, larger pictures are read without shifted windows: silently, in
# evaluation, for as long as the model lives. Swin v2 computes the shift for each picture.
#
# Seen: features of a picture of 64 by 64 move by 0.035 after one of 16 by 64 went through; equal
# before that, and equal always in Swin v2. Expected: equal.
#
# Ends with 1 if any of this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.15.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
import torch
from transformers import SwinConfig, SwinModel, Swinv2Config, Swinv2Model

SIZES = {
    "image_size": 64, "patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": [2],
    "num_heads": [2],
}


def features(kind, config):
    torch.manual_seed(0)
    model = kind(config(**SIZES)).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    large, small = torch.randn(1, 3, 64, 64), torch.randn(1, 3, 16, 64)
    with torch.no_grad():
        first, second = (model(large).last_hidden_state for _ in range(2))
        model(small)
        after = model(large).last_hidden_state
    shifts = [block.shift_size for block in model.encoder.layers[0].blocks]
    return [(first - other).abs().max().item() for other in (second, after)], shifts


swin, shifts = features(SwinModel, SwinConfig)
swin_v2, _ = features(Swinv2Model, Swinv2Config)
print(f"features move by {swin} (Swin), {swin_v2} (Swin v2); shifts of Swin's blocks {shifts}")
assert swin[0] == 0
assert swin[1] > 1e-2
assert swin_v2 == [0, 0]
assert shifts == [0, 0]
PY
