"""Beam search."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.arguments import Count, Natural, check
from posenc.encoding.tensors import TokenIds
from posenc.layout import Layout
from posenc.models.generation import LanguageModel, check_prompt


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
    layout = check_prompt(model, prompt, layout, max_new_tokens, cached=cached)
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
