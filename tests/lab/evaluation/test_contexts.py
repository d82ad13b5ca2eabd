"""Contexts read once: cached reading, keys hidden at every length, losses by length, and time."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc.lab.evaluation.suites import contexts, reading
from posenc.lab.evaluation.suites.contexts import ContextSuite, hidden_in, lengths_around
from posenc.lab.evaluation.suites.needles import DEPTHS, KeyNeedles
from posenc.lab.evaluation.suites.next_token import POSITION
from posenc.lab.evaluation.suites.reading import Ask, has_cache, in_fastest_dtype, read, read_each
from posenc.lab.experiments.corpus import Pieces
from posenc.lab.experiments.text_loss import losses
from posenc.transformers.live import LiveDecoder
from tests.support.tiny_models import tiny_model

TOKENS = torch.randint(0, 100, (2, 81), generator=torch.Generator().manual_seed(0))
ASKS = {48: [Ask([[1, 2, 3], [4, 5]], [[6, 7], [8]])]}


def live(kind: str, **fields: Any) -> LiveDecoder:
    torch.manual_seed(0)
    return LiveDecoder(tiny_model(kind, **fields))


def bits(model: LiveDecoder, rows: Tensor) -> Tensor:
    return losses(model, rows, last=rows.shape[1] - 1)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "gpt_oss", "bloom"])
def test_reading_on_from_a_cache_is_reading_whole(kind: str) -> None:
    model = live(kind)
    assert has_cache(model, TOKENS[0])
    done = read(model, TOKENS, ASKS, step=7)
    torch.testing.assert_close(done.bits, bits(model, TOKENS), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["yarn", "rerope", "log_n"])
def test_a_stretched_model_reads_on_and_takes_questions_back(method: str) -> None:
    model = live("llama").extended(method, factor=4.0, length=32, options={})
    done = read(model, TOKENS, ASKS, step=16)
    torch.testing.assert_close(done.bits, bits(model, TOKENS), rtol=1e-3, atol=1e-3)


def test_a_cut_model_sees_no_more_than_its_window() -> None:
    """Eight tokens at a time, of which each sees itself and those in the 16 before the first."""
    model, rows = live("llama"), TOKENS[:, :-1]
    places = torch.arange(rows.shape[1])
    first = (places // 8 * 8 - 16).unsqueeze(1)
    visible = (places <= places.unsqueeze(1)) & (places >= first)
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = model.model(rows, attention_mask=mask.expand(2, 1, -1, -1)).logits
    nats = nn.functional.cross_entropy(expected.mT, TOKENS[:, 1:], reduction="none")
    done = read(model.cut(24), TOKENS, ASKS, step=8)
    torch.testing.assert_close(done.bits, nats.detach() / math.log(2), rtol=1e-3, atol=1e-3)


def test_an_answer_counts_if_it_is_what_greedy_decoding_writes() -> None:
    model = live("llama")
    prompts, answers = [[1, 2, 3], [4, 5]], []
    for row, prompt in zip(TOKENS, prompts, strict=True):
        text = torch.tensor([[*row[:48].tolist(), *prompt]])
        answers.append(model.model.generate(text, max_new_tokens=3)[0, text.shape[1] :].tolist())
    wrong = [[*answers[0][:2], (answers[0][2] + 1) % 100], answers[1]]
    done = read(model, TOKENS, {48: [Ask(prompts, answers), Ask(prompts, wrong)]})
    assert done.right[48].tolist() == [[1, 0], [1, 1]]


def test_each_length_is_read_as_a_whole_where_the_rotation_depends_on_it() -> None:
    model = live("llama", max_position_embeddings=32)
    model = model.extended("dynamic_ntk", factor=4.0, length=32, options={})
    assert model.varies
    assert not live("llama").varies
    done = read_each(model, TOKENS, ASKS, {32: 24, 48: 36, 80: 60})
    for length, first in {32: 24, 48: 36, 80: 60}.items():
        whole = bits(model, TOKENS[:, : length + 1])[:, first:]
        torch.testing.assert_close(done.bits[:, first:length], whole, rtol=1e-3, atol=1e-3)
    assert done.bits[:, :24].isnan().all()
    assert set(done.right) == {48}


def test_a_rotation_by_length_is_measured_at_the_lengths_alone() -> None:
    model = live("llama", vocab_size=128, max_position_embeddings=512)
    stretched = model.extended("dynamic_ntk", factor=2.0, length=512, options={})
    given = suite(model, count=3)
    plain, found = given.measure(model), given.measure(stretched)
    assert list(found.loss) == list(plain.loss)
    assert found.loss[512] == pytest.approx(plain.loss[512], abs=0.02)
    places = [at for at, _ in found.by_position]
    assert len(places) < len(plain.by_position) == contexts.BINS
    assert {length: len(values) for length, values in found.pieces["loss"].items()} == {
        256: 12,
        512: 12,
        1024: 12,
    }


class Uniform(nn.Module):
    """Every token as likely as another, of 128; ``better`` times as likely from a place on."""

    def __init__(self, begin: int = 1 << 30, better: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(128))
        self.begin, self.better = begin, better

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.weight.repeat(*tokens.shape, 1)
        if tokens.shape[1] > self.begin:
            following = tokens[:, self.begin + 1 :].unsqueeze(-1)
            share = self.better / 128
            logit = math.log(share / ((1 - share) / 127))
            logits[:, self.begin : -1].scatter_(-1, following, logit)
        return logits


def test_models_without_a_cache_are_read_whole() -> None:
    assert not has_cache(Uniform(), TOKENS[0])
    assert not has_cache(live("mamba"), TOKENS[0])


def encode(text: str) -> list[int]:
    return list(text.encode())


def decoded(ids: Any) -> str:
    return bytes(list(ids)).decode()


def test_keys_stand_at_every_depth_of_every_length() -> None:
    text = [ord("x")] * 4001
    context = hidden_in(text, (800, 1600, 4000), encode, random.Random(0))
    whole = decoded(context.tokens)
    assert len(whole) == 4001
    assert decoded(context.tokens[context.plain]) == "x" * int(context.plain.sum())
    assert list(context.asks) == [800, 1600, 4000]
    for length, (place, pairs) in context.asks.items():
        seen = whole[:place]
        for depth, (question, answer) in zip(DEPTHS, pairs, strict=True):
            assert len(answer) >= 5
            assert place + len(question) + len(answer) <= length
            told = decoded(question) + decoded(answer)
            assert seen.count(f"{told}. Remember it.") == 1
            assert abs(seen.index(told) / place - depth) < 0.13


def test_lengths_that_hold_no_key_are_not_asked_at() -> None:
    context = hidden_in([ord("x")] * 1001, (60, 1000), encode, random.Random(0))
    assert list(context.asks) == [1000]


def suite(model: nn.Module, **fields: Any) -> ContextSuite:
    ids = torch.randint(0, 128, (20_000,), generator=torch.Generator().manual_seed(1))
    made = ContextSuite(model, ids, Pieces((20_000,)), (256, 512, 1024), encode, 0, count=6)
    return replace(made, **fields)


def test_tokens_that_are_all_alike_cost_the_same_at_every_length() -> None:
    found = suite(Uniform()).measure(Uniform())
    assert list(found.loss) == [256, 512, 1024]
    assert list(found.loss.values()) == pytest.approx([7.0] * 3, abs=1e-4)
    assert [value for _, value in found.by_position] == pytest.approx([7.0] * 16, abs=1e-4)
    assert found.found(1024) == 0
    assert {len(values) for values in found.pieces["loss"].values()} == {24}
    assert {length: len(values) for length, values in found.pieces["needles"].items()} == {1024: 30}
    assert {len(values) for values in found.pieces[POSITION].values()} == {6}


def test_what_changes_at_a_place_shows_at_the_lengths_beyond_it() -> None:
    """From token 640 on, four times as likely: two bits less, but at no length before."""
    found = suite(Uniform()).measure(Uniform(begin=640, better=4.0))
    assert list(found.loss.values()) == pytest.approx([7.0, 7.0, 5.0], abs=0.05)
    places = dict(found.by_position)
    assert [x for at, x in places.items() if at < 640] == pytest.approx([7.0] * 10, abs=0.02)
    assert [x for at, x in places.items() if at > 640] == pytest.approx([5.0] * 6, abs=0.05)


def test_a_token_s_level_is_its_cost_with_few_tokens_before_it() -> None:
    model = live("llama", vocab_size=128)
    given = suite(model, lengths=(64, 200))  # 8 tokens before blocks of 32
    context = given._context(0)
    level = given._level(0, context)
    for place, begin in ((5, 0), (31, 0), (32, 24), (63, 24), (64, 56), (199, 168 - 8)):
        window = context.tokens[begin : place + 2].unsqueeze(0)
        assert level[place] == pytest.approx(float(losses(model, window, last=1)), abs=1e-3)


class Skewed(Uniform):
    """Tokens below 32 are three times as likely as others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.data[:32] = math.log(3)


def test_tokens_of_keys_do_not_count() -> None:
    """Keys are of letters and digits; the text is of what is likely, log2(3 / 192) each."""
    ids = torch.randint(0, 32, (20_000,), generator=torch.Generator().manual_seed(1))
    found = suite(Uniform(), text=ids).measure(Skewed())
    assert list(found.loss.values()) == pytest.approx([math.log2(64)] * 3, abs=1e-4)


def test_of_bytes_windows_are_measured_as_before() -> None:
    text = _text(needles=None)
    assert ContextSuite.of(live("llama"), text, (800, 900), seed=0) is None


def _text(needles: KeyNeedles | None) -> Any:
    from posenc.lab.evaluation.suites.needles import ByteNeedles, letters
    from posenc.lab.evaluation.texts import Text

    ids = torch.randint(32, 100, (4000,), generator=torch.Generator().manual_seed(0))
    nothing = torch.empty(0).long()
    pieces = Pieces((4000,))
    found = needles or ByteNeedles()
    return Text(ids, nothing, pieces, Pieces(()), "token", found, letters(), "a text", "")


def test_of_tokens_contexts_are_read() -> None:
    text = _text(KeyNeedles(encode))
    assert ContextSuite.of(live("llama"), text, (32, 900), seed=0) is None, "no room for a key"
    found = ContextSuite.of(live("llama"), text, (800, 900), seed=0)
    assert found is not None
    assert found.lengths == (800, 900)
    assert found.facts("token")["asked"] == found.count


def test_lengths_go_from_an_eighth_to_the_double() -> None:
    lengths = (1024, 1448, 2048, 2896, 4096, 5793, 8192, 11585, 16384)
    assert lengths_around(8192, encode) == lengths
    assert lengths_around(1024, encode) == (724, 1024, 1448, 2048), "no room below"


@pytest.mark.parametrize(("seconds", "dtype"), [((1, 3), "bfloat16"), ((2, 1), "float32")])
def test_the_faster_dtype_is_kept(
    seconds: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are those that were stored either way; frequencies stay exact."""
    model = live("llama")
    model.model.to(torch.bfloat16)
    stored = [weight.clone() for weight in model.parameters()]
    model.model.to(torch.float32)
    model = LiveDecoder(model.model)
    frequencies = model.model.model.rotary_emb.inv_freq.clone()
    first, second = seconds
    clock = iter([0.0, float(second), 0.0, float(first)])
    monkeypatch.setattr(reading.time, "perf_counter", lambda: next(clock))
    in_fastest_dtype(model, torch.bfloat16, TOKENS.flatten())
    assert model.model.dtype == getattr(torch, dtype)
    for weight, before in zip(model.parameters(), stored, strict=True):
        assert torch.equal(weight.to(torch.bfloat16), before)
    assert torch.equal(model.model.model.rotary_emb.inv_freq, frequencies)
