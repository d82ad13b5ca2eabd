"""Beam search: against all continuations, against loops, with the cache and without."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from posenc import Cache, Layout
from posenc.errors import ArgumentError
from posenc.models import Decoder, DecoderConfig, beam_search, generate
from posenc.models.generation import LanguageModel
from tests.models.text_encodings import TEXT_ENCODINGS, one_of_each_kind

STOP = 2


def make(encoding: str = "rope", vocabulary: int = 5) -> Decoder:
    """A model whose tokens depend on all that it sees; as drawn, it would repeat some."""
    torch.manual_seed(9)
    config = DecoderConfig(
        vocabulary=vocabulary,
        dim=32,
        layers=2,
        heads=4,
        encoding=encoding,
        max_length=30,
        tied=False,
    )
    model = Decoder(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".attention.output.weight", ".feed_forward.output.weight")):
                parameter.mul_(8)
    return model


def prompt(rows: int = 3, length: int = 4) -> Tensor:
    return torch.randint(5, (rows, length), generator=torch.Generator().manual_seed(4))


def likelihood(model: Decoder, start: Tensor, tail: tuple[int, ...]) -> float:
    whole = torch.cat([start, torch.tensor([tail])], dim=1)
    logp = model(whole).log_softmax(-1)[0]
    first = start.shape[1] - 1
    return float(sum(logp[first + i, token] for i, token in enumerate(tail)))


def penalty(length: int, power: float) -> float:
    return float(((5 + length) / 6) ** power)


@torch.no_grad()
def all_continuations(
    model: Decoder, start: Tensor, new: int, power: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Every continuation that ends, or has ``new`` tokens, with its score; best first."""
    found = []
    for length in range(1, new + 1):
        for tail in itertools.product(range(5), repeat=length):
            ends = tail[-1] == STOP
            if STOP in tail[:-1] or (not ends and length < new):
                continue
            found.append((likelihood(model, start, tail) / penalty(length, power), tail))
    return sorted(found, reverse=True)


@torch.no_grad()
def by_loops(
    model: LanguageModel, start: Tensor, beams: int, new: int, power: float
) -> list[tuple[float, tuple[int, ...]]]:
    """The definition for one row, without stopping early."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for count in range(1, new + 1):
        grown = []
        for score, tail in live:
            whole = torch.cat([start, torch.tensor([tail], dtype=torch.int64)], dim=1)
            logp = model(whole)[0, -1].log_softmax(-1)
            grown += [(score + float(logp[token]), (*tail, token)) for token in range(5)]
        ended = [(s / penalty(count, power), t) for s, t in grown if t[-1] == STOP]
        finished = sorted(finished + ended, reverse=True)[:beams]
        live = sorted((pair for pair in grown if pair[1][-1] != STOP), reverse=True)[:beams]
    rest = [(score / penalty(new, power), tail) for score, tail in live]
    return sorted(finished + rest, reverse=True)[:beams]


def tails(model: Decoder, beams: int, new: int, power: float) -> list[list[tuple[float, tuple]]]:  # type: ignore[type-arg]
    found = beam_search(
        model, prompt(), beams=beams, max_new_tokens=new, stop_token=STOP, length_penalty=power
    )
    rows = []
    for tokens, scores, lengths in zip(found.tokens, found.scores, found.lengths, strict=True):
        assert (scores.diff() <= 0).all()
        rows.append(
            [
                (float(score), tuple(line[4 : 4 + length].tolist()))
                for line, score, length in zip(tokens, scores, lengths.tolist(), strict=True)
            ]
        )
    return rows


class Drawn:
    """A model with one distribution of the first token after the prompt, and one of all others."""

    def __init__(self, first: list[float], then: list[float]) -> None:
        self.first, self.then = (torch.tensor(weights).log() for weights in (first, then))

    def __call__(
        self, tokens: Tensor, layout: Layout | None = None, *, cache: Cache | None = None
    ) -> Tensor:
        logits = self.then.repeat(*tokens.shape, 1)
        logits[:, 0] = self.first
        return logits

    def new_cache(self) -> Cache:
        raise NotImplementedError

    def select(self, rows: Tensor) -> Drawn:
        return self


def test_the_model_depends_on_what_it_sees() -> None:
    for vocabulary in (5, 40):
        tokens = generate(make(vocabulary=vocabulary), prompt(), max_new_tokens=9)[:, 4:].tolist()
        assert len(set(map(tuple, tokens))) == 3
        assert all(len(set(row)) > 1 for row in tokens)


@pytest.mark.parametrize(
    ("power", "first", "then", "length"),
    [
        (1.0, [0.4, 0.04, 0.5, 0.03, 0.03], [0.99, 0.002, 0.003, 0.002, 0.003], 20),
        (-1.0, [0.6, 0.04, 0.3, 0.03, 0.03], [0.003, 0.002, 0.99, 0.002, 0.003], 2),
    ],
)
def test_a_row_goes_on_while_a_longer_hypothesis_may_win(
    power: float, first: list[float], then: list[float], length: int
) -> None:
    """One that is soon as good as can be, and one that the penalty makes better to the end."""
    model, start = Drawn(first, then), torch.zeros(1, 1, dtype=torch.int64)
    options = {"beams": 1, "max_new_tokens": 20, "stop_token": STOP, "cached": False}
    found = beam_search(model, start, length_penalty=power, **options)  # type: ignore[arg-type]
    ((score, tail),) = by_loops(model, start, 1, 20, power)
    assert len(tail) == length
    assert found.tokens[0, 0, 1 : 1 + length].tolist() == list(tail)
    assert float(found.scores) == pytest.approx(score)


@pytest.mark.parametrize("power", [0.0, 1.0, -1.0])
def test_wide_beams_find_the_best_of_all(power: float) -> None:
    model = make()
    for row, found in enumerate(tails(model, 64, 3, power)):
        expected = all_continuations(model, prompt()[row : row + 1], 3, power)
        assert len(expected) == 4**3 + 4**2 + 4 + 1
        for (score, tail), (wanted, best) in zip(found, expected, strict=False):
            assert tail == best
            assert score == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(("beams", "power"), [(1, 0.6), (2, 2.0), (3, 0.0), (7, -1.0)])
def test_stopping_early_loses_nothing(beams: int, power: float) -> None:
    model = make()
    for row, found in enumerate(tails(model, beams, 9, power)):
        expected = by_loops(model, prompt()[row : row + 1], beams, 9, power)
        assert [tail for _, tail in found] == [tail for _, tail in expected]
        assert [s for s, _ in found] == pytest.approx([s for s, _ in expected], abs=1e-4)


@pytest.mark.parametrize("encoding", one_of_each_kind(TEXT_ENCODINGS))
def test_cached_equals_recomputed(encoding: str) -> None:
    model, layout = make(encoding), Layout.padded([4, 2, 3], side="left")
    cached, whole = (
        beam_search(
            model,
            prompt(),
            beams=4,
            max_new_tokens=12,
            stop_token=STOP,
            layout=layout,
            cached=cached,
        )
        for cached in (True, False)
    )
    assert torch.equal(cached.tokens, whole.tokens)
    torch.testing.assert_close(cached.scores, whole.scores, atol=1e-5, rtol=1e-5)


def test_after_the_end_comes_the_stop_token() -> None:
    found = beam_search(
        make(), prompt(), beams=3, max_new_tokens=9, stop_token=STOP, length_penalty=-2.0
    )
    assert torch.equal(found.tokens[:, :, :4], prompt().unsqueeze(1).expand(-1, 3, -1))
    place = torch.arange(9)
    after = place >= found.lengths.unsqueeze(-1)
    assert (found.tokens[:, :, 4:][after] == STOP).all()
    assert after.any()


def test_fewer_continuations_than_beams() -> None:
    found = beam_search(make(), prompt(), beams=9, max_new_tokens=1, stop_token=STOP)
    assert found.scores.isfinite().sum(1).tolist() == [5, 5, 5]
    torch.testing.assert_close(found.scores.exp()[:, :5].sum(1), torch.ones(3))
    none = beam_search(make(), prompt(), beams=2, max_new_tokens=0, stop_token=STOP)
    assert torch.equal(none.tokens[:, 0], prompt())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="beams"):
        beam_search(make(), prompt(), beams=0, max_new_tokens=3, stop_token=STOP)
    layout = Layout.padded([4, 2, 3])
    with pytest.raises(ArgumentError, match="left"):
        beam_search(make(), prompt(), beams=1, max_new_tokens=3, stop_token=STOP, layout=layout)
