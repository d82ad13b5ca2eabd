"""Qwen2: a Llama with biases of queries, keys and values, and windows of some layers."""

from posenc.integrations.transformers.families.llama import llama_like

__all__ = ["ENTRY"]

ENTRY = llama_like("qwen2")
