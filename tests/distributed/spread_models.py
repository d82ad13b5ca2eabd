"""Jobs that compare models whose tokens are on several ranks with models on one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from posenc import Encoding, Layout, distributed
from posenc.attention import LatentAttention
from posenc.errors import PosencError
from posenc.models import (
    Deberta,
    DebertaConfig,
    Decoder,
    DecoderConfig,
    EncoderConfig,
    MaskedLM,
    Transformer,
    TransformerConfig,
    generate,
)
from posenc.testing.subject import spread
from tests.distributed.equality import SPLITS
from tests.lab.training.spread import build

LENGTHS = 26, 17
"""Tokens of a target (or of the only text), and of a source."""

VOCABULARY = 11

SHAPE: dict[str, Any] = {"dim": 16, "heads": 4, "kv_heads": 2, "max_length": 32}

OPTIONS: dict[str, dict[str, Any]] = {"conv": {"causal": True}, "abacus": {"digits": [1, 2, 3]}}


def model_of(kind: str, encoding: str) -> nn.Module:
    """A small model, the same on every rank."""
    torch.manual_seed(3)
    model: nn.Module
    match kind:
        case "decoder":
            options = OPTIONS.get(encoding, {})
            model = Decoder(
                DecoderConfig(
                    **SHAPE, vocabulary=VOCABULARY, layers=2, encoding=encoding, options=options
                )
            )
        case "masked_lm":
            model = MaskedLM(
                EncoderConfig(**SHAPE, vocabulary=VOCABULARY, layers=2, encoding=encoding)
            )
        case "deberta":
            model = Deberta(
                DebertaConfig(
                    **{**SHAPE, "kv_heads": 4}, vocabulary=VOCABULARY, layers=2, absolute=encoding
                )
            )
        case "transformer":
            first, second, cross = encoding.split()
            model = Transformer(
                TransformerConfig(
                    **SHAPE,
                    source_vocabulary=VOCABULARY,
                    target_vocabulary=VOCABULARY,
                    encoder_layers=2,
                    decoder_layers=2,
                    encoder_encoding=first,
                    decoder_encoding=second,
                    cross_encoding=cross,
                )
            )
    for part in [module for module in model.modules() if isinstance(module, Encoding)]:
        spread(part)
    return model.double()


def texts(kind: str) -> list[tuple[Tensor, Layout]]:
    """Tokens and layouts of target and source, with padding but for a decoder alone."""
    generator, padding = torch.Generator().manual_seed(2), 0 if kind == "decoder" else 6
    found = []
    for length in LENGTHS:
        tokens = torch.randint(VOCABULARY, (2, length), generator=generator)
        padded = Layout.padded([length, length - padding])
        found.append((tokens, padded if padding else Layout.sequence(length)))
    return found


def outputs(model: nn.Module, kind: str, parts: list[tuple[Tensor, Layout]]) -> Tensor:
    """Logits of real tokens, of others zero."""
    (tokens, layout), (source, source_layout) = parts
    if kind == "transformer":
        logits = model(source, tokens, target_layout=layout, source_layout=source_layout)
    else:
        logits = model(tokens, layout)
    found: Tensor = logits if layout.valid is None else logits * layout.valid.unsqueeze(-1)
    return found


def shard(
    group: dist.ProcessGroup, kind: str, split: str
) -> list[tuple[Tensor, tuple[Tensor, Layout]]]:
    """Indices of this rank's tokens, and the tokens with their layout, of target and source."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    found = []
    for length, (tokens, layout) in zip(LENGTHS, texts(kind), strict=True):
        of_target = length == LENGTHS[0]
        index = (
            SPLITS[split](ranks, rank)
            if of_target
            else distributed.contiguous(length, ranks, ranks - 1 - rank)
        )
        found.append((index, (tokens[:, index], distributed.take(layout, index))))
    return found


def difference(
    group: dist.ProcessGroup, kind: str, encoding: str, form: str, split: str, *, ddp: bool
) -> float:
    """Largest difference of logits and gradients between several ranks and one.

    Args:
        ddp: by ``DistributedDataParallel`` instead of ``sum_gradients``.
    """
    alone = model_of(kind, encoding)
    expected = outputs(alone, kind, texts(kind))
    expected.sin().sum().backward()  # type: ignore[no-untyped-call]
    model = model_of(kind, encoding)  # drawn last, so that both draw alike as they compute
    distributed.parallelize(model, group, form=form)
    (index, _), _ = parts = shard(group, kind, split)
    wrapped = DistributedDataParallel(model, process_group=group) if ddp else model
    found = outputs(wrapped, kind, [part for _, part in parts])
    scale = dist.get_world_size(group) if ddp else 1
    (scale * found.sin().sum()).backward()  # type: ignore[no-untyped-call]
    if not ddp:
        distributed.sum_gradients(model, group)
    off = [(found - expected[:, index]).abs().max().item() if len(index) else 0.0]
    for mine, one in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        wanted = torch.zeros_like(one) if one.grad is None else one.grad
        off.append((mine.grad - wanted).abs().max().item() / max(1.0, wanted.abs().max().item()))
    return max(off)


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    """Messages with which models and calls are refused."""
    tokens, _ = texts("decoder")[0]
    decoder = model_of("decoder", "rope")
    distributed.parallelize(decoder, group)
    calls = {
        kind: partial(distributed.parallelize, build(kind), group)
        for kind in ("text_classifier", "sequence_classifier", "vision_transformer", "swin")
    }
    sizes = {"kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2}
    latent = LatentAttention(dim=8, heads=2, encoding=Encoding(), **sizes)  # type: ignore[arg-type]
    calls["latent"] = partial(distributed.parallelize, nn.ModuleList([decoder, latent]), group)
    calls |= {
        "layout": partial(decoder, tokens),
        "cache": partial(generate, decoder, tokens, max_new_tokens=2),  # type: ignore[arg-type]
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = ""
        except PosencError as refusal:
            messages[name] = str(refusal)
    return messages
