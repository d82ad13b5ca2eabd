"""Generation with a cache: the time of a token in a decoder of 8 layers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from benchmarks.attention.contenders import Contender
from torch import Tensor

from posenc.attention import Cache
from posenc.lab.bench.passes import Pass, TimedCall, parse_name
from posenc.layout import Layout
from posenc.models import Decoder, DecoderConfig, generate

LAYERS, VOCABULARY = 8, 1000

TOKENS = 16
"""Tokens a round; the context grows by them."""


class DecodingContender(Contender):
    """A decoder after ``length`` tokens of context."""

    level: ClassVar[str] = "token"


class PosencDecoder(DecodingContender):
    """``posenc.models.generate``.

    Args:
        encoding: of the model; None: the case's.
    """

    def __init__(self, encoding: str | None = None) -> None:
        self.name = "posenc" if encoding is None else f"posenc, {encoding}"
        self._encoding = encoding

    def prepare(self, call: TimedCall) -> Pass:
        name, options, _ = parse_name(self._encoding or call.case.encoding)
        with torch.random.fork_rng(devices=[]):
            config = DecoderConfig(
                **_sizes(call), vocabulary=VOCABULARY, encoding=name, options=dict(options)
            )
            model = Decoder(config).to(call.x.device, call.x.dtype).eval()
        session = Session(model, model.new_cache())
        tokens = _prompt(call)
        with torch.no_grad():
            model(tokens, cache=session.cache)

        def run() -> Tensor:
            where = Layout.sequence(1, session.cache.length, device=tokens.device)
            return generate(session, tokens[:, -1:], max_new_tokens=TOKENS, layout=where)

        return Pass(run, [], call.weight, tokens=TOKENS)


@dataclass(frozen=True)
class Session:
    """A model that goes on with one cache in all calls of ``generate``."""

    model: Decoder
    cache: Cache

    def __call__(
        self, tokens: Tensor, layout: Layout | None = None, *, cache: Cache | None = None
    ) -> Tensor:
        logits: Tensor = self.model(tokens, layout, cache=cache)
        return logits

    def new_cache(self) -> Cache:
        """The one cache."""
        return self.cache

    def select(self, rows: Tensor) -> Session:
        """The same for the given batch rows."""
        return self


class LlamaDecoder(DecodingContender):
    """``generate`` of transformers with a Llama of the same sizes (rotations)."""

    name = "transformers"
    foreign: ClassVar[bool] = True

    def refusal(self, call: TimedCall) -> str | None:
        if find_spec("transformers") is None:
            return "it is not installed (pip install 'posenc[bench]')"
        return None

    def prepare(self, call: TimedCall) -> Pass:
        library, sizes = import_module("transformers"), _sizes(call)
        with torch.random.fork_rng(devices=[]):
            model = library.LlamaForCausalLM(
                library.LlamaConfig(
                    vocab_size=VOCABULARY,
                    hidden_size=sizes["dim"],
                    intermediate_size=sizes["hidden"],
                    num_hidden_layers=sizes["layers"],
                    num_attention_heads=sizes["heads"],
                    max_position_embeddings=4 * call.case.length + 4096,
                )
            )
        model = model.to(call.x.device, call.x.dtype).eval()
        cache = library.DynamicCache()
        tokens: Tensor = _prompt(call)

        def run(count: int = TOKENS) -> Tensor:
            nonlocal tokens
            tokens = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                past_key_values=cache,
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
            return tokens

        run(1)
        return Pass(run, [], call.weight, tokens=TOKENS)


def _prompt(call: TimedCall) -> Tensor:
    size = (1, call.case.length)
    return torch.zeros(size, dtype=torch.long, device=call.x.device).fill_(1)


def _sizes(call: TimedCall) -> dict[str, Any]:
    width = call.case.heads * call.case.head_dim
    hidden = 32 * round(8 * width / 3 / 32) or 32
    return {"dim": width, "heads": call.case.heads, "layers": LAYERS, "hidden": hidden}
