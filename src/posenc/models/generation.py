"""Text generation: greedy, by sampling or by beam search, with or without a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posenc.arguments import Count, Interval, Length, Natural, Rate, check, check_fields
from posenc.attention import Cache
from posenc.encoding.tensors import TokenIds
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.layout.checks import INTEGERS, require_tensor


@runtime_checkable
class LanguageModel(Protocol):
    """Interface of models for ``generate`` and ``beam_search``.

    ``Decoder`` implements it, and ``Transformer.given(source)`` returns one.
    """

    def __call__(
        self, tokens: Tensor, layout: Layout | None = None, *, cache: Cache | None = None
    ) -> Tensor: ...

    def new_cache(self) -> Cache: ...

    def select(self, rows: Tensor) -> LanguageModel: ...


@dataclass(frozen=True)
class Greedy:
    """The most likely token; on ties, the lowest id."""

    def choose(self, logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
        return logits.argmax(dim=-1)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Sampling from the model's distribution, after temperature, top-k and top-p.

    Args:
        temperature: divides the logits; below 1 sharpens.
        top_k: keep the k most likely tokens; None: all.
        top_p: keep the most likely tokens that together reach this probability (at least one),
            after ``temperature`` and ``top_k``.
        generator: the global one by default.

    Raises:
        ArgumentError: for values out of range.
    """

    temperature: Rate = 1.0
    top_k: Length | None = None
    top_p: Annotated[float, Interval(0, 1, above=True)] = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def choose(self, logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
        weights = self.distribution(logits)
        return torch.multinomial(weights, 1, generator=self.generator).squeeze(-1)

    def distribution(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Probabilities after temperature, top-k and top-p."""
        logits = logits.float() / self.temperature
        ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
        keep = self._kept(ordered)
        allowed = torch.zeros_like(keep).scatter(-1, ids, keep)
        return logits.masked_fill(~allowed, -torch.inf).softmax(dim=-1)

    def _kept(self, ordered: Float[Tensor, "B V"]) -> Bool[Tensor, "B V"]:
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        keep = (rank < (self.top_k or ordered.shape[-1])).expand_as(ordered)
        weights = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1)
        before = weights.cumsum(dim=-1) - weights
        return keep & ((before < self.top_p) | (rank == 0))


Sampling = Greedy | Sample


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: TokenIds,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
    layout: Layout | None = None,
    cached: bool = True,
) -> Int[Tensor, "B T"]:
    """The prompt continued by up to ``max_new_tokens`` tokens.

    Args:
        model: in eval mode.
        prompt: ``[B, L]`` ids; pad rows of different lengths on the left, with
            ``layout=Layout.padded(lengths, side="left")``.
        max_new_tokens: maximum number of new tokens.
        sampling: ``Greedy()`` (the default) or ``Sample(...)``.
        stop_token: ends a row, which then repeats it; generation ends when all rows have ended.
        layout: of the prompt; 0, 1, 2, … by default.
        cached: use a KV cache; otherwise every step recomputes the past, with the same result.

    Returns:
        ``[B, L + new]``, including the prompt.

    Raises:
        ArgumentError: for an empty prompt, a negative count, or padding on the right.
        LengthError: when the encoding cannot represent the next position.
    """
    layout = check_prompt(model, prompt, layout, max_new_tokens)
    check("cached", bool, cached)
    check("stop_token", Natural | None, stop_token, None)
    sampling = Greedy() if sampling is None else sampling
    if not isinstance(sampling, Greedy | Sample):
        got = type(sampling).__name__
        raise ArgumentError(
            "sampling", expected="Greedy or Sample", got=got, remedy="Use Sample(temperature=1.0)."
        )
    cache = model.new_cache() if cached else None
    tokens, part, where = prompt, prompt, layout
    stopped = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
    for _ in range(max_new_tokens):
        drawn = sampling.choose(model(part, where, cache=cache)[:, -1])
        if stop_token is not None:
            drawn = torch.where(stopped, stop_token, drawn)
            stopped = stopped | (drawn == stop_token)
        tokens = torch.cat([tokens, drawn.unsqueeze(1)], dim=1)
        following = layout.following()
        layout = layout.concat(following)
        part, where = (drawn.unsqueeze(1), following) if cached else (tokens, layout)
        if stop_token is not None and bool(stopped.all()):
            break
    return tokens


def check_prompt(
    model: LanguageModel, prompt: Tensor, layout: Layout | None, max_new_tokens: int
) -> Layout:
    """The layout of a valid prompt.

    Raises:
        ArgumentError: as ``generate``.
    """
    remedy = "Start with at least one token, in rows of one length."
    require_tensor("prompt", prompt, ("B", "L"), INTEGERS, remedy=remedy)
    if not prompt.shape[1]:
        raise ArgumentError("prompt", expected="1 token or more", got="none", remedy=remedy)
    if not isinstance(model, LanguageModel):
        got, remedy = type(model).__name__, "Use a Decoder, or transformer.given(source)."
        raise ArgumentError("model", expected="a LanguageModel", got=got, remedy=remedy)
    check("max_new_tokens", Natural, max_new_tokens)
    check("layout", Layout | None, layout, None)
    if layout is None:
        layout = Layout.sequence(prompt.shape[1], device=prompt.device)
    if layout.valid is not None and not bool(layout.valid[:, -1].all()):
        raise ArgumentError(
            "layout",
            expected="a real token at the end of every row",
            got="padding",
            remedy="Pad on the left: Layout.padded(lengths, side='left').",
        )
    return layout


@dataclass(frozen=True, eq=False)
class Beams:
    """The best continuations of each row, best first.

    Args:
        tokens: ``[B, N, L + T]`` ids, prompt included, filled with the stop token.
        scores: ``[B, N]``, log-likelihood over the length penalty; -inf beyond the number of
            continuations.
        lengths: ``[B, N]``, new tokens, including the stop token.
    """

    tokens: Int[Tensor, "B N T"]
    scores: Float[Tensor, "B N"]
    lengths: Int[Tensor, "B N"]

    def best(self, count: int) -> Beams:
        """The ``count`` highest-scoring continuations of each row."""
        scores, order = self.scores.topk(min(count, self.scores.shape[1]), dim=1)
        index = order.unsqueeze(-1).expand(-1, -1, self.tokens.shape[2])
        return Beams(self.tokens.gather(1, index), scores, self.lengths.gather(1, order))

    def joined(self, other: Beams) -> Beams:
        """Concatenate the continuations of the same rows."""
        return Beams(
            torch.cat([self.tokens, other.tokens], dim=1),
            torch.cat([self.scores, other.scores], dim=1),
            torch.cat([self.lengths, other.lengths], dim=1),
        )


@torch.no_grad()
def beam_search(
    model: LanguageModel,
    prompt: TokenIds,
    *,
    beams: int,
    max_new_tokens: int,
    stop_token: int,
    length_penalty: float = 0.6,
    layout: Layout | None = None,
    cached: bool = True,
) -> Beams:
    """The ``beams`` best continuations by ``log p(Y) / ((5 + |Y|) / 6)^α``.

    Each step extends every live hypothesis by every token, and keeps the best N finished and the
    most likely N unfinished ones. A row ends when no live hypothesis can still exceed the worst of
    N finished ones. Hypotheses live after ``max_new_tokens`` count as finished.

    Args:
        model: in eval mode; a ``Decoder``, or a ``Transformer``'s ``given(source)``.
        prompt: ``[B, L]`` ids, padded on the left as for ``generate``.
        beams: N, hypotheses per row.
        max_new_tokens: maximum number of new tokens.
        stop_token: ends a hypothesis.
        length_penalty: α; 0 compares likelihoods, larger values favour longer hypotheses.
        layout: of the prompt; 0, 1, 2, … by default.
        cached: use a KV cache; otherwise every step recomputes the past.

    Raises:
        ArgumentError: for fewer beams than 1, or as ``generate``.
        LengthError: as ``generate``.

    Reference: Wu et al. 2016, "Google's Neural Machine Translation System".
    """
    check("beams", Count, beams)
    check("stop_token", Natural, stop_token)
    check("length_penalty", float, length_penalty)
    check("cached", bool, cached)
    layout = check_prompt(model, prompt, layout, max_new_tokens)
    rows, longest = prompt.shape[0], prompt.shape[1] + max_new_tokens
    cache = model.new_cache() if cached else None
    tokens, part, where = prompt, prompt, layout
    live = torch.zeros(rows, 1, device=prompt.device)
    finished = _none(prompt, beams, longest, stop_token)
    for count in range(1, max_new_tokens + 1):
        logits = model(part, where, cache=cache)[:, -1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        likely = live.unsqueeze(-1) + logits.log_softmax(-1).view(*live.shape, -1)
        penalty = _penalty(count, length_penalty)
        ended = _padded(tokens, live.shape, longest, stop_token)
        scores = likely[..., stop_token] / penalty
        finished = finished.joined(Beams(ended, scores, torch.full_like(ended[..., 0], count)))
        finished = finished.best(beams)

        likely[..., stop_token] = -torch.inf
        live, chosen = likely.flatten(1).topk(min(beams, likely[0].numel()), dim=1)
        first = torch.arange(rows, device=prompt.device).unsqueeze(1) * likely.shape[1]
        parents = (first + chosen // likely.shape[2]).flatten()
        drawn = (chosen % likely.shape[2]).view(-1, 1)

        if count < max_new_tokens:
            # log-likelihoods only decrease: one of these bounds all future scores
            ends = [_penalty(end, length_penalty) for end in (count + 1, max_new_tokens)]
            bound = torch.maximum(live[:, 0] / ends[0], live[:, 0] / ends[1])
            done = bound <= finished.scores[:, -1]
            if bool(done.all()):
                break
            live = live.masked_fill(done.unsqueeze(1), -torch.inf)
        tokens = torch.cat([tokens[parents], drawn], dim=1)
        following = layout.following().select(parents)
        layout = layout.select(parents).concat(following)
        if live.shape[1] != likely.shape[1]:  # else rows only move within a batch row
            model = model.select(parents)
        if cache is not None:
            cache.select(parents)
        part, where = (drawn, following) if cached else (tokens, layout)
    else:
        alive = _padded(tokens, live.shape, longest, stop_token)
        counts = torch.full_like(alive[..., 0], max_new_tokens)
        scores = live / _penalty(max_new_tokens, length_penalty)
        finished = finished.joined(Beams(alive, scores, counts)).best(beams)
    return finished


def _penalty(length: int, power: float) -> float:
    return float(((5 + length) / 6) ** power)


def _none(prompt: Tensor, beams: int, length: int, fill: int) -> Beams:
    shape = (prompt.shape[0], beams)
    tokens = _padded(prompt.repeat_interleave(beams, 0), shape, length, fill)
    scores = torch.full(shape, -torch.inf, device=prompt.device)
    return Beams(tokens, scores, torch.zeros_like(tokens[..., 0]))


def _padded(tokens: Tensor, shape: tuple[int, ...], length: int, fill: int) -> Tensor:
    """``[B · n, L]`` as ``[B, n, length]``."""
    missing = length - tokens.shape[1]
    return torch.nn.functional.pad(tokens, (0, missing), value=fill).view(*shape, length)
