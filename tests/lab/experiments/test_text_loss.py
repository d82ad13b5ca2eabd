"""Loss on the same targets at every length, and by position on the same bytes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from posenc.lab.experiments import text_loss
from posenc.lab.experiments import text_loss as measure
from posenc.lab.experiments.corpus import Pieces
from posenc.models import Decoder, DecoderConfig

TEXT = torch.randint(256, (6000,), generator=torch.Generator().manual_seed(1)).byte()


class Unigram:
    """Always the same prediction: its loss depends on the target bytes alone."""

    def __init__(self) -> None:
        self.logits = torch.randn(256, generator=torch.Generator().manual_seed(2))

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.logits.expand(*tokens.shape, 256)


def random_decoder(encoding: str) -> Decoder:
    torch.manual_seed(3)
    config = DecoderConfig(vocabulary=256, dim=16, layers=2, heads=2, encoding=encoding)
    return Decoder(config).requires_grad_(requires_grad=False).eval()


def spread(width: int = 32, longest: int = 512, count: int = 40) -> text_loss.Targets:
    return text_loss.Targets.spread(Pieces((len(TEXT),)), width=width, longest=longest, count=count)


def profiled(
    text: Tensor = TEXT, *, bins: int, run: int, count: int = 3
) -> text_loss.PositionProfile:
    return text_loss.PositionProfile.spread(
        Pieces((len(text),)), length=64, bins=bins, run=run, count=count
    )


def test_targets_are_the_same_bytes_at_every_length() -> None:
    """So the loss without context is the same."""
    targets = spread()
    short, long = targets.windows(TEXT, 64), targets.windows(TEXT, 512)
    assert short.shape == (40, 65)
    assert long.shape == (40, 513)
    assert torch.equal(short, long[:, -65:])
    values = [targets.loss(Unigram(), TEXT, length) for length in (64, 128, 512)]
    assert values == pytest.approx([values[0]] * 3, abs=1e-6)


def test_targets_do_not_overlap_and_lie_in_the_text() -> None:
    ends = spread(count=1000).ends
    assert len(ends) == (len(TEXT) - 513) // 32
    assert int(ends.diff().min()) >= 32
    assert int(ends.max()) <= len(TEXT)
    assert int(ends.min()) - 512 - 1 >= 0


def test_loss_is_that_of_a_loop() -> None:
    targets = spread(8, 32, 5)
    model = random_decoder("rope")
    bits = []
    for end in targets.ends.tolist():
        window = TEXT[end - 33 : end].long()
        chances = model(window[None, :-1])[0].softmax(-1)
        bits += [-math.log2(chances[place, window[place + 1]]) for place in range(24, 32)]
    assert targets.loss(model, TEXT, 32) == pytest.approx(sum(bits) / len(bits), abs=1e-5)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_decoder("alibi")
    windows = spread(8, 32, 21).windows(TEXT, 32)
    whole, guesses = text_loss.losses(model, windows, last=8), text_loss.predictions(model, windows)
    monkeypatch.setattr(measure, "TOKENS_A_CALL", 100)
    torch.testing.assert_close(text_loss.losses(model, windows, last=8), whole)
    assert torch.equal(text_loss.predictions(model, windows), guesses)


def test_profile_scores_the_same_bytes_at_every_position() -> None:
    places, values = zip(*profiled(bins=8, run=5).loss(Unigram(), TEXT), strict=True)
    assert places == (4, 12, 20, 28, 36, 44, 52, 60)
    assert values == pytest.approx([values[0]] * 8, abs=1e-6)


def test_profile_tells_positions_apart() -> None:
    """Bin b of a model that is only good early must be that early."""

    def model(tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1]).reshape(1, -1, 1)
        logits = torch.zeros(*tokens.shape, 256)
        # The next byte of this text is known: the present one plus 1.
        following = torch.nn.functional.one_hot((tokens + 1) % 256, 256)
        return logits + 50.0 * following * (places < 16)

    counting = (torch.arange(4000) % 256).byte()
    profile = profiled(counting, bins=4, run=3, count=2)
    values = [value for _, value in profile.loss(model, counting)]
    assert values == pytest.approx([0.0, 8.0, 8.0, 8.0], abs=1e-4)


def test_profile_of_a_causal_model_is_its_loss_in_shorter_contexts() -> None:
    """Two ways to the same number: bin b of long windows, and windows of b + 1 bins."""
    model = random_decoder("alibi")
    profile = profiled(bins=4, run=6)
    ends = (profile.starts.unsqueeze(1) + (torch.arange(6) + 1) * 16).flatten()
    targets = text_loss.Targets(ends, 16)
    for index, (_, value) in enumerate(profile.loss(model, TEXT)):
        assert value == pytest.approx(targets.loss(model, TEXT, (index + 1) * 16), abs=1e-5)


def test_shortened_profile_keeps_its_segments() -> None:
    profile = profiled(bins=8, run=5)
    short = profile.shortened(16)
    assert short.length == 16
    model = random_decoder("rope")
    expected = [value for _, value in profile.loss(model, TEXT)[:2]]
    assert [value for _, value in short.loss(model, TEXT)] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("length", [8, 20, 512])
@pytest.mark.parametrize("spare", [0, 1, 3000])
def test_profile_fits_into_small_texts(length: int, spare: int) -> None:
    size = 4 * length + spare
    profile = text_loss.PositionProfile.spread(
        Pieces((size,)), length=length, bins=16, run=16, count=4
    )
    assert profile.length <= length
    last = int(profile.starts.max()) + (profile.run - 1) * profile.width + profile.length
    assert last <= size
    assert int(profile.starts.min()) - (profile.bins - 1) * profile.width >= 1
    profile.loss(Unigram(), TEXT[:size])


def test_predictions_are_the_likeliest_byte_after_the_window() -> None:
    windows = TEXT[:40].reshape(4, 10).long()

    def echo(tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens, 256).float()

    assert torch.equal(text_loss.predictions(echo, windows), windows[:, -1])


def test_byte_entropies_by_hand() -> None:
    """Counts 3 and 1 of 4, each with one added for all 256 bytes: 4/260 and 2/260.

    After 0 came 0 twice and 1 once of 3: (n + 8 p) / (3 + 8), p as by byte frequencies.
    """
    train = torch.tensor([0, 0, 0, 1], dtype=torch.uint8)
    text, places = torch.tensor([7, 0, 1], dtype=torch.uint8), torch.tensor([1, 2])
    expected = -(math.log2(4 / 260) + math.log2(2 / 260)) / 2
    assert text_loss.byte_entropy(train, text, places) == pytest.approx(expected)
    expected = -math.log2((1 + 8 * 2 / 260) / 11)
    assert text_loss.pair_entropy(train, text, places[1:]) == pytest.approx(expected)


def test_unigram_entropy_by_hand() -> None:
    """Ids 5, 5, 5, 9: of the three others two are 5 (0 are 9), and each of two ids counts one."""
    text = torch.tensor([5, 5, 5, 9])
    assert text_loss.unigram_entropy(text, torch.tensor([0])) == pytest.approx(-math.log2(3 / 5))
    assert text_loss.unigram_entropy(text, torch.tensor([3])) == pytest.approx(-math.log2(1 / 5))


PIECES = Pieces((100, 37, 900, 64, 200))
BORDERS = list(itertools.accumulate(PIECES.sizes, initial=0))


def inside(begin: int, end: int) -> bool:
    """True if [begin, end) lies in one piece."""
    return any(a <= begin and end <= b for a, b in itertools.pairwise(BORDERS))


@pytest.mark.parametrize("span", [1, 37, 64, 65, 150, 900])
def test_windows_lie_in_one_piece_and_none_is_left_out(span: int) -> None:
    begins = PIECES.begins(torch.arange(PIECES.count(span)), span).tolist()
    assert begins == [b for b in range(BORDERS[-1]) if inside(b, b + span)]


def test_windows_longer_than_every_piece_span_several() -> None:
    assert PIECES.count(1000) == 1301 - 999
    assert PIECES.begins(torch.tensor([0, 301]), 1000).tolist() == [0, 301]


def test_targets_and_profiles_straddle_no_border() -> None:
    targets = text_loss.Targets.spread(PIECES, width=16, longest=63, count=30)
    assert len(targets.ends) == 30
    assert all(inside(end - 64, end) for end in targets.ends.tolist())
    assert int(targets.ends.diff().min()) >= 16, "and do not overlap"
    profile = text_loss.PositionProfile.spread(PIECES, length=64, bins=8, run=5, count=3)
    read: list[int] = []
    profile.curve(lambda rows: read.extend(rows.flatten().tolist()) or torch.zeros(len(rows), 64))
    assert len(profile.starts) == 3
    for index, start in enumerate(profile.starts.tolist()):
        own = read[index * len(read) // 3 : (index + 1) * len(read) // 3]
        assert min(own) < start < max(own)
        assert inside(min(own), max(own) + 1)
