"""Beam search: the likeliest continuations of a text, several at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.models.generation import LanguageModel, check_prompt

__all__ = ["Beams", "beam_search"]


@dataclass(frozen=True, eq=False)
class Beams:
    """The best continuations of each row, best first.

    Args:
        tokens: ``[B, N, L + T]`` ids, the prompt first, the stop token after the end.
        scores: ``[B, N]``, log-likelihood over the length penalty; -inf where there were fewer
            than N continuations.
        lengths: ``[B, N]``, new tokens, the stop token included.
    """

    tokens: Int[Tensor, "B N T"]
    scores: Float[Tensor, "B N"]
    lengths: Int[Tensor, "B N"]

    def best(self, count: int) -> Beams:
        """Of each row the ``count`` with the highest scores."""
        scores, order = self.scores.topk(min(count, self.scores.shape[1]), dim=1)
        index = order.unsqueeze(-1).expand(-1, -1, self.tokens.shape[2])
        return Beams(self.tokens.gather(1, index), scores, self.lengths.gather(1, order))

    def joined(self, other: Beams) -> Beams:
        """These and others of the same rows."""
        return Beams(
            torch.cat([self.tokens, other.tokens], dim=1),
            torch.cat([self.scores, other.scores], dim=1),
            torch.cat([self.lengths, other.lengths], dim=1),
        )


@torch.no_grad()
def beam_search(
    model: LanguageModel,
    prompt: Int[Tensor, "B L"],
    *,
    beams: int,
    max_new_tokens: int,
    stop_token: int,
    length_penalty: float = 0.6,
    layout: Layout | None = None,
    cached: bool = True,
) -> Beams:
    """The ``beams`` best continuations found, by ``log p(Y) / ((5 + |Y|) / 6)^α``.

    In each step every live hypothesis is extended by every token. Those that end are finished,
    of which the best N are kept; of the others the likeliest N live on. A row is done when none
    of its live ones can still overtake the worst of N finished ones; other rows go on. What
    lives after ``max_new_tokens`` counts as finished.

    Args:
        model: in eval mode; a ``Decoder``, or a ``Transformer``'s ``given(source)``.
        prompt: ``[B, L]`` ids, padded on the left as for ``generate``.
        beams: N, hypotheses of each row.
        max_new_tokens: tokens to add at most.
        stop_token: ends a hypothesis.
        length_penalty: α; 0 compares plain likelihoods, more favours longer ones.
        layout: where the prompt's tokens are; 0, 1, 2, … by default.
        cached: keep keys and values of the past; without, every step computes it anew.

    Raises:
        ArgumentError: on fewer beams than 1, or as ``generate``.
        LengthError: as ``generate``.

    Reference: Wu et al. 2016, "Google's Neural Machine Translation System".
    """
    if beams < 1:
        raise ArgumentError("beams", expected="1 or more", got=beams, remedy="4 is common.")
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
            # A log-likelihood only falls, so one of these is the best score still to come.
            ends = [_penalty(end, length_penalty) for end in (count + 1, max_new_tokens)]
            reach = torch.maximum(live[:, 0] / ends[0], live[:, 0] / ends[1])
            done = reach <= finished.scores[:, -1]
            if bool(done.all()):
                break
            live = live.masked_fill(done.unsqueeze(1), -torch.inf)
        tokens = torch.cat([tokens[parents], drawn], dim=1)
        following = layout.following().select(parents)
        layout = layout.select(parents).concat(following)
        if live.shape[1] != likely.shape[1]:  # else each row's model is another's of its beams
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
