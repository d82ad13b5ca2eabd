#!/bin/sh
# enformer-pytorch 0.8.12 with PyTorch 2.15.0: the gamma features of positions that it computes are
# not those that Enformer was trained with, of which the package holds a table for 1536 positions
# (use_tf_gamma=True, refused at other lengths). It divides each density by the largest of all
# densities at the same distance; the table's are divided by the largest of the same density over
# all distances, so that the two differ at nearly every distance.
#
# Seen: the features differ by up to 1.0, which is their whole range; divided the other way, in
# float64, they equal the table to 0.0025, the rounding of its float32. No warning. Expected: the
# same features, so that published weights can be read at other lengths and new models compared.
#
# Ends with 1 if any of this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet enformer-pytorch==0.8.12 torch==2.15.0
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from enformer_pytorch.modeling_enformer import get_positional_embed

length, kinds = 1536, 32
computed, trained = (
    get_positional_embed(length, 6 * kinds, torch.device("cpu"), table)[:, 2 * kinds : 3 * kinds]
    for table in (False, True)
)
distance = torch.arange(1 - length, length).double().abs()[:, None]
mean = torch.linspace(length / kinds, length, kinds, dtype=torch.float64)
deviation = length / (2 * kinds)
shape, rate = (mean / deviation) ** 2, mean / deviation**2
logarithm = torch.xlogy(shape - 1, distance) - rate * distance
density = (logarithm - torch.lgamma(shape) + shape * rate.log()).exp() + 1e-8
by_distance = (computed - density / density.amax(1, keepdim=True)).abs().max().item()
by_density = (trained - density / density.amax(0)).abs().max().item()
apart = (computed - trained).abs().max().item()
print(f"computed and trained features differ by up to {apart:.2f};")
print(f"divided by the largest at each distance, the computed by {by_distance:.4f},")
print(f"divided by the largest of each density, the trained by {by_density:.4f}")
assert apart > 0.9
assert by_distance < 0.005 and by_density < 0.005
PY
