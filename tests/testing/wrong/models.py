"""Calls of models."""

from __future__ import annotations

import torch

from posenc.attention.cache import LayerCache
from posenc.models import Decoder, DecoderConfig, Sample, generate, load
from tests.testing.wrong.calls import ATTEND, IDS, B, C, Call, H, L, decoder, other_layout, rope
from tests.testing.wrong.values import any_of, not_a, real, some, truth, whole


def calls_of_models() -> tuple[Call, ...]:
    """``Decoder``, ``generate`` and ``load``."""
    model = decoder()
    ids = torch.zeros(B, L, dtype=torch.int64)
    return (
        Call(
            "DecoderConfig",
            DecoderConfig,
            lambda: {"vocabulary": 9, "dim": C, "heads": H, "layers": 1},
            {
                **{name: whole() for name in ("vocabulary", "dim", "heads", "layers")},
                **{name: whole(optional=True) for name in ("kv_heads", "head_dim", "max_length")},
                "encoding": not_a(but=(str,)),
                "options": not_a(but=(dict,)),
                "dropout": ATTEND["dropout"],
                "tied": truth(),
                "window": any_of(some((0, -1, 2.5, True, "8", 1j, object))),
            },
        ),
        Call(
            "Decoder",
            Decoder,
            lambda: {"config": model.config},
            {"config": not_a(), "encodings": any_of(not_a(optional=True), lambda source: [rope()])},
        ),
        Call(
            "Decoder()",
            model,
            lambda: {"tokens": ids},
            {
                "tokens": any_of(IDS, some((ids + 9, ids - 1))),
                "layout": any_of(not_a(optional=True), other_layout),
                "cache": any_of(not_a(optional=True), lambda source: LayerCache()),
            },
            {"tokens": ("layout",), "layout": ("tokens",)},
        ),
        Call(
            "generate",
            generate,
            lambda: {"model": model, "prompt": ids, "max_new_tokens": 1},
            {
                "model": not_a(),
                "prompt": any_of(IDS, some((ids + 9, ids[:, :0]))),
                "max_new_tokens": whole(0),
                "sampling": not_a(optional=True),
                "stop_token": whole(0, optional=True),
                "layout": any_of(not_a(optional=True), other_layout),
                "cached": truth(),
            },
            {"prompt": ("tokens", "layout"), "layout": ("prompt", "tokens")},
        ),
        Call(
            "Sample",
            Sample,
            dict,
            {
                "temperature": real(above=0.0),
                "top_k": whole(optional=True),
                "top_p": real(above=0.0, below=1.0),
                "generator": not_a(optional=True),
            },
        ),
        Call("load", load, lambda: {"folder": "nowhere"}, {"folder": not_a(but=(str,))}),
    )
