#!/bin/sh
# equinox 0.13.8 with JAX 0.10.2: a RotaryPositionalEmbedding with another theta than the first one
# of the same size and dtype in the process rotates by that one's angles. Sines and cosines are kept
# by size and dtype alone, and theta is not part of the key.
#
# Seen: outputs of theta 500000, after a layer of theta 10000 was called, have the sum of sizes of
# 10000's to the last digit; in a process of their own another. No warning. Expected: those of its
# own theta, whatever was called before.
#
# Ends with 1 if any of this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet equinox==0.13.8 jax==0.10.2 jaxlib==0.10.2
cat > "$folder/rotated.py" <<'PY'
import sys

import equinox
import jax
import jax.numpy as jnp

x = jax.random.normal(jax.random.PRNGKey(0), (64, 16))
for theta in map(float, sys.argv[1:]):
    rotated = equinox.nn.RotaryPositionalEmbedding(16, theta=theta)(x)
print(float(jnp.abs(rotated).sum()))
PY
rotated() { JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore "$folder/rotated.py" "$@"; }
first=$(rotated 10000) alone=$(rotated 500000) after=$(rotated 10000 500000)
echo "sums of sizes: theta 10000 $first, theta 500000 alone $alone, after 10000 $after"
test "$after" = "$first"
test "$alone" != "$first"
