"""Families of transformers checkpoints, one a file, by the ``model_type`` of ``config.json``."""

from posenc.integrations.transformers.families.bert import BERT
from posenc.integrations.transformers.families.bloom import BLOOM
from posenc.integrations.transformers.families.deberta_v2 import DEBERTA_V2
from posenc.integrations.transformers.families.family import Family
from posenc.integrations.transformers.families.gpt_neox import GPT_NEOX
from posenc.integrations.transformers.families.llama import LLAMA, MISTRAL, QWEN2
from posenc.integrations.transformers.families.roberta import ROBERTA
from posenc.integrations.transformers.families.swin import SWIN
from posenc.integrations.transformers.families.t5 import T5
from posenc.integrations.transformers.families.vit import VIT
from posenc.integrations.transformers.families.xlnet import XLNET

__all__ = ["FAMILIES"]

FAMILIES: dict[str, Family] = {
    "bert": BERT,
    "bloom": BLOOM,
    "deberta-v2": DEBERTA_V2,
    "gpt_neox": GPT_NEOX,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "roberta": ROBERTA,
    "swin": SWIN,
    "t5": T5,
    "vit": VIT,
    "xlnet": XLNET,
}
"""By the ``model_type`` of ``config.json``."""
