#!/bin/sh
# lm_eval 0.4.13 with transformers 5.24.0 and PyTorch 2.15.0: the log-probability of a text by a
# model with rope_type "dynamic" depends on the task's other texts. The harness reads the longest
# text first, and transformers keeps the frequencies of the longest text that it has read, until it
# reads one of the trained length or less.
#
# Seen: after 20 words, trained length 16, the log-probability of the next word is another, by more
# than 0.01 nats, if the task has a text of 60 words too, batch size 1; of "default" frequencies the
# same to 0.0001. No warning. Expected: that of the text alone.
#
# Ends with 1 if any of this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "lm_eval[hf]==0.4.13" transformers==5.24.0 torch==2.15.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - <<'PY'
import logging

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

logging.disable(logging.CRITICAL)
words = ["<eos>", "<unk>", *(f"w{n}" for n in range(62))]
plain = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=plain, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>"
)
texts = [" ".join(words[2 + (7 * n + n * n) % 62] for n in range(count)) for count in (20, 60)]


def of_the_short_text(kind, texts):
    torch.manual_seed(0)
    rope = {"rope_type": kind, "rope_theta": 10000.0}
    rope |= {"factor": 4.0} if kind == "dynamic" else {}
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        initializer_range=0.5, rope_parameters=rope,
    )
    model = LlamaForCausalLM(config).eval()
    harness = HFLM(model, tokenizer=tokenizer, batch_size=1, max_length=64)
    asked = [Instance("loglikelihood", {}, (text, " w3"), n) for n, text in enumerate(texts)]
    return harness.loglikelihood(asked, disable_tqdm=True)[0][0]


apart = {}
for kind in ("default", "dynamic"):
    alone, beside = (of_the_short_text(kind, texts[:count]) for count in (1, 2))
    apart[kind] = abs(alone - beside)
    print(f"{kind}: {alone:.4f} alone, {beside:.4f} beside a longer text")
assert apart["default"] < 1e-4
assert apart["dynamic"] > 0.01
PY
