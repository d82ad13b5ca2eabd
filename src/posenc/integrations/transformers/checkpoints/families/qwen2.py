"""Qwen2: Llama with biases of queries, keys and values, and windows in some layers."""

from posenc.integrations.transformers.checkpoints.families.llama import llama_like

ENTRY = llama_like("qwen2")
