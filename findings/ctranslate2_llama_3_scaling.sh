#!/bin/sh
# CTranslate2 4.8.5: of a Llama with Llama 3.1's scaling (rope_type "llama3"), its converter writes
# low_freq_factor and high_freq_factor into the model, but neither factor nor
# original_max_position_embeddings, without which the program scales nothing. With transformers
# 4.57.6 it takes the base for 10000 too, whatever rope_theta is. A Gemma 3 loses the factor of its
# linear scaling, a Gemma the base that it has.
#
# Seen, as the largest difference of log-probabilities of 300 tokens by small random models: from
# transformers, 6.1 (Llama, 5.24.0), 5.7 (Llama, 4.57.6), 2.0 (Gemma of base 500000), 0.97 (Gemma 3,
# factor 8); from transformers with the config unscaled (Llama with 4.57.6: and of base 10000;
# Gemma: of base 10000), less than 0.001 each. No warning. Expected: those of transformers, or a
# refusal as of YaRN.
#
# Ends with 1 if any of this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/compared.py" <<'PY'
import json
import sys
from pathlib import Path

import ctranslate2
import numpy as np
import torch
import transformers
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models

transformers.logging.set_verbosity_error()
sizes = dict(
    vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=128,
    tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
scaling = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
windows = dict(
    query_pre_attn_scalar=64, sliding_window=4096, rope_theta=1e6, rope_local_base_freq=1e4,
    layer_types=["sliding_attention", "full_attention"],
)
old = transformers.__version__.startswith("4.")
cases = {
    "llama": (dict(rope_theta=5e5), dict(rope_scaling=scaling), dict(rope_theta=1e4) if old else {}),
    "gemma": ({}, dict(rope_theta=5e5), dict(rope_theta=1e4)),
    "gemma3_text": (windows, dict(rope_scaling=dict(rope_type="linear", factor=8.0)), {}),
}
words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(256)}, unk_token="t0"))
named = dict(unk_token="t0", bos_token="t1", eos_token="t2")
tokens = torch.randint(3, 256, (1, 300), generator=torch.Generator().manual_seed(1))


def log_probabilities(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(tokens).logits[0].log_softmax(-1)


for family in sys.argv[2:]:
    shared, stated, taken = cases[family]
    model_class = transformers.CONFIG_MAPPING[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        model_class.from_dict({**sizes, **shared})
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.1)
    folder = Path(sys.argv[1]) / family
    for name, fields in (("taken", taken), ("stated", stated)):
        model.save_pretrained(folder / name)
        config = {"model_type": family, **sizes, **shared, **fields}
        (folder / name / "config.json").write_text(json.dumps(config))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(
        folder / "stated"
    )
    converted = TransformersConverter(str(folder / "stated")).convert(str(folder / "converted"))
    engine = ctranslate2.Generator(converted, device="cpu", compute_type="float32")
    found = torch.from_numpy(np.array(engine.forward_batch(tokens.tolist()))[0]).log_softmax(-1)
    from_stated, from_taken = (
        float((found - log_probabilities(folder / name)).abs().max())
        for name in ("stated", "taken")
    )
    print(f"transformers {transformers.__version__}, {family}: {from_stated:.3g} from the config,"
          f" {from_taken:.3g} from the one without")
    assert from_stated > 0.5 and from_taken < 1e-3
PY
for release in 5.24.0 4.57.6; do
    python3 -m venv "$folder/$release"
    "$folder/$release/bin/pip" install --quiet ctranslate2==4.8.5 "transformers==$release" \
        torch==2.13.0
done
compared() {
    "$folder/$1/bin/python" -W ignore "$folder/compared.py" "$folder/models-$1" $2
}
compared 5.24.0 "llama gemma gemma3_text"
compared 4.57.6 llama
