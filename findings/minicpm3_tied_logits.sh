#!/bin/sh
# mlx-lm 0.32.2 with mlx 0.32.4: a MiniCPM3 whose embeddings are tied skips the division by
# hidden_size / dim_model_base before the output layer, which the same model with an untied output
# layer does, and transformers' MiniCPM3 in both cases.
#
# Seen: with hidden_size 64 and dim_model_base 16 the tied model's logits are 4 times those of the
# untied one with the same weights, on the same tokens. No warning. Expected: the same logits.
#
# Ends with 1 if any of this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mlx-lm==0.32.2 "mlx[cpu]==0.32.4"
cat > "$folder/logits.py" <<'PY'
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.minicpm3 import Model, ModelArgs

mx.set_default_device(mx.cpu)
sizes = dict(
    model_type="minicpm3",
    hidden_size=64,
    dim_model_base=16,
    num_hidden_layers=2,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    vocab_size=32,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    scale_depth=1.4,
    scale_emb=12,
    max_position_embeddings=64,
    rope_scaling={"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
)
untied = Model(ModelArgs(**sizes))
weights = dict(tree_flatten(untied.parameters()))
weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
untied.load_weights(list(weights.items()))
tied = Model(ModelArgs(**sizes, tie_word_embeddings=True))
del weights["lm_head.weight"]
tied.load_weights(list(weights.items()))
tokens = mx.arange(8)[None]
print(float((tied(tokens) / untied(tokens)).mean()))
PY
ratio=$("$folder/venv/bin/python" "$folder/logits.py")
echo "logits of the tied model are $ratio times those of the untied one"
python3 -c "import sys; sys.exit(abs($ratio - 4) > 0.01)"
