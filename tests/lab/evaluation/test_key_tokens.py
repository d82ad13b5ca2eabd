"""Loss on key tokens (LongPPL): against loops, the package ``longppl``, and what is said of it."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc.errors import ArgumentError
from posenc.lab.evaluation.checkpoint import Checkpoint
from posenc.lab.evaluation.evaluate import evaluate
from posenc.lab.evaluation.report import study_page, tables, write_study
from posenc.lab.evaluation.results import Effective, Study
from posenc.lab.evaluation.suites.key_tokens import (
    _errors,
    is_key,
    longest_short,
    measure_key_tokens,
    served_by,
)
from posenc.lab.evaluation.summary import answer
from posenc.lab.evaluation.texts import Text, read_ids
from posenc.lab.experiments.text_loss import Targets
from posenc.lab.reporting.numbers import estimate
from posenc.models import Decoder
from tests.support.commands import refusal
from tests.support.tiny_models import tiny_model

SHORT, REFERENCE, LENGTHS = 16, 64, (32, 64, 128)
BLOCK = 40
WIDTH = 4


class Induction(Decoder):
    """Predicts what followed the last token where it stood before, as far back as ``back``."""

    def __init__(self, back: int = 10**6, logit: float = 8.0) -> None:
        nn.Module.__init__(self)
        self.back, self.logit, self.level = back, logit, nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor, layout: Any = None, *, cache: Any = None) -> Tensor:
        places = torch.arange(tokens.shape[1])
        distance = places.unsqueeze(1) - places
        seen = (distance > 0) & (distance <= self.back)
        same = seen & (tokens.unsqueeze(2) == tokens.unsqueeze(1))
        last = torch.where(same, places, -1).amax(-1)
        logits = torch.zeros(*tokens.shape, 256)
        logits.scatter_(2, tokens.gather(1, last + 1).unsqueeze(2), self.logit)
        return logits * (last >= 0).unsqueeze(2) + self.level


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Forty bytes over and over, of which every fifth is another one each time."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = torch.Generator().manual_seed(0)
    rows = torch.arange(33, 33 + BLOCK).repeat(60, 1)
    rows[:, ::5] = torch.randint(80, 120, rows[:, ::5].shape, generator=draw)
    path.write_bytes(bytes(rows.flatten().tolist()))
    return read_ids(path, encode=None, training=False)


def targets_of(text: Text) -> Targets:
    return Targets.spread(text.measured_pieces, width=WIDTH, longest=LENGTHS[-1], count=256)


def in_loops(model: nn.Module, text: Text) -> tuple[list[bool], dict[int, list[float]]]:
    """Whether each token is key, and its nats in contexts of each length, one pass for each."""

    def log_probability(begin: int, place: int) -> float:
        logits = model(text.measured[begin:place].unsqueeze(0))[0, -1]
        return float(logits.double().log_softmax(-1)[text.measured[place]])

    keys: list[bool] = []
    nats: dict[int, list[float]] = {n: [] for n in LENGTHS}
    with torch.no_grad():
        for end in targets_of(text).ends.tolist():
            for place in range(end - WIDTH, end):
                short = log_probability(end - WIDTH - SHORT, place)
                for n in LENGTHS:
                    nats[n].append(-log_probability(end - n - 1, place))
                long = -nats[REFERENCE][-1]
                keys.append(long - short > 2 and long > -2)
    return keys, nats


@pytest.mark.parametrize(("back", "logit"), [(10**6, 8.0), (50, 8.0), (10**6, 4.0)])
def test_key_tokens_are_those_of_loops(back: int, logit: float, text: Text) -> None:
    """A logit of 4 is -1.7 nats, or -2.5 bits."""
    model = Induction(back, logit)
    found = measure_key_tokens(model, text, LENGTHS, short=SHORT, reference=REFERENCE)
    keys, nats = in_loops(model, text)
    assert (found.count, found.tokens) == (sum(keys), len(keys))
    assert 0 < found.count < found.tokens
    assert (found.short, found.reference) == (SHORT, REFERENCE)
    for length in LENGTHS:
        chosen = [n for n, key in zip(nats[length], keys, strict=True) if key]
        log_2 = math.log(2)
        assert found.loss[length] == pytest.approx(sum(chosen) / len(chosen) / log_2, rel=1e-5)
        mean = sum(nats[length]) / len(keys)
        assert found.every[length] == pytest.approx(mean / log_2, rel=1e-5)
    assert found.loss[REFERENCE] < 3 < found.loss[32]
    assert found.every[REFERENCE] > found.loss[REFERENCE]


def test_key_tokens_are_those_of_the_package_longppl(text: Text) -> None:
    longppl = pytest.importorskip("longppl.longppl")
    model = Induction()
    targets = targets_of(text)
    assert (REFERENCE + 1 - SHORT) % WIDTH == 1  # its last part is then one token short of ours

    def keys_of(window: Tensor) -> set[int]:
        ids = window.unsqueeze(0)
        offsets = torch.arange(len(window)).unsqueeze(1) * 2 + torch.tensor([0, 1])
        encoded = {"input_ids": ids, "offset_mapping": offsets.unsqueeze(0)}

        def evaluator(ids: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=model(ids))

        evaluator.device = torch.device("cpu")  # type: ignore[attr-defined]
        found = longppl.find_key_token(
            "", evaluator, lambda *_, **__: encoded, trunc_len=SHORT, sliding_window=WIDTH
        )
        return {begin // 2 for begin, _ in found.tolist()}

    expected = 0
    for end in targets.ends.tolist():
        begin = end - REFERENCE  # a token fewer, so that its parts end where ours do
        keys = keys_of(text.measured[begin:end])
        expected += sum(key >= REFERENCE - WIDTH for key in keys)
    found = measure_key_tokens(
        model, text, (REFERENCE - 1, 128), short=SHORT, reference=REFERENCE - 1
    )
    assert found.count == expected
    assert expected > 0


def test_both_thresholds_are_strict_and_in_nats() -> None:
    long = torch.tensor([-1.0, -1.0, -2.0, -1.9, -0.5, -3.0])
    short = torch.tensor([-3.0, -3.1, -9.0, -9.0, -1.0, -9.0])
    assert is_key(long, short).tolist() == [False, True, False, True, False, False]
    assert is_key(long, short, alpha=0.4, beta=-4.0).all()


def test_a_context_serves_a_quarter_of_its_tokens_as_in_the_paper() -> None:
    assert (served_by(4096), served_by(16), served_by(3)) == (1024, 4, 1)
    assert longest_short(4096) == 4096 + 1023


def test_no_token_is_key_to_a_model_of_the_last_one(text: Text) -> None:
    found = measure_key_tokens(Induction(0), text, LENGTHS, short=SHORT, reference=REFERENCE)
    assert (found.count, found.loss) == (0, {})
    assert (found.segments, found.loss_error) == (0, {})
    assert found.every_error.keys() == found.every.keys()
    assert list(found.every) == list(LENGTHS)


@pytest.mark.parametrize(("segments", "share"), [(12, 0.3), (60, 0.1)])
def test_intervals_cover_the_mean(segments: int, share: float) -> None:
    """Of tokens that are alike within a segment, and more often key where their loss is high.

    The mean is that of a large sample; of 800 samples about 95 in 100 have it in their interval.
    """
    draw = torch.Generator().manual_seed(1)

    def sample(count: int) -> tuple[Tensor, Tensor]:
        level = torch.rand(count, 1, generator=draw)
        values = 4 * level + torch.rand(count, 16, generator=draw)
        return values, torch.rand(count, 16, generator=draw) < 2 * share * level

    values, key = sample(200_000)
    mean, every = float(values[key].mean()), float(values.mean())
    covered = of_all = 0
    for _ in range(800):
        values, key = sample(segments)
        found = float(values[key].mean())
        covered += abs(found - mean) <= _errors({8: values}, key)[8]
        whole = torch.ones_like(key)
        of_all += abs(float(values.mean()) - every) <= _errors({8: values}, whole)[8]
    assert 0.92 < covered / 800 < 0.98
    assert 0.93 < of_all / 800 < 0.97


def test_an_interval_over_equal_segments_is_the_students() -> None:
    """With the same number of key tokens in each; segments without any do not count."""
    values = torch.tensor([[1.0, 3.0, 9.0], [2.0, 4.0, 9.0], [5.0, 5.0, 9.0], [7.0, 7.0, 7.0]])
    key = torch.tensor([[True, True, False]] * 3 + [[False] * 3])
    expected = estimate([2.0, 3.0, 5.0])
    assert expected is not None
    assert _errors({8: values}, key) == {8: pytest.approx(expected.half_width)}
    assert _errors({8: values}, key & (torch.arange(4) < 1).unsqueeze(1)) == {}


def test_lengths_no_longer_than_the_short_context_are_left_out(text: Text) -> None:
    found = measure_key_tokens(Induction(), text, (8, 19, *LENGTHS), short=SHORT, reference=64)
    assert list(found.every) == list(found.loss) == list(LENGTHS)


def measured(text: Text, model: nn.Module | None = None, **fields: Any) -> Study:
    options: dict[str, Any] = {"tasks": "none", "lengths": LENGTHS, "short_context": SHORT} | fields
    checkpoint = Checkpoint("tiny", "decoder", model or Induction(), REFERENCE)
    return evaluate(checkpoint, text, **options)


def test_evaluate_measures_them_beside_the_mean(text: Text, tmp_path: Path) -> None:
    study = measured(text)
    assert study.key_tokens is not None
    assert study.key_tokens == measure_key_tokens(
        Induction(), text, LENGTHS, short=SHORT, reference=REFERENCE
    )
    (table,) = (table for table in tables(study) if table.key == "key-tokens")
    key, perplexity, every = ([cell.value for cell in row[1:]] for row in table.rows)
    found = study.key_tokens
    for row, values, errors in (
        (table.rows[0], found.loss, found.loss_error),
        (table.rows[2], found.every, found.every_error),
    ):
        ends = ((values[n] - errors[n], values[n] + errors[n]) for n in LENGTHS)
        assert [cell.small for cell in row[1:]] == [f"({a:.3f} to {b:.3f})" for a, b in ends]
    ends = ((2 ** (found.loss[n] - found.loss_error[n]), n) for n in LENGTHS)
    for cell, (low, n) in zip(table.rows[1][1:], ends, strict=True):
        high = 2 ** (found.loss[n] + found.loss_error[n])
        assert cell.small == f"({low:.3f} to {high:.3f})"
    assert f"{found.segments} with key" in table.guide
    assert key == list(study.key_tokens.loss.values())
    assert perplexity == pytest.approx([2**bits for bits in study.key_tokens.loss.values()])
    assert every == list(study.key_tokens.every.values())
    assert study.to_json()["key_tokens"]["count"] == study.key_tokens.count
    write_study(study, tmp_path)
    with (tmp_path / "measurements.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "key_token_loss"]
    assert [float(row["value"]) for row in rows] == pytest.approx(key)
    assert [int(row["length"]) for row in rows] == list(LENGTHS)
    assert {int(row["count"]) for row in rows} == {study.key_tokens.count}
    for row in rows:
        error = found.loss_error[int(row["length"])]
        value = found.loss[int(row["length"])]
        assert float(row["low"]) == pytest.approx(value - error)
        assert float(row["high"]) == pytest.approx(value + error)


def test_without_the_option_nothing_is_measured(text: Text) -> None:
    study = measured(text, short_context=None)
    assert study.key_tokens is None
    assert all(table.key != "key-tokens" for table in tables(study))


def test_a_table_without_key_tokens_has_dashes(text: Text) -> None:
    study = measured(text, Induction(0))
    (table,) = (table for table in tables(study) if table.key == "key-tokens")
    assert [cell.text for cell in table.rows[1][1:]] == ["—"] * 3
    assert "0 of" in table.guide
    assert study_page(study).render()


@pytest.mark.parametrize("short", [52, 64, 10**6])
def test_a_short_context_that_is_as_long_is_refused(short: int, text: Text) -> None:
    with pytest.raises(ArgumentError, match="four fifths of 64"):
        measured(text, short_context=short)
    assert measured(text, short_context=51).key_tokens is not None


def test_a_model_that_reads_less_than_stated_has_no_long_context(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    effective = measured(text, short_context=None).effective
    assert isinstance(effective, Effective)
    shorter = replace(effective, reference=16)
    monkeypatch.setattr("posenc.lab.evaluation.evaluate.effective_length", lambda *_, **__: shorter)
    study = measured(text)
    assert study.key_tokens is None
    assert "Not measured: key tokens; the model reads no more than 16 bytes." in answer(study)


def test_no_time_is_left_for_them(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posenc.lab.training.stopping.Deadline.left", 0.0)
    study = measured(text)
    assert study.key_tokens is None
    assert "no time left" in study.left_out["key tokens"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_of_transformers_are_measured(kind: str, text: Text) -> None:
    pytest.importorskip("transformers")
    from posenc.transformers.live import LiveDecoder

    torch.manual_seed(0)
    model = LiveDecoder(tiny_model(kind, vocab_size=256))
    found = measure_key_tokens(model, text, (32, 64), short=SHORT, reference=64)
    assert found.tokens > 0
    assert all(math.isfinite(bits) for bits in found.every.values())


@pytest.mark.parametrize(
    "given", ["0", "-1", "some", "1.5", "", "nan", "inf", "4,096", str(10**30), "0x10", "1e3"]
)
def test_short_contexts_that_are_no_number_of_tokens(given: str, tmp_path: Path) -> None:
    said = refusal("evaluate", tmp_path, "--short-context", given, "--out", tmp_path / "out")
    assert said.startswith("error: --short-context: expected ")
    assert not list(tmp_path.iterdir())


def test_models_that_predict_no_next_token_have_no_key_tokens(text: Text) -> None:
    masked = Checkpoint("tiny", "bert", nn.Linear(1, 1), REFERENCE)
    with pytest.raises(ArgumentError, match="short_context: expected none, for a bert"):
        evaluate(masked, text, short_context=SHORT)
