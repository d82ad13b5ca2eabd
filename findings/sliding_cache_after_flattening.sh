#!/bin/sh
# transformers 5.24.0 with PyTorch 2.15.0: a cache that torch.utils._pytree takes apart and puts
# together again, as torch.export does with its inputs and outputs once
# register_dynamic_cache_export_support() was called, forgets how many tokens its layers with a
# sliding window have seen. They then count the tokens that the window keeps.
#
# Seen: of 20 tokens, window 7, the layer of the cache says 20 before and 6 after; the mask of the
# next token begins at key 14 before and at 0 after. A model with such a first layer that is not told
# positions puts its next token at position 6 in place of 20: other logits, without a word.
# Expected: 20, 14 and the same logits.
#
# Ends with 1 if any of this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.15.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
import torch
from torch.utils import _pytree
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig
from transformers.integrations.executorch import register_dynamic_cache_export_support

register_dynamic_cache_export_support()
torch.manual_seed(0)
config = Gemma3TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, sliding_window=7,
    layer_types=["sliding_attention", "full_attention"],
)
model = Gemma3ForCausalLM(config).eval()
for weight in model.parameters():
    torch.nn.init.normal_(weight, std=0.3)
ids = torch.randint(3, 64, (1, 21))


def filled():
    cache = DynamicCache(config=config)
    model(ids[:, :20], cache=cache)
    return cache


with torch.no_grad():
    expected = model(ids).logits[:, -1]
    before, after = filled(), _pytree.tree_map(lambda x: x, filled())
    lengths = [cache.get_seq_length() for cache in (before, after)]
    begins = [cache.get_mask_sizes(1, 0)[1] for cache in (before, after)]
    off = [
        (model(ids[:, 20:], cache=cache).logits[:, -1] - expected).abs().max().item()
        for cache in (before, after)
    ]
print(f"tokens seen: {lengths}; the mask begins at {begins}; logits are off by {off}")
assert lengths == [20, 6]
assert begins == [14, 0]
assert off[0] < 1e-4
assert off[1] > 0.1
PY
