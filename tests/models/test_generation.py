"""Generation: cached equals recomputed, rows go on as if alone, sampling keeps its word."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc import Layout
from posenc.errors import ArgumentError, LengthError
from posenc.models import Decoder, DecoderConfig, Greedy, Sample, generate
from tests.models.text_encodings import TEXT_ENCODINGS, one_of_each_kind

NAMES = [*one_of_each_kind(TEXT_ENCODINGS), "rope+alibi"]


def make(encoding: str = "rope") -> Decoder:
    torch.manual_seed(3)
    config = DecoderConfig(
        vocabulary=31, dim=32, layers=2, heads=4, encoding=encoding, max_length=30, tied=False
    )
    model = Decoder(config).eval()
    with torch.no_grad():  # as drawn, it repeats a token, whatever it sees
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def prompt(rows: int = 3, length: int = 8) -> Tensor:
    return torch.randint(31, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("encoding", NAMES)
def test_cached_equals_recomputed(encoding: str) -> None:
    model = make(encoding)
    cached = generate(model, prompt(), max_new_tokens=15)
    assert torch.equal(cached, generate(model, prompt(), max_new_tokens=15, cached=False))
    assert cached.shape == (3, 23)
    assert torch.equal(cached[:, :8], prompt())


@pytest.mark.parametrize("encoding", NAMES)
def test_padded_rows_go_on_as_if_alone(encoding: str) -> None:
    model, lengths = make(encoding), [8, 5, 3]
    layout = Layout.padded(lengths, side="left")
    together = generate(model, prompt(), max_new_tokens=12, layout=layout)
    for row, length in enumerate(lengths):
        alone = generate(model, prompt()[row : row + 1, 8 - length :], max_new_tokens=12)
        assert torch.equal(together[row, 8 - length :], alone[0])


def test_greedy_takes_the_likeliest() -> None:
    model = make()
    expected = model(prompt())[:, -1].argmax(-1)
    assert torch.equal(generate(model, prompt(), max_new_tokens=1)[:, -1], expected)


def test_stopped_rows_repeat_the_stop_token_and_end_early() -> None:
    model = make()
    free = generate(model, prompt(), max_new_tokens=10)
    stop = int(free[0, 9])
    stopped = generate(model, prompt(), max_new_tokens=10, stop_token=stop)
    for before, after in zip(free[:, 8:], stopped[:, 8:], strict=True):
        hits = (before == stop).nonzero()
        end = int(hits[0]) + 1 if len(hits) else 10
        kept = min(end, len(after))
        assert torch.equal(after[:kept], before[:kept])
        assert (after[end:] == stop).all()
    one = generate(model, prompt()[:1], max_new_tokens=10, stop_token=stop)
    assert one.shape[1] <= 10


def test_top_k_and_top_p_cut_off_the_rest() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert Sample(top_k=2).distribution(logits)[0].gt(0).tolist() == [True, True, False, False]
    for p, kept in ((0.4, 1), (0.5, 1), (0.6, 2), (0.75, 2), (0.8, 3), (1.0, 4)):
        assert int(Sample(top_p=p).distribution(logits).gt(0).sum()) == kept, p
    both = Sample(top_k=2, top_p=0.6)  # the first has 2/3 of two
    assert int(both.distribution(logits).gt(0).sum()) == 1
    torch.testing.assert_close(
        Sample(top_k=2).distribution(logits)[0, :2], torch.tensor([2 / 3, 1 / 3])
    )
    cold = Sample(temperature=0.5).distribution(logits)[0]
    torch.testing.assert_close(cold[0] / cold[1], torch.tensor(4.0))


def test_low_temperature_is_greedy() -> None:
    model = make()
    cold = generate(model, prompt(), max_new_tokens=10, sampling=Sample(temperature=1e-4))
    assert torch.equal(cold, generate(model, prompt(), max_new_tokens=10, sampling=Greedy()))


def test_a_seed_gives_the_same_sample() -> None:
    def draw(seed: int) -> Tensor:
        sampling = Sample(generator=torch.Generator().manual_seed(seed))
        return generate(make(), prompt(), max_new_tokens=15, sampling=sampling)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_a_learned_table_ends() -> None:
    model = make("learned")
    with pytest.raises(LengthError, match="0 to 29"):
        generate(model, prompt(), max_new_tokens=24)
    assert generate(model, prompt(), max_new_tokens=23).shape == (3, 31)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": 0.0}, "temperature"), ({"top_k": 0}, "top_k"), ({"top_p": 0.0}, "top_p")],
)
def test_sampling_options_out_of_domain(options: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Sample(**options)  # type: ignore[arg-type]


def test_prompts_that_cannot_be_continued() -> None:
    model = make()
    with pytest.raises(ArgumentError, match="at least one token"):
        generate(model, prompt(length=0), max_new_tokens=1)
    with pytest.raises(ArgumentError, match="max_new_tokens"):
        generate(model, prompt(), max_new_tokens=-1)
    with pytest.raises(ArgumentError, match="left"):
        generate(model, prompt(), max_new_tokens=1, layout=Layout.padded([8, 5, 3]))
