"""Mistral: Llama with attention windows."""

from posenc.integrations.transformers.checkpoints.families.llama import llama_like

ENTRY = llama_like("mistral")
