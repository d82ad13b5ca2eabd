"""Families of transformers models, named as their package in transformers.

One that is alone in its file is its ``ENTRY``; of several, a function of its name makes each, so
that only the modeling file of what is accelerated need be imported.
"""

SEVERAL = {
    "alibi": ("bloom", "falcon", "mpt"),
    "buckets": ("longt5", "mpnet", "mt5", "switch_transformers", "t5", "umt5"),
    "disentangled": ("deberta", "deberta_v2"),
    "page": ("layoutlmv2", "layoutlmv3", "udop"),
    "patches": ("beit", "data2vec"),
    "sounds": (
        *("seamless_m4t", "seamless_m4t_v2", "speecht5"),
        *("wav2vec2_bert", "wav2vec2_conformer", "wavlm"),
    ),
    "windows": ("sam", "sam_hq", "swin", "swinv2", "vitdet"),
}
"""Families by the file that holds several."""
