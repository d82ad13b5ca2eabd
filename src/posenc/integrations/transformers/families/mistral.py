"""Mistral: Llama with attention windows."""

from posenc.integrations.transformers.families.llama import llama_like

__all__ = ["ENTRY"]

ENTRY = llama_like("mistral")
